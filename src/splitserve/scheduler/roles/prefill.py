"""The prefill role: compute prompts, send their KV, never decode.

1. `accept` opens the sending end. The request waits in the `PrefillBootstrapQueue` until decode's pages are known and a
   metadata slot is free.
2. `advance` moves it to the waiting queue; the plan admits it and computes it chunk by chunk. An idle worker first
   gathers the prompts of a burst (gathering.py).
3. `finish_step` sends the new whole pages after each chunk. After the last chunk it also sends the metadata row (the
   first token and its data), and moves the request to the in-flight queue.
4. `advance` finishes it when every byte is proven in place: its pages enter the prefix cache, and the front end gets
   the result.

Decode workers may request the KV of tokens by themselves, after they had to release it (`_accept_requested`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from splitserve.cache.kv_cache import PagedKVCache
from splitserve.cache.pages import kv_to_page_num
from splitserve.core.batch import StepPlan, StepResult
from splitserve.core.clock import Clock
from splitserve.core.errors import GrammarError, MissingBootstrapError, PromptTooLongError, SplitserveError
from splitserve.core.messages import TransferStats
from splitserve.core.request import (
    RETRACTED_PRIORITY,
    BootstrapInfo,
    DisaggregationMode,
    FinishReason,
    FinishType,
    Request,
)
from splitserve.core.sampling import ResolvedSampling
from splitserve.core.steps import WaitReason
from splitserve.core.timeline import Attribute, Span, Stage
from splitserve.scheduler.gathering import ANNOUNCEMENTS, LONG_TOKENS, PromptGathering
from splitserve.scheduler.ports import Outbox
from splitserve.scheduler.roles.role import PairedRole, RoomEntry, RoomQueue
from splitserve.scheduler.running import RunningSet, ScheduledBatch, take_result
from splitserve.transfer.manager import TransferKit
from splitserve.transfer.metadata import MetadataBuffers, MetadataRow
from splitserve.transfer.prefill_manager import PrefillManager, RequestedPrompt
from splitserve.transfer.sender import KVSender
from splitserve.transfer.state import KVPoll


@dataclass(slots=True, eq=False)
class PrefillEntry(RoomEntry[KVSender]):
    """A request on a prefill worker and its sending end."""

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
                key=self.end.key,
                output_id=request.output_ids[-1],
                num_cached_tokens=request.num_cached_tokens,
                logprob=request.output_logprobs[-1] if request.output_logprobs else None,
                hidden_state=request.hidden_states[-1] if request.hidden_states else None,
                draft_state=request.draft_state,
            ),
        )
        # Only decode's answer has states.
        request.hidden_states = []
        self._send(cache, kv_to_page_num(request.num_prefill_tokens, cache.page_size), is_last=True)

    def _send(self, cache: PagedKVCache, end: int, *, is_last: bool = False) -> None:
        if end > self.num_pages_sent or is_last:
            pages = self.request.pages[self.num_pages_sent : end]
            index = self.metadata_index if is_last else None
            window_pages = cache.windows.of(pages) if cache.windows else ()
            self.end.send(pages, is_last=is_last, metadata_index=index, window_pages=window_pages)
            self.num_pages_sent = end


class PrefillBootstrapQueue(RoomQueue[PrefillEntry]):
    """Requests with pages that decode has not announced yet."""

    def __init__(self, kit: TransferKit[PrefillManager]) -> None:
        super().__init__()
        self._kit = kit

    def add(self, request: Request) -> None:
        """Open the sending end. Raises MissingBootstrapError, DuplicateRoomError or CapacityError."""
        bootstrap = request.bootstrap
        if bootstrap is None:
            raise MissingBootstrapError("a prefill worker needs bootstrap_room: send requests through the router")
        sender = self._kit.manager.sender(request.rid, bootstrap, request.num_prefill_tokens)
        self[request.rid] = PrefillEntry(request, sender)

    def pop_bootstrapped(self) -> tuple[list[PrefillEntry], list[PrefillEntry]]:
        """Return (requests that may be computed now, in order of arrival; failed requests)."""
        ready: list[PrefillEntry] = []
        failed: list[PrefillEntry] = []
        self.blocked = WaitReason.NONE
        for entry in sorted(self.values(), key=lambda e: -e.request.priority):
            state = entry.end.poll()
            if state is KVPoll.FAILED:
                failed.append(entry)
            elif state is KVPoll.WAITING_FOR_INPUT and self._kit.slots.available_size() > 0:
                entry.metadata_index = self._kit.slots.alloc()
                ready.append(entry)
            elif state is KVPoll.WAITING_FOR_INPUT:
                self.blocked = WaitReason.METADATA_SLOTS
        for entry in ready + failed:
            del self[entry.request.rid]
        return ready, failed


class PrefillRole(PairedRole[PrefillEntry]):
    mode = DisaggregationMode.PREFILL

    def __init__(self, running: RunningSet, outbox: Outbox, clock: Clock, kit: TransferKit[PrefillManager]) -> None:
        super().__init__(running, outbox, clock, kit)
        self._bootstrap = PrefillBootstrapQueue(kit)
        # Entries that are bootstrapped and not yet fully computed (waiting or running), by rid.
        self._computing: dict[str, PrefillEntry] = {}
        self._gathering = PromptGathering()
        # Entries with their last chunk in flight.
        self._inflight: RoomQueue[PrefillEntry] = RoomQueue()
        self._queues = (self._bootstrap, self._inflight)
        self._takes_requested = True

    def accept(self, request: Request) -> None:
        request.timeline.enter("bootstrap", self._clock.now())
        self._bootstrap.add(request)

    def advance(self) -> None:
        for entry in self._leases.reclaim():
            self._free(entry)
        for prompt in self._kit.manager.take_requested_prompts() if self._takes_requested else ():
            self._accept_requested(prompt)
        ready, failed = self._bootstrap.pop_bootstrapped()
        for entry in ready:
            entry.request.timeline.enter("waiting", self._clock.now())
            self._computing[entry.request.rid] = entry
            self._gathering.arrived(self._clock.now(), is_first=not self.running.waiting)
            self.running.add(entry.request)
        done, failed_in_flight = self._inflight.pop_finished()
        for entry in done:
            self._finish(entry)
        failed_computing = [e for e in self._computing.values() if e.end.poll() is KVPoll.FAILED]
        for entry in failed_computing:
            self._stop_computing(entry)
        for entry in failed + failed_in_flight + failed_computing:
            self._fail(entry)

    def finish_step(self, batch: ScheduledBatch, result: StepResult) -> None:
        for request, step, outcome in zip(batch.requests, batch.plan.requests, result.requests, strict=True):
            if request.is_finished:
                continue
            take_result(request, step, outcome)
            entry = self._computing[request.rid]
            # The next `advance` removes a room that failed while its chunk was computed.
            if entry.end.poll() is KVPoll.FAILED:
                continue
            if request.finish is not None and request.finish.type is FinishType.ABORT:
                failure = request.grammar.failure if request.grammar else None
                self.abort(request.rid, failure or GrammarError(str(request.finish.message)))
            elif outcome.token_id is None:
                entry.send_chunk(self._cache)
                # Decode reads no more of the window than the next chunk does.
                self._cache.forget(request)
            else:
                request.timeline.enter("transfer", self._clock.now(), Stage.TRANSFER_DONE)
                self._stop_computing(entry)
                entry.send_last_chunk(self._cache, self._kit.metadata)
                self._inflight[request.rid] = entry

    def observe(self, plan: StepPlan, seconds: float) -> None:
        super().observe(plan, seconds)
        self._gathering.observe(plan.num_tokens, seconds)

    def seconds_to_gather(self) -> float:
        now, waiting = self._clock.now(), self.running.waiting.values()
        if not waiting or self.running.running or now >= self._gathering.latest_end:
            return 0.0
        missing = [self.running.num_missing_tokens(request) for request in waiting]
        if sum(missing) >= self.running.token_budget or max(missing) >= LONG_TOKENS:
            return 0.0
        num_coming = self._num_coming_tokens(now)
        num_tokens = min(sum(missing) + num_coming, self.running.token_budget)
        return max(0.0, self._gathering.ends_at(num_tokens, num_coming) - now)

    def _num_coming_tokens(self, now: float) -> int:
        """Return how many tokens of requests that decode will soon announce a step could compute with the others."""
        requests = self._bootstrap.requests
        if not requests or now >= requests[0].timeline.since + ANNOUNCEMENTS or not self._kit.slots.available_size():
            return 0
        missing = map(self.running.num_missing_tokens, requests)
        return sum(num_tokens for num_tokens in missing if num_tokens < LONG_TOKENS)

    def num_waiting(self) -> int:
        return len(self._bootstrap) + super().num_waiting()

    def hold(self, is_held: bool) -> None:
        self._takes_requested = not is_held

    def queue_state(self) -> dict[str, int]:
        return {
            **super().queue_state(),
            "num_prefill_bootstrap_queue_reqs": len(self._bootstrap),
            "num_prefill_inflight_queue_reqs": len(self._inflight),
            "num_tokens_pre_allocated": sum(request.num_prefill_tokens for request in self._inflight.requests),
        }

    def queued(self) -> dict[str, Iterable[Request]]:
        return {**super().queued(), "bootstrap": self._bootstrap.requests, "inflight": self._inflight.requests}

    def _accept_requested(self, prompt: RequestedPrompt) -> None:
        """Accept a prompt that decode requests, before all new requests. The front end does not know it."""
        rid = f"{prompt.rid}@{prompt.key}"
        params = ResolvedSampling(max_new_tokens=1, temperature=0.0)
        # No lookup is needed: its room is announced already.
        bootstrap = BootstrapInfo("", 0, prompt.key)
        request = Request(rid, prompt.token_ids, params, bootstrap=bootstrap, priority=RETRACTED_PRIORITY)
        request.timeline.enter("received", self._clock.now())
        self._outbox.open(request)
        try:
            self.accept(request)
        except SplitserveError as error:
            self._kit.manager.refuse_requested(prompt.key, error)
            self._outbox.fail(request, error)
            return
        if kv_to_page_num(request.num_prompt_tokens, self._cache.page_size) > self._cache.rows.table.shape[1]:
            self.abort(rid, PromptTooLongError(f"{request.num_prompt_tokens} tokens do not fit this prefill worker"))

    def _take_out(self, rid: str) -> PrefillEntry | None:
        entry = super()._take_out(rid)
        if entry is None and (entry := self._computing.get(rid)) is not None:
            self._stop_computing(entry)
        return entry

    def _stop_computing(self, entry: PrefillEntry) -> None:
        del self._computing[entry.request.rid]
        self.running.remove(entry.request.rid)
        if self._cache.holds(entry.request):
            # The request keeps its pages until its bytes are sent, which may take longer than many steps.
            self._cache.stop_growing(entry.request)

    def _finish(self, entry: PrefillEntry) -> None:
        request = entry.request
        # A prefill worker generates one token, whatever total the request specifies.
        request.finish = FinishReason(FinishType.LENGTH)
        stats = entry.end.stats()
        if stats is not None:
            path: dict[str, Attribute] = {"backend": entry.end.context.config.transfer_backend}
            _add_transfer_spans(request, stats, path | ({"path": entry.end.path} if entry.end.path else {}))
        self._outbox.send(request, transfer=stats)
        self._free(entry)

    def _free(self, entry: PrefillEntry) -> None:
        """Release an entry's pages, row and slot, and clear its room: the only place that does so.

        The computed KV is correct however the transfer ended, so it is published in any case.
        """
        if self._cache.holds(entry.request):
            self._cache.resolve_exchange(entry.request)
            self._cache.release(entry.request, publish=True)
        self._close_room(entry)


def _add_transfer_spans(request: Request, stats: TransferStats, path: dict[str, Attribute]) -> None:
    """Add a span per part of the KV transfer. Time after the last forward pass is exposed, the rest overlapped.

    `path`: attributes that all parts have.
    """
    overlapped_until = request.timeline.entered.get("transfer", 0.0)
    for part in stats.parts:
        seconds = part.end - part.start
        exposed = max(0.0, part.end - max(part.start, overlapped_until))
        values: dict[str, Attribute] = {
            "bytes": part.num_bytes,
            "writes": part.num_writes,
            "gb_s": part.num_bytes / seconds / 1e9 if seconds > 0 else 0.0,
            "exposed_ms": exposed * 1e3,
            **path,
        }
        request.timeline.add(Span(Stage.TRANSFER, part.start, part.end, values))
