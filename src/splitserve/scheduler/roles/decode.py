"""The decode role: receive the KV of prompts, generate the tokens.

1. `accept` opens the receiving end, which finds the prefill worker and does the handshake. The request waits in the
   `DecodePreallocQueue` for that, then for memory. A request without a room has no prefill worker to compute its
   prompt: it is handled as in a colocated worker.
2. `advance` takes requests in the policy's order while pages, a row and a metadata slot are free. It allocates them and
   announces them to the prefill worker, with the number of tokens that a prefix cache has here: prefill writes only the
   rest. The requests move to the `DecodeTransferQueue`.
3. `advance` takes requests with KV that has arrived and commits them: it reads the metadata row, checks that the row
   belongs to the room, and appends its token as the first output. The prompt counts as computed: no forward pass runs
   (a prebuilt batch). Its whole pages are published to the prefix cache. The plan moves the requests into the free
   places of the running batch.
4. It decodes like any other request until it finishes. If the pool is full it may be retracted (retraction.py). With a
   copy it resumes by itself. Without one it goes through 2 and 3 again, in a new room, and prefill computes all its
   tokens. If prefill cannot, this worker does.

Requests that wait for memory, in the pre-allocation queue or to be computed here, get it in one order: neither queue
overtakes the other for good.

A request that fails or is aborted while the prefill worker may still write keeps its pages, in the lease table, until
its receiver is quiescent.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass

from splitserve.cache.kv_cache import PagedKVCache
from splitserve.core.clock import Clock
from splitserve.core.errors import KVTransferError, MissingBootstrapError, SplitserveError
from splitserve.core.request import FAKE_BOOTSTRAP_HOST, DisaggregationMode, Request, RoomKey
from splitserve.scheduler.ports import Outbox
from splitserve.scheduler.roles.colocated import ColocatedRole, QueueState
from splitserve.scheduler.running import RunningSet
from splitserve.transfer.lease import LeaseTable
from splitserve.transfer.manager import KVManager, TransferKit
from splitserve.transfer.metadata import MetadataBuffers, ReqToMetadataIdxAllocator
from splitserve.transfer.receiver import KVReceiver
from splitserve.transfer.state import KVPoll


@dataclass(slots=True, eq=False)
class DecodeEntry:
    """A request on a decode worker and its receiving end."""

    request: Request
    key: RoomKey
    receiver: KVReceiver
    # True: this worker decoded it before and released its KV. Prefill computes the KV of all tokens but the last again.
    is_retracted: bool = False
    # The row that the prefill worker writes, from pre-allocation until the entry ends.
    metadata_index: int | None = None
    # Set if the transfer succeeded but its data cannot be used.
    error: SplitserveError | None = None

    @property
    def num_tokens(self) -> int:
        """Number of tokens with KV to receive."""
        request = self.request
        return request.num_tokens - 1 if self.is_retracted else request.num_prefill_tokens

    def failure(self) -> SplitserveError:
        return self.error or self.receiver.failure()


class DecodePreallocQueue:
    """Requests in their handshake or waiting for memory.

    `admit` gives an entry's request its row, its cached prefix and a promise of pages, or returns False; `order` sorts
    requests for admission.
    """

    def __init__(
        self,
        manager: KVManager,
        cache: PagedKVCache,
        slots: ReqToMetadataIdxAllocator,
        clock: Clock,
        admit: Callable[[DecodeEntry], bool],
        order: Callable[[Collection[Request]], Collection[Request]],
    ) -> None:
        self._manager = manager
        self._cache = cache
        self._slots = slots
        self._clock = clock
        self._admit = admit
        self._order = order
        self._entries: dict[str, DecodeEntry] = {}
        # Rank of the request that found no room in the last call; None: no such request.
        self.first_without_room: tuple[int, int] | None = None

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, request: Request, is_retracted: bool = False) -> None:
        """Open the receiving end. Raises MissingBootstrapError, DuplicateRoomError or CapacityError.

        A retracted request gets a new room on the same prefill worker, and is admitted before all new requests here.
        """
        bootstrap = request.bootstrap
        if bootstrap is None:
            raise MissingBootstrapError("a decode worker needs bootstrap_room: send requests through the router")
        if is_retracted:
            bootstrap = dataclasses.replace(bootstrap, key=bootstrap.key.successor())
        receiver = self._manager.receiver(request.rid, bootstrap)
        request.bootstrap = bootstrap
        self._entries[request.rid] = DecodeEntry(request, bootstrap.key, receiver, is_retracted)

    def pop_preallocated(
        self, *, may_admit: bool = True, before: tuple[int, int] | None = None
    ) -> tuple[list[DecodeEntry], list[DecodeEntry]]:
        """Return (requests with pages that are announced now, failed requests).

        `before`: rank of the first request that waits for room in another queue; new requests behind it are not
        admitted.
        """
        states = {rid: entry.receiver.poll() for rid, entry in self._entries.items()}
        failed = [self._entries.pop(rid) for rid, state in states.items() if state is KVPoll.FAILED]
        announced: list[DecodeEntry] = []
        ready = [self._entries[rid] for rid, state in states.items() if state is KVPoll.WAITING_FOR_INPUT]
        back = sorted((e.request for e in ready if e.is_retracted), key=lambda r: r.rank)
        new = self._order(
            [e.request for e in ready if not e.is_retracted and (before is None or e.request.rank < before)]
        )
        self.first_without_room = None
        for request in (*back, *new) if may_admit else ():
            # The first that does not fit stops those behind it, so that large requests do not starve.
            if not self._preallocate(self._entries[request.rid]):
                self.first_without_room = request.rank
                break
            announced.append(self._entries.pop(request.rid))
        return announced, failed

    def remove(self, rid: str) -> DecodeEntry | None:
        return self._entries.pop(rid, None)

    def _preallocate(self, entry: DecodeEntry) -> bool:
        request = entry.request
        if self._slots.available_size() == 0:
            return False
        if not self._admit(entry):
            return False
        self._cache.extend(request, entry.num_tokens, is_arriving=True)
        entry.metadata_index = self._slots.alloc()
        request.timeline.enter("transfer", self._clock.now())
        asked = request.tokens(0, entry.num_tokens) if entry.is_retracted else ()
        entry.receiver.init(
            request.pages,
            entry.metadata_index,
            num_tokens=entry.num_tokens,
            num_held_tokens=request.num_computed_tokens,
            prompt_ids=asked,
            window_pages=self._cache.windows.of(request.pages),
        )
        return True


class DecodeTransferQueue:
    """Requests with KV in transfer into pages they hold."""

    def __init__(self, metadata: MetadataBuffers, cache: PagedKVCache) -> None:
        self._metadata = metadata
        self._cache = cache
        self._entries: dict[str, DecodeEntry] = {}

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def num_tokens_pre_allocated(self) -> int:
        """Return the tokens that the requests hold pages for."""
        return sum(entry.num_tokens for entry in self._entries.values())

    def extend(self, entries: list[DecodeEntry]) -> None:
        for entry in entries:
            self._entries[entry.request.rid] = entry

    def pop_transferred(self) -> tuple[list[DecodeEntry], list[DecodeEntry]]:
        """Return (requests ready to decode, with their first token; failed requests)."""
        states = {rid: entry.receiver.poll() for rid, entry in self._entries.items()}
        arrived = [self._entries.pop(rid) for rid, state in states.items() if state is KVPoll.SUCCESS]
        failed = [self._entries.pop(rid) for rid, state in states.items() if state is KVPoll.FAILED]
        for entry in arrived:
            self._commit(entry)
        return [e for e in arrived if e.error is None], failed + [e for e in arrived if e.error is not None]

    def remove(self, rid: str) -> DecodeEntry | None:
        return self._entries.pop(rid, None)

    def entries(self) -> list[DecodeEntry]:
        return list(self._entries.values())

    def _commit(self, entry: DecodeEntry) -> None:
        """Bring the request into the state it would have if its prompt had been computed here."""
        assert entry.metadata_index is not None
        request = entry.request
        self._cache.settle(request)
        try:
            row = self._metadata.get_buf(entry.metadata_index, entry.key)
        except KVTransferError as error:
            entry.error = error
            return
        request.num_computed_tokens = entry.num_tokens
        self._cache.share(request)
        if entry.is_retracted:
            # Its tokens were sent before. The row's token is ignored: prefill computed a substitute request for one
            # greedy token.
            return
        request.num_cached_tokens = row.num_cached_tokens
        request.append(row.output_id, row.logprob if request.return_logprob else None)


logger = logging.getLogger(__name__)


class DecodeRole(ColocatedRole):
    """A role that decodes like the null role, and takes prompts that prefill workers compute."""

    mode = DisaggregationMode.DECODE

    def __init__(
        self,
        running: RunningSet,
        cache: PagedKVCache,
        outbox: Outbox,
        clock: Clock,
        kit: TransferKit,
    ) -> None:
        super().__init__(running, cache, outbox, clock)
        self._slots = kit.slots
        self._prealloc = DecodePreallocQueue(kit.manager, cache, kit.slots, clock, self._admit, running.order)
        self._transfer = DecodeTransferQueue(kit.metadata, cache)
        self._leases: LeaseTable[DecodeEntry] = LeaseTable()
        self._num_local = 0
        self._num_failed = 0

    @property
    def first_without_room(self) -> tuple[int, int] | None:
        return self._prealloc.first_without_room

    def accept(self, request: Request) -> None:
        if request.bootstrap is None:
            self._num_local += 1
            super().accept(request)
            return
        request.timeline.enter("handshake", self._clock.now())
        self._prealloc.add(request)

    def advance(self) -> None:
        for entry in self._leases.reclaim():
            self._free(entry)
        arrived, failed_in_transfer = self._transfer.pop_transferred()
        for entry in arrived:
            self._take_in(entry)
        # Free pages go to retracted requests before any new one.
        waiting = self.running.waiting if self._prealloc else ()
        first_local = min((request.rank for request in waiting), default=None)
        announced, failed = self._prealloc.pop_preallocated(
            may_admit=not len(self.running.retraction), before=first_local
        )
        self._transfer.extend(announced)
        for entry in failed + failed_in_transfer:
            self._fail(entry)
        for request in self.running.retraction.pop_uncopied():
            self._request_again(request)

    def abort(self, rid: str, error: SplitserveError | None) -> None:
        entry = self._prealloc.remove(rid) or self._transfer.remove(rid)
        leased = self._leased(rid)
        if entry is None and leased is None:
            super().abort(rid, error)
            return
        request = entry.request if entry else leased
        assert request is not None
        if error is None:
            self._outbox.forget(request)
        else:
            self._outbox.fail(request, error)
        if entry is None:
            # A retracted request: its pages are released when its lease ends.
            return
        entry.receiver.abort(
            error.message if error else "the client of the decode side left",
            status_code=error.http_status if error else 499,
        )
        self._leases.hold(entry, entry.receiver, len(request.pages))

    def holders(self) -> list[Request]:
        entries = [*self._transfer.entries(), *self._leases.items()]
        transferring = [e.request for e in entries if self._cache.holds(e.request)]
        return [*super().holders(), *transferring]

    def num_waiting(self) -> int:
        return len(self._prealloc) + len(self._transfer) + len(self.running.prebuilt) + super().num_waiting()

    def is_idle(self) -> bool:
        return super().is_idle() and not (self._prealloc or self._transfer or self._leases)

    def queue_state(self) -> QueueState:
        return {
            "num_decode_prealloc_queue_reqs": len(self._prealloc),
            "num_decode_transfer_queue_reqs": len(self._transfer),
            "num_tokens_pre_allocated": self._transfer.num_tokens_pre_allocated,
            "pages_leased": self._leases.num_pages,
            "metadata_slots_total": self._slots.size,
            "metadata_slots_free": self._slots.available_size(),
            "num_transfer_failed_reqs_total": self._num_failed,
            "num_local_prefill_reqs_total": self._num_local,
        }

    def _take_in(self, entry: DecodeEntry) -> None:
        """Close the room of a request that arrived, free its metadata slot, and queue it for the running batch."""
        request = entry.request
        request.timeline.enter("decoding", self._clock.now())
        self._close_room(entry)
        if request.is_finished:
            self._cache.release(request, publish=True)
        elif entry.is_retracted:
            self.running.prebuilt.appendleft(request)
        else:
            self.running.prebuilt.append(request)
        self._outbox.tell(request)

    def _admit(self, entry: DecodeEntry) -> bool:
        """Admit a request if its prompt fits beside what running requests need. Return whether it was admitted."""
        return self.running.admission.try_admit(
            entry.request, max_prefix=entry.num_tokens, running=self.running.holders()
        )

    def _request_again(self, request: Request) -> None:
        """Have prefill compute a retracted request's KV, in a new room; compute it here if prefill cannot."""
        if request.bootstrap is not None and request.bootstrap.host != FAKE_BOOTSTRAP_HOST:
            try:
                self._prealloc.add(request, is_retracted=True)
            except SplitserveError as error:
                logger.warning("request %s is computed again here: %s", request.rid, error.message)
            else:
                return
        self.running.retraction.add(request, self._clock.now())

    def _leased(self, rid: str) -> Request | None:
        """Return a retracted request that cannot continue before its lease ends."""
        requests = (entry.request for entry in self._leases.items())
        return next((r for r in requests if r.rid == rid and not r.is_finished), None)

    def _fail(self, entry: DecodeEntry) -> None:
        self._num_failed += 1
        if entry.is_retracted:
            logger.warning("request %s is computed again here: %s", entry.request.rid, entry.failure().message)
        else:
            self._outbox.fail(entry.request, entry.failure())
        self._leases.hold(entry, entry.receiver, len(entry.request.pages))

    def _free(self, entry: DecodeEntry) -> None:
        """Release what a failed transfer held."""
        if self._cache.holds(entry.request):
            self._cache.settle(entry.request)
            self._cache.release(entry.request, publish=False)
        self._close_room(entry)
        if entry.is_retracted and not entry.request.is_finished:
            self.running.retraction.add(entry.request, self._clock.now())

    def _close_room(self, entry: DecodeEntry) -> None:
        if entry.metadata_index is not None:
            self._slots.free(entry.metadata_index)
        entry.receiver.clear()
