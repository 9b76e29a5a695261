"""The queues of a decode worker.

The life of a request on a decode worker:
1. `DecodePreallocQueue.add` opens a receiver, which finds the prefill worker and does the handshake.
2. `pop_preallocated` takes requests after their handshake, in the policy's order, while pages, a row and a metadata
   slot are free. It allocates them and announces them to the prefill worker, with the number of tokens that a prefix
   cache has here: prefill writes only the rest. The requests move to the `DecodeTransferQueue`.
3. `pop_transferred` takes requests with all bytes in place and commits them: it reads the metadata row, checks that the
   row belongs to the room, and appends its token as the first output. The prompt counts as computed: no forward pass
   runs. Its whole pages are published to the prefix cache.
4. Both return failed requests with the cause. Their pages may be reused when the receiver is quiescent, not before.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection
from dataclasses import dataclass

from splitserve.cache.kv_cache import PagedKVCache
from splitserve.core.clock import Clock
from splitserve.core.errors import KVTransferError, MissingBootstrapError, SplitserveError
from splitserve.core.request import Request, RoomKey
from splitserve.transfer.manager import KVManager
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
