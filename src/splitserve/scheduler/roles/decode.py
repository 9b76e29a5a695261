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

Requests that wait for memory, in the pre-allocation queue or to be computed here, get it in one order: a request of
either queue overtakes older ones of both only within the bounds of `PoolAdmission.may_overtake`.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from splitserve.core.batch import StepPlan
from splitserve.core.clock import Clock
from splitserve.core.errors import KVTransferError, MissingBootstrapError, SplitserveError
from splitserve.core.request import DisaggregationMode, Request
from splitserve.core.steps import WaitReason
from splitserve.core.timeline import Span, Stage
from splitserve.scheduler.admission import AdmissionTurn
from splitserve.scheduler.pacing import DecodePacing
from splitserve.scheduler.ports import Outbox
from splitserve.scheduler.roles.role import PairedRole, RoomEntry, RoomQueue
from splitserve.scheduler.running import RunningSet
from splitserve.transfer.decode_manager import DecodeManager
from splitserve.transfer.manager import TransferKit
from splitserve.transfer.receiver import KVReceiver
from splitserve.transfer.state import KVPoll

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class DecodeEntry(RoomEntry[KVReceiver]):
    """A request on a decode worker and its receiving end."""

    # True: this worker decoded it before and released its KV. Prefill computes the KV of all tokens but the last again.
    is_retracted: bool = False

    @property
    def num_tokens(self) -> int:
        """Number of tokens with KV to receive."""
        request = self.request
        return request.num_tokens - 1 if self.is_retracted else request.num_prefill_tokens


class DecodePreallocQueue(RoomQueue[DecodeEntry]):
    """Requests in their handshake or waiting for memory."""

    def __init__(self, kit: TransferKit[DecodeManager], clock: Clock, running: RunningSet) -> None:
        super().__init__()
        self._kit = kit
        self._cache = running.cache
        self._clock = clock
        self._running = running
        # The first request that found no room in the last call; None: no such request.
        self.first_without_room: Request | None = None

    def add(self, request: Request, is_retracted: bool = False) -> None:
        """Open the receiving end. Raises MissingBootstrapError, DuplicateRoomError or CapacityError.

        A retracted request gets a new room on the same prefill worker, and is admitted before all new requests here.
        """
        bootstrap = request.bootstrap
        if bootstrap is None:
            raise MissingBootstrapError("a decode worker needs bootstrap_room: send requests through the router")
        if is_retracted:
            bootstrap = dataclasses.replace(bootstrap, key=bootstrap.key.successor())
        receiver = self._kit.manager.receiver(request.rid, bootstrap)
        request.bootstrap, request.is_synthetic = bootstrap, bootstrap.is_fake
        self[request.rid] = DecodeEntry(request, receiver, is_retracted=is_retracted)

    def pop_preallocated(
        self, *, may_admit: bool = True, ahead: Request | None = None, reason: WaitReason = WaitReason.NONE
    ) -> tuple[list[DecodeEntry], list[DecodeEntry]]:
        """Return (requests with pages that are announced now, failed requests).

        `ahead`, `reason`: the first request that waits in another queue, and why. New requests that rank behind it must
        overtake it.
        """
        states = {rid: entry.end.poll() for rid, entry in self.items()}
        failed = [self.pop(rid) for rid, state in states.items() if state is KVPoll.FAILED]
        announced: list[DecodeEntry] = []
        ready = [self[rid] for rid, state in states.items() if state is KVPoll.WAITING_FOR_INPUT]
        back = sorted((e.request for e in ready if e.is_retracted), key=lambda r: r.rank)
        new = self._running.order([e.request for e in ready if not e.is_retracted])
        for entry in ready:
            if entry.request.timeline.stage != "prealloc":
                entry.request.timeline.enter("prealloc", self._clock.now())
        turn = AdmissionTurn(self._running.admission, ahead, reason)
        holders = self._running.holders()
        self.blocked = WaitReason.NONE
        for request in sorted((*back, *turn.in_order(new)), key=lambda r: not r.is_probe):
            entry, lacks = self[request.rid], WaitReason.NONE
            if not (may_admit or request.is_probe):
                lacks = WaitReason.RETRACTED
            elif self._kit.slots.available_size() == 0:
                lacks = WaitReason.METADATA_SLOTS
                turn.blocked = turn.blocked or request
            elif not turn.is_over and turn.try_admit(request, max_prefix=entry.num_tokens, running=holders):
                self._preallocate(entry)
                announced.append(self.pop(request.rid))
                continue
            request.timeline.reason = lacks or turn.reason
            self.blocked = self.blocked or request.timeline.reason
        self.first_without_room = turn.blocked
        return announced, failed

    def _preallocate(self, entry: DecodeEntry) -> None:
        """Give an admitted request its pages and slot, and announce them."""
        request, slots, windows = entry.request, self._kit.slots, self._cache.windows
        self._cache.extend(request, entry.num_tokens, is_arriving=True)
        entry.metadata_index = slots.alloc()
        request.timeline.enter("transfer", self._clock.now(), Stage.KV_WAIT)
        entry.end.init(
            request.pages,
            entry.metadata_index,
            num_tokens=entry.num_tokens,
            num_held_tokens=request.num_computed_tokens,
            prompt_ids=request.tokens(0, entry.num_tokens) if entry.is_retracted or request.is_synthetic else (),
            window_pages=windows.of(request.pages) if windows else (),
        )


class DecodeTransferQueue(RoomQueue[DecodeEntry]):
    """Requests with KV in transfer into pages they hold."""

    @property
    def num_tokens_pre_allocated(self) -> int:
        """Return the tokens that the requests hold pages for."""
        return sum(entry.num_tokens for entry in self.values())


class DecodeRole(PairedRole[DecodeEntry]):
    """A role that decodes like the null role, and takes prompts that prefill workers compute."""

    mode = DisaggregationMode.DECODE

    def __init__(
        self,
        running: RunningSet,
        outbox: Outbox,
        clock: Clock,
        kit: TransferKit[DecodeManager],
        pacing: DecodePacing | None,
    ) -> None:
        """`pacing`: pauses for prompts of the same host. None: steps follow each other at once."""
        super().__init__(running, outbox, clock, kit)
        self._pacing = pacing
        self._prealloc = DecodePreallocQueue(kit, clock, running)
        self._transfer = DecodeTransferQueue()
        self._queues = (self._prealloc, self._transfer)
        self._num_local = 0

    def around_step(self, plan: StepPlan) -> AbstractContextManager[None]:
        return nullcontext() if self._pacing is None or plan.has_prompts else self._pacing.step()

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
        arrived, failed_in_transfer = self._transfer.pop_finished()
        for entry in arrived:
            try:
                self._begin_decoding(entry)
            except KVTransferError as error:
                entry.error = error
                failed_in_transfer.append(entry)
        # Free pages go to retracted requests before any new one.
        waiting = self.running.waiting.values() if self._prealloc else ()
        first_local = min(waiting, key=lambda request: request.rank, default=None)
        announced, failed = self._prealloc.pop_preallocated(
            may_admit=not len(self.running.retraction), ahead=first_local, reason=self.running.last_reason
        )
        self.first_without_room = self._prealloc.first_without_room
        self._transfer.update((entry.request.rid, entry) for entry in announced)
        for entry in failed + failed_in_transfer:
            self._fail(entry)
        for request in self.running.retraction.pop_uncopied():
            self._request_again(request)

    def abort(self, rid: str, error: SplitserveError | None) -> None:
        ended = (entry.request for entry in self._leases)
        leased = next((request for request in ended if request.rid == rid and not request.is_finished), None)
        if leased is None:
            super().abort(rid, error)
        else:
            # A retracted request that cannot continue before its lease ends, which releases its pages.
            self._outbox.fail(leased, error)

    def num_waiting(self) -> int:
        return len(self._prealloc) + len(self._transfer) + len(self.running.prebuilt) + super().num_waiting()

    def queue_state(self) -> dict[str, int]:
        return {
            **super().queue_state(),
            "num_decode_prealloc_queue_reqs": len(self._prealloc),
            "num_decode_transfer_queue_reqs": len(self._transfer),
            "num_tokens_pre_allocated": self._transfer.num_tokens_pre_allocated,
            "num_local_prefill_reqs_total": self._num_local,
        }

    def queued(self) -> dict[str, Iterable[Request]]:
        return {**super().queued(), "prealloc": self._prealloc.requests, "transfer": self._transfer.requests}

    def _begin_decoding(self, entry: DecodeEntry) -> None:
        """Read the metadata row of a transferred request, and queue the request for the running batch.

        Raises KVTransferError if the metadata row belongs to another room, or misses what was requested.
        """
        request = entry.request
        began = self._clock.now()
        assert entry.metadata_index is not None
        self._cache.resolve_exchange(request)
        row = self._kit.metadata.get_buf(entry.metadata_index, entry.end.key)
        request.num_computed_tokens = entry.num_tokens
        self._cache.share(request)
        if not entry.is_retracted:
            # The tokens of a retracted request were sent before. Its row has a token of a substitute request.
            request.num_cached_tokens = row.num_cached_tokens
            logprob = row.logprob if request.return_logprob else None
            state = row.hidden_state if request.return_hidden_states else None
            if request.return_hidden_states and state is None:
                remedy = "send both workers the same request"
                raise KVTransferError(entry.end.key.room, f"prefill sent no hidden state of the prompt: {remedy}")
            request.append(row.output_id, logprob, state)
            request.draft_state = row.draft_state
        now = self._clock.now()
        request.timeline.add(Span(Stage.METADATA, began, now))
        request.timeline.enter("decoding", now, Stage.PREBUILT)
        self._close_room(entry)
        if request.is_finished:
            self._cache.release(request, publish=True)
        elif entry.is_retracted or request.is_probe:
            self.running.prebuilt.appendleft(request)
        else:
            self.running.prebuilt.append(request)
        self._outbox.send(request)

    def _request_again(self, request: Request) -> None:
        """Have prefill compute a retracted request's KV, in a new room; compute it here if prefill cannot.

        A prefill that is not connected may be gone, and a lookup would find that only at its deadline.
        """
        if request.bootstrap is not None and self._kit.manager.is_ready(request.bootstrap):
            try:
                self._prealloc.add(request, is_retracted=True)
            except SplitserveError as error:
                logger.warning("request %s is computed again here: %s", request.rid, error.message)
            else:
                return
        self.running.retraction.add(request, self._clock.now())

    def _fail(self, entry: DecodeEntry) -> None:
        if not entry.is_retracted:
            super()._fail(entry)
            return
        self._num_failed += 1
        logger.warning("request %s is computed again here: %s", entry.request.rid, entry.failure().message)
        self._leases.append(entry)

    def _free(self, entry: DecodeEntry) -> None:
        """Release what a failed transfer held."""
        if self._cache.holds(entry.request):
            self._cache.resolve_exchange(entry.request)
            self._cache.release(entry.request, publish=False)
        self._close_room(entry)
        if entry.is_retracted and not entry.request.is_finished:
            self.running.retraction.add(entry.request, self._clock.now())
