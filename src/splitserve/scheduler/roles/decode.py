"""The decode role: receive the KV of prompts, generate the tokens.

1. `accept` opens the receiving end. The request waits in the pre-allocation queue for its handshake, then for memory. A
   request without a room has no prefill worker to compute its prompt: it is handled as in a colocated worker.
2. `advance` announces its pages to the prefill worker and moves it to the transfer queue.
3. `advance` takes requests with KV that has arrived: the prompt counts as computed and the first token is there (a
   prebuilt batch: no forward pass). The plan moves them into the free places of the running batch.
4. It decodes like any other request until it finishes. If the pool is full it may be retracted (retraction.py). With a
   copy it resumes by itself. Without one it goes through 2 and 3 again, in a new room, and prefill computes all its
   tokens. If prefill cannot, this worker does.

Requests that wait for memory, in the pre-allocation queue or to be computed here, get it in one order: neither queue
overtakes the other for good.

A request that fails or is aborted while the prefill worker may still write keeps its pages, in the lease table, until
its receiver is quiescent.
"""

from __future__ import annotations

import logging

from splitserve.cache.kv_cache import PagedKVCache
from splitserve.core.clock import Clock
from splitserve.core.errors import SplitserveError
from splitserve.core.request import FAKE_BOOTSTRAP_HOST, DisaggregationMode, Request
from splitserve.scheduler.decode_queues import DecodeEntry, DecodePreallocQueue, DecodeTransferQueue
from splitserve.scheduler.ports import Outbox
from splitserve.scheduler.roles.colocated import ColocatedRole, QueueState
from splitserve.scheduler.running import RunningSet
from splitserve.transfer.lease import LeaseTable
from splitserve.transfer.manager import TransferKit

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
        waiting = self._set.waiting if self._prealloc else ()
        first_local = min((request.rank for request in waiting), default=None)
        announced, failed = self._prealloc.pop_preallocated(may_admit=not len(self._set.retraction), before=first_local)
        self._set.admits_before = self._prealloc.first_without_room
        self._transfer.extend(announced)
        for entry in failed + failed_in_transfer:
            self._fail(entry)
        for request in self._set.retraction.pop_uncopied():
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
        return len(self._prealloc) + len(self._transfer) + len(self._set.prebuilt) + super().num_waiting()

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
            self._set.prebuilt.appendleft(request)
        else:
            self._set.prebuilt.append(request)
        self._outbox.tell(request)

    def _admit(self, entry: DecodeEntry) -> bool:
        """Admit a request if its prompt fits beside what running requests need. Return whether it was admitted."""
        return self._set.admission.try_admit(entry.request, max_prefix=entry.num_tokens, running=self._set.holders())

    def _request_again(self, request: Request) -> None:
        """Have prefill compute a retracted request's KV, in a new room; compute it here if prefill cannot."""
        if request.bootstrap is not None and request.bootstrap.host != FAKE_BOOTSTRAP_HOST:
            try:
                self._prealloc.add(request, is_retracted=True)
            except SplitserveError as error:
                logger.warning("request %s is computed again here: %s", request.rid, error.message)
            else:
                return
        self._set.retraction.add(request, self._clock.now())

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
            self._set.retraction.add(entry.request, self._clock.now())

    def _close_room(self, entry: DecodeEntry) -> None:
        if entry.metadata_index is not None:
            self._slots.free(entry.metadata_index)
        entry.receiver.clear()
