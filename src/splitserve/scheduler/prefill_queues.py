"""The queues of a prefill worker.

The life of a request on a prefill worker:
1. `PrefillBootstrapQueue.add` opens a sender. The request waits until decode has announced its pages.
2. `pop_bootstrapped` takes requests with announced pages while metadata slots are free. They enter the waiting queue
   and are computed chunk by chunk. After each chunk `PrefillEntry.send_chunk` sends the new whole pages.
3. The last chunk is sent with the metadata row: the first token and its data. The request moves to the
   `PrefillInflightQueue` until every byte is proven in place.
4. `pop_finished` returns it: done, or failed with the cause. Its pages may be reused when the sender is quiescent.
"""

from __future__ import annotations

from dataclasses import dataclass

from splitserve.cache.kv_cache import PagedKVCache
from splitserve.cache.pages import kv_to_page_num
from splitserve.core.errors import MissingBootstrapError
from splitserve.core.request import Request, RoomKey
from splitserve.transfer.manager import KVManager
from splitserve.transfer.metadata import MetadataBuffers, MetadataRow, ReqToMetadataIdxAllocator
from splitserve.transfer.sender import KVSender
from splitserve.transfer.state import KVPoll


@dataclass(slots=True, eq=False)
class PrefillEntry:
    """A request on a prefill worker and its sending end."""

    request: Request
    key: RoomKey
    sender: KVSender
    # Metadata row of this worker, from `pop_bootstrapped` until the entry ends.
    metadata_index: int | None = None
    # Pages [0, num_pages_sent) of the prompt were passed to the sender.
    num_pages_sent: int = 0

    def send_chunk(self, cache: PagedKVCache) -> None:
        """Send the whole pages computed since the last call. The prompt is not finished yet."""
        self._send(cache, self.request.num_computed_tokens // cache.page_size)

    def send_last_chunk(self, cache: PagedKVCache, metadata: MetadataBuffers) -> None:
        """Send the remaining pages, the last one perhaps partly filled, and then the metadata row."""
        request = self.request
        assert self.metadata_index is not None
        metadata.set_buf(
            self.metadata_index,
            MetadataRow(
                key=self.key,
                output_id=request.output_ids[-1],
                num_cached_tokens=request.num_cached_tokens,
                logprob=request.output_logprobs[-1] if request.output_logprobs else None,
            ),
        )
        self._send(cache, kv_to_page_num(request.num_prefill_tokens, cache.page_size), is_last=True)

    def _send(self, cache: PagedKVCache, end: int, *, is_last: bool = False) -> None:
        if end > self.num_pages_sent or is_last:
            pages = self.request.pages[self.num_pages_sent : end]
            index = self.metadata_index if is_last else None
            self.sender.send(pages, is_last=is_last, metadata_index=index, window_pages=cache.windows.of(pages))
            self.num_pages_sent = end


class PrefillBootstrapQueue:
    """Requests with pages that decode has not announced yet."""

    def __init__(self, manager: KVManager, slots: ReqToMetadataIdxAllocator) -> None:
        self._manager = manager
        self._slots = slots
        self._entries: dict[str, PrefillEntry] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, request: Request) -> None:
        """Open the sending end. Raises MissingBootstrapError, DuplicateRoomError or CapacityError."""
        bootstrap = request.bootstrap
        if bootstrap is None:
            raise MissingBootstrapError("a prefill worker needs bootstrap_room: send requests through the router")
        sender = self._manager.sender(request.rid, bootstrap)
        self._entries[request.rid] = PrefillEntry(request, bootstrap.key, sender)

    def pop_bootstrapped(self) -> tuple[list[PrefillEntry], list[PrefillEntry]]:
        """Return (requests that may be computed now, in order of arrival; failed requests)."""
        ready: list[PrefillEntry] = []
        failed: list[PrefillEntry] = []
        for entry in self._entries.values():
            state = entry.sender.poll()
            if state is KVPoll.FAILED:
                failed.append(entry)
            elif state is KVPoll.WAITING_FOR_INPUT and self._slots.available_size() > 0:
                entry.metadata_index = self._slots.alloc()
                ready.append(entry)
        for entry in ready + failed:
            del self._entries[entry.request.rid]
        return ready, failed

    def remove(self, rid: str) -> PrefillEntry | None:
        return self._entries.pop(rid, None)


class PrefillInflightQueue:
    """Requests with a last chunk in flight."""

    def __init__(self) -> None:
        self._entries: dict[str, PrefillEntry] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, entry: PrefillEntry) -> None:
        self._entries[entry.request.rid] = entry

    def pop_finished(self) -> tuple[list[PrefillEntry], list[PrefillEntry]]:
        """Return (requests with KV that is proven in place, failed requests)."""
        states = {rid: entry.sender.poll() for rid, entry in self._entries.items()}
        done = [self._entries.pop(rid) for rid, state in states.items() if state is KVPoll.SUCCESS]
        failed = [self._entries.pop(rid) for rid, state in states.items() if state is KVPoll.FAILED]
        return done, failed

    def remove(self, rid: str) -> PrefillEntry | None:
        return self._entries.pop(rid, None)

    def entries(self) -> list[PrefillEntry]:
        return list(self._entries.values())
