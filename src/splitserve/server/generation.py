"""One client request in flight: its samples from admission to their ends, and their answers as they grow.

1. Nothing is held before `Generation.updates` is iterated; then it holds a slot in the request table and the samples'
   stream. At that time the answers already contain what other workers sent to the client (`samples.py`).
2. Every output becomes a Delta of its sample's answer: its tokens, and their text up to a stop string. It is timed for
   the metrics.
3. A stop string ends its sample here. The scheduler is ordered to stop, without waiting for its answer.
4. A sample that was ordered to end (/abort_request) is answered with its output so far. A sample that the scheduler
   aborted for another reason fails the whole request, with the scheduler's status and message.
5. However the iteration ends, the samples still running are aborted and the slot is released.
6. Logprobs count as memory of requests, because a small request may ask for gigabytes of them. A request that exceeds
   what is left of it fails. Much of them is formatted in a thread, because it takes longer than a step.

The text of a stop token is omitted unless the request includes it; its id stays in `output_ids`, because it was
generated.

This module does not know the formats of answers.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec

from splitserve.api.intake import RequestMemory, Reservation
from splitserve.api.samples import FanOut, Sample
from splitserve.api.schemas import JournalEntry
from splitserve.core.batch import HiddenState, TokenLogprob
from splitserve.core.errors import CapacityError, InvalidRequestError, RequestAbortedError, SplitserveError
from splitserve.core.messages import SpeculationStats, TokenOutput, TransferStats
from splitserve.core.request import DisaggregationMode, FinishReason, FinishType
from splitserve.core.timeline import StageReport
from splitserve.server.detokenizer import Detokenizer
from splitserve.server.front_end import FrontEnd
from splitserve.server.request_times import RequestTimes

# Memory of one logprob with its token in an answer, and of one byte of a hidden state, bytes: measured, with its part
# of the formatted answer.
_LOGPROB_BYTES = 200
_STATE_BYTES = 16
# Such memory that takes about 10 ms to format. More is formatted in a thread.
_INLINE_BYTES = 2_000_000

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Delta:
    """Output added by one push."""

    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprob]
    # Whether it is the first of its sample.
    is_first: bool


@dataclass(slots=True)
class SampleAnswer:
    sample: Sample
    detokenizer: Detokenizer
    # Clock times, seconds: arrival of the request, and of its first and latest tokens.
    received_at: float
    first_token_at: float | None = None
    last_token_at: float | None = None
    text: str = ""
    output_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    # For each of `logprobs`: the characters of the text before its token.
    text_offsets: list[int] = field(default_factory=list)
    input_logprobs: list[TokenLogprob] = field(default_factory=list)
    num_cached_tokens: int = 0
    finish: FinishReason | None = None
    transfer: TransferStats | None = None
    speculation: SpeculationStats | None = None
    # The scheduler's last report. Empty: there was none.
    stages: StageReport = field(default_factory=StageReport)
    # Hidden states that no answer or frame contains yet.
    hidden_states: list[HiddenState] = field(default_factory=list)
    # Bytes of these at the latest output.
    num_state_bytes: int = 0
    # Clock times of the first output of this attempt, and of its first formatted text. Earlier attempts of a router may
    # have had the first tokens.
    new_output_at: float | None = None
    formatted_at: float | None = None
    _num_pushes: int = 0

    @property
    def index(self) -> int:
        return self.sample.index

    @property
    def rid(self) -> str:
        return self.sample.request.rid

    @property
    def prompt_ids(self) -> list[int]:
        return self.sample.request.prompt_ids

    @property
    def seconds(self) -> float:
        """Return the seconds from arrival to the latest token."""
        return (self.last_token_at or self.received_at) - self.received_at

    @property
    def decode_seconds(self) -> float | None:
        """Return the seconds from the first to the latest token. None: there are fewer than two tokens."""
        if self.first_token_at is None or self.last_token_at is None or len(self.output_ids) < 2:
            return None
        return self.last_token_at - self.first_token_at

    def push(self, output: TokenOutput, now: float, sent_at: float = 0.0) -> Delta:
        """Add an output, which the scheduler sent at `sent_at` and which arrived at `now`."""
        is_first, self._num_pushes = self._num_pushes == 0, self._num_pushes + 1
        text, count = self._detokenize(output)
        delta = Delta(text, output.token_ids[:count], output.logprobs[:count], is_first)
        self.text += text
        self.output_ids += delta.token_ids
        self.logprobs += delta.logprobs
        self.hidden_states += output.hidden_states[:count]
        if output.input_logprobs is not None:
            self.input_logprobs = output.input_logprobs
        if is_first:
            # Ignore later values: they may be of a prompt that was computed again.
            self.num_cached_tokens = output.num_cached_tokens
        self.transfer, self.speculation = output.transfer, output.speculation
        self.finish = self._finish(output)
        self.stages = output.stages or self.stages
        if self.stages.entered and self.finish is not None and output.finish is None:
            self.stages = self.stages.ended(sent_at)
        if count or self.finish is not None:
            self.first_token_at = now if self.first_token_at is None else self.first_token_at
            self.last_token_at = now
        return delta

    def take_hidden_states(self) -> list[list[float]]:
        """Remove and return the hidden states of tokens since the last call."""
        taken, self.hidden_states = self.hidden_states, []
        return [array("f", state).tolist() for state in taken]

    def _detokenize(self, output: TokenOutput) -> tuple[str, int]:
        """Return the text to send, and how many of the tokens belong to the answer."""
        finish = output.finish
        hides_last = (
            finish is not None
            and finish.type is FinishType.STOP
            and isinstance(finish.matched, int)
            and not self.sample.request.params.include_stop
        )
        pieces = []
        count = 0
        for token_id in output.token_ids:
            count += 1
            if output.logprobs:
                self.text_offsets.append(self.detokenizer.num_chars)
            if hides_last and count == len(output.token_ids):
                break
            pieces.append(self.detokenizer.push(token_id))
            if self.detokenizer.matched is not None:
                break
        if finish is not None:
            pieces.append(self.detokenizer.finish())
        return "".join(pieces), count

    def _finish(self, output: TokenOutput) -> FinishReason | None:
        is_abort = output.finish is not None and output.finish.type is FinishType.ABORT
        if self.detokenizer.matched is not None and not is_abort:
            return FinishReason(FinishType.STOP, matched=self.detokenizer.matched)
        return output.finish


class AbortedAnswerError(SplitserveError):
    """The scheduler ended a sample without an answer; status and reason are the scheduler's."""

    def __init__(self, sample: Sample, finish: FinishReason) -> None:
        message = finish.message or f"request {sample.id} was aborted (stage: generation): send it again"
        # The client does not know the rid of an attempt.
        message = message.replace(sample.request.rid, sample.id)
        super().__init__(message, param=finish.param)
        self.http_status = finish.status_code or 499
        self.reason = finish.reason or "aborted"
        if self.http_status == RequestAbortedError.http_status:
            self.openai_type = RequestAbortedError.openai_type
        elif 400 <= self.http_status < 500:
            self.openai_type = InvalidRequestError.openai_type


def journal_line(answer: SampleAnswer, delta: Delta, model: str) -> bytes:
    """Return a comment event that reports `delta` to the router, which resumes the stream from it elsewhere."""
    num_prompt_tokens = len(answer.prompt_ids) if delta.is_first else 0
    line = JournalEntry(
        answer.sample.index,
        delta.token_ids,
        delta.logprobs,
        answer.num_cached_tokens,
        num_prompt_tokens,
        answer.finish,
        model if delta.is_first else "",
    )
    return b": " + msgspec.json.encode(line) + b"\n\n"


def check_answer_memory(num_logprobs: int, memory: RequestMemory, where: str = "", *, num_state_bytes: int = 0) -> int:
    """Return the memory that answers with so many logprobs, and bytes of hidden states, need. `where`: the request.

    Raises InvalidRequestError if it is more than all requests have.
    """
    if (num_bytes := _LOGPROB_BYTES * num_logprobs + _STATE_BYTES * num_state_bytes) > memory.max_bytes:
        what = "logprobs and hidden states" if num_state_bytes else f"{num_logprobs} logprobs"
        problem = (
            f"{where}{': ' if where else ''}its {what} need {num_bytes >> 20} MiB of the {memory.max_bytes >> 20} for "
            "all requests (--max-request-memory)"
        )
        remedy = "stream the answer, send fewer prompts, samples or alternatives, or lower max_tokens"
        raise InvalidRequestError(
            f"{problem}: {remedy}", param="return_hidden_states" if num_state_bytes else "logprobs"
        )
    return num_bytes


async def formatted(num_bytes: int, make: Callable[[], T]) -> T:
    """Return the result of `make`, which formats an answer, or a part of it. `num_bytes`: memory of its values."""
    return make() if num_bytes <= _INLINE_BYTES else await asyncio.to_thread(make)


Updates = AsyncGenerator[tuple[SampleAnswer, Delta], None]


class Generation:
    """Generation of one request's samples. `answers` are in the order of the samples."""

    def __init__(
        self,
        front: FrontEnd,
        fanout: FanOut,
        received_at: float,
        intake_at: float | None = None,
        body_memory: Reservation | None = None,
        *,
        continues_prompt: bool = True,
    ) -> None:
        """`received_at`, `intake_at`: clock times at which the body and the head of the request were received.

        `body_memory`: reservation of its body. `continues_prompt`: whether the answers continue the text of their
        prompts.
        """
        self._front = front
        self._continues_prompt = continues_prompt
        self._trace = RequestTimes(received_at if intake_at is None else intake_at) if fanout.dispatch.report else None
        # Role for which the request was prepared.
        self._mode = front.mode
        self._names = fanout.names
        self._is_again, self._is_probe = fanout.dispatch.attempt > 0, fanout.dispatch.probe
        self._dp_rank = fanout.dp_rank
        # Whether each delta of a stream is followed by a journal line.
        self.has_journal = fanout.dispatch.journal
        # Fingerprint of the model. It changes only while no request runs.
        self.model = front.info.model
        # The time that a router had the request before this attempt counts.
        arrived_at = received_at - fanout.dispatch.elapsed
        self.answers = [SampleAnswer(s, self._detokenizer(s), arrived_at) for s in fanout.samples]
        for answer in self.answers:
            if answer.sample.past is not None:
                answer.push(answer.sample.past, received_at)
        self._trace_id = fanout.dispatch.trace_id
        self._by_rid = {a.sample.request.rid: a for a in self.answers}
        # Memory of logprobs and hidden states in all answers, and in the last delta, bytes. The route releases it.
        self.num_bytes = self.num_new_bytes = 0
        # The same for the tokens of a prompt, if an answer lists them.
        self.prompt_bytes = _LOGPROB_BYTES * max(len(answer.prompt_ids) for answer in self.answers)
        self.memory = Reservation(front.request_memory, body_memory)
        # Logprobs so far, alternatives included, and bytes of hidden states that no frame has taken.
        self._num_logprobs = self._num_state_bytes = 0

    async def updates(self) -> Updates:
        """Yield answers as they grow, in order of arrival. Raises SplitserveError; close the generator to abort."""
        requests = [a.sample.request for a in self.answers if a.finish is None]
        if not requests:
            return
        if not self._is_again:
            await self._front.requests.wait_free(self._names, requests[0].timeout)
        self._front.check_role(self._mode)
        with self._front.requests.admit(self._names, is_again=self._is_again, is_probe=self._is_probe):
            stream = self._front.scheduler.submit(*requests, dp_rank=self._dp_rank)
            if self._trace is not None:
                self._trace.submitted_at, self._trace.stream = self._front.clock.now(), stream
            try:
                async for output in stream:
                    answer = self._by_rid[output.rid]
                    delta = self._push(answer, output, stream.last_sent_at[output.rid])
                    if answer.finish is not None and output.finish is None:
                        stream.drop(output.rid)
                    if answer.finish is not None and self._has_failed(output.rid, answer.finish):
                        error = AbortedAnswerError(answer.sample, answer.finish)
                        error.trace = self.trace(is_stream=True)
                        raise error
                    yield answer, delta
            finally:
                stream.close()

    async def complete(self) -> list[SampleAnswer]:
        """Run to the end and return the answers. Raises SplitserveError."""
        async with aclosing(self.updates()) as updates:
            async for _ in updates:
                pass
        return self.answers

    def count_past(self) -> None:
        """Reserve memory for the logprobs of earlier attempts. Raises as `updates`."""
        for answer in self.answers:
            if answer.sample.past is not None:
                self._reserve(answer, answer.sample.past)

    def mark_formatted(self, answer: SampleAnswer) -> None:
        """Record that the first text of an answer is ready to be sent. Later calls are no-ops."""
        if self._trace is not None and answer.formatted_at is None:
            answer.formatted_at = self._front.clock.now()
            self._trace.responded_at = self._trace.responded_at or answer.formatted_at

    def trace(self, *, is_stream: bool) -> bytes | None:
        """Return the trace for the router as JSON. None: it was not requested."""
        if self._trace is None:
            return None
        return self._trace.encode(self._mode, self.answers, self._front.clock.now(), is_stream=is_stream)

    def _has_failed(self, rid: str, finish: FinishReason) -> bool:
        """Return whether a sample failed.

        On a prefill worker an abort by the decode worker is no failure, because decode answers the client.
        """
        if finish.type is not FinishType.ABORT:
            return False
        is_wanted = rid in self._front.requests.ordered_to_end or self._front.mode is DisaggregationMode.PREFILL
        return not (is_wanted and finish.status_code == RequestAbortedError.http_status)

    def _push(self, answer: SampleAnswer, output: TokenOutput, sent_at: float) -> Delta:
        before, now = answer.last_token_at, self._front.clock.now()
        delta = answer.push(output, now, sent_at)
        self._reserve(answer, output)
        answer.new_output_at = answer.new_output_at or now
        metrics = self._front.metrics
        if delta.token_ids:
            if before is None:
                metrics.observe_first_token(now - answer.received_at, len(answer.prompt_ids), self._trace_id)
            metrics.observe_tokens(len(delta.token_ids), None if before is None else now - before)
        if answer.finish is not None:
            self._observe_finish(answer, str(answer.finish.type))
        return delta

    def _reserve(self, answer: SampleAnswer, output: TokenOutput) -> None:
        """Reserve memory for new logprobs, and for hidden states that no frame has taken yet.

        Raises InvalidRequestError or CapacityError if there is too little.
        """
        self.num_new_bytes = 0
        if not (found := (*output.logprobs, *(output.input_logprobs or ()))) and not output.hidden_states:
            return
        num_logprobs = len(found) + sum(len(logprob.top) for logprob in found)
        self.num_new_bytes = _LOGPROB_BYTES * num_logprobs + _STATE_BYTES * sum(map(len, output.hidden_states))
        # All states of an answer have one size.
        held = len(answer.hidden_states) * len(answer.hidden_states[0]) if answer.hidden_states else 0
        self._num_logprobs += num_logprobs
        self._num_state_bytes += held - answer.num_state_bytes
        answer.num_state_bytes = held
        where, memory = f"request {answer.sample.id} (stage: generation)", self._front.request_memory
        self.num_bytes = check_answer_memory(self._num_logprobs, memory, where, num_state_bytes=self._num_state_bytes)
        if not self.memory.resize(self.num_bytes):
            raise CapacityError(f"{where}: other requests have the memory for its answer: retry later")

    def _observe_finish(self, answer: SampleAnswer, reason: str) -> None:
        metrics = self._front.metrics
        timeline, spans = answer.stages.seconds, answer.stages.spans
        if self._trace is not None:
            spans = self._trace.spans_so_far(answer)
        metrics.observe_finish(reason, answer.seconds, timeline, answer.transfer, spans, self._trace_id)
        if self._mode is not DisaggregationMode.PREFILL:
            metrics.observe_sizes(len(answer.prompt_ids), len(answer.output_ids), answer.decode_seconds)
            if all(other.finish is not None for other in self.answers):
                metrics.observe_request(max(len(other.output_ids) for other in self.answers))

    def _detokenizer(self, sample: Sample) -> Detokenizer:
        params = sample.request.params
        # A prefill worker's one token ends nothing: the decode worker, which continues from it, matches the stop
        # strings.
        is_prefill = self._front.mode is DisaggregationMode.PREFILL
        return Detokenizer(
            self._front.tokenizer,
            prompt_ids=sample.request.prompt_ids if self._continues_prompt else (),
            stop=() if is_prefill else params.stop,
            min_new_tokens=params.min_new_tokens,
            skip_special_tokens=params.skip_special_tokens,
            include_stop=params.include_stop,
        )
