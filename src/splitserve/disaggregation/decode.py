"""The decode side's queues.

The life of a request on a decode worker:
1. `DecodePreallocQueue.add` opens a receiver, which finds the prefill worker and shakes hands with it.
2. `pop_preallocated` takes those that have shaken hands, in the policy's order, while pages, a row and a metadata
   slot are free: it allocates them and announces them to the prefill side, with the tokens whose KV a prefix cache
   has here: prefill writes the rest only. They move to the `DecodeTransferQueue`.
3. `pop_transferred` takes those whose bytes are all in place and commits them: the metadata row is read, checked to
   belong to the room, and its token becomes the first output. The prompt counts as computed: no forward pass runs. Its
   whole pages are published to the prefix cache.
4. What failed comes back with its cause. Its pages may be reused when the receiver is quiescent, not before.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection
from dataclasses import dataclass

from splitserve.cache.kv_cache import PagedKVCache
from splitserve.clock import Clock
from splitserve.core.request import Request, RoomKey
from splitserve.disaggregation.metadata import MetadataBuffers, ReqToMetadataIdxAllocator
from splitserve.disaggregation.ports import ManagerPort, ReceiverPort
from splitserve.disaggregation.state import KVPoll
from splitserve.errors import KVTransferError, MissingBootstrapError, SplitserveError


@dataclass(slots=True, eq=False)
class DecodeEntry:
    """A request on the decode side with its receiving end."""

    request: Request
    key: RoomKey
    receiver: ReceiverPort
    # It has been decoding here, and gave its KV up: prefill computes it again, of all tokens but the last.
    is_retracted: bool = False
    # The row the prefill side writes, from pre-allocation until the entry ends.
    metadata_index: int | None = None
    # Set where the hand-over succeeded but what arrived is not usable.
    error: SplitserveError | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens whose KV is to come."""
        request = self.request
        return request.num_tokens - 1 if self.is_retracted else request.num_prefill_tokens

    def failure(self) -> SplitserveError:
        return self.error or self.receiver.failure()


class DecodePreallocQueue:
    """Requests that shake hands or wait for memory.

    `admit` gives an entry's request its row, what a prefix cache has of its KV, and a promise of pages, or says no;
    `order` is the one in which they are asked.
    """

    def __init__(
        self,
        manager: ManagerPort,
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
        # Rank of whoever found no room at the last look; None: nobody.
        self.first_without_room: tuple[int, int] | None = None

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, request: Request, is_retracted: bool = False) -> None:
        """Open the receiving end. Raises MissingBootstrapError, DuplicateRoomError or CapacityError.

        A retracted request goes through a new room with the same prefill worker, before all that are new here.
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
        """(those whose pages are announced now, those that failed).

        `before`: rank of somebody who waits for room elsewhere, whom nobody new is to pass.
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
            # The first that does not fit stops those behind it, so that a large request is never starved.
            if not self._preallocate(self._entries[request.rid]):
                self.first_without_room = request.rank
                break
            announced.append(self._entries.pop(request.rid))
        return announced, failed

    def num_tokens_pre_allocated(self) -> int:
        """Prompt tokens of the requests still waiting for pages."""
        return sum(entry.request.num_prefill_tokens for entry in self._entries.values())

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
    """Requests whose KV is on its way into pages they hold."""

    def __init__(self, metadata: MetadataBuffers, cache: PagedKVCache) -> None:
        self._metadata = metadata
        self._cache = cache
        self._entries: dict[str, DecodeEntry] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def extend(self, entries: list[DecodeEntry]) -> None:
        for entry in entries:
            self._entries[entry.request.rid] = entry

    def pop_transferred(self) -> tuple[list[DecodeEntry], list[DecodeEntry]]:
        """(those ready to decode, with their first token; those that failed)."""
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
        """Make the request what it would be had its prompt been computed here."""
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
            # Its tokens are told already; the row's belongs to a request that asked for one greedy token.
            return
        request.num_cached_tokens = row.num_cached_tokens
        request.append(row.output_id, row.logprob if request.return_logprob else None)
