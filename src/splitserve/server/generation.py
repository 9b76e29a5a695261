"""One client request in flight: its samples from admission to their ends.

1. Nothing is held before `updates` is iterated; then it holds a slot in the request table and the samples' stream. At
   that time the answers already contain what other workers sent to the client (`samples.py`).
2. Every output becomes a Delta of its sample's Answer, and is timed for the metrics.
3. A stop string ends its sample here. The scheduler is ordered to stop, without waiting for its answer.
4. A sample that was ordered to end (/abort_request) is answered with its output so far. A sample that the scheduler
   aborted for another reason fails the whole request, with the scheduler's status and message.
5. However the iteration ends, the samples still running are aborted and the slot is released.

It does not know the formats of answers.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from splitserve.api.samples import FanOut, Sample
from splitserve.core.errors import RequestAbortedError
from splitserve.core.messages import TokenOutput
from splitserve.core.request import DisaggregationMode, FinishReason, FinishType
from splitserve.server.answer import AbortedAnswerError, Delta, Detokenizer, SampleAnswer
from splitserve.server.front_end import FrontEnd

Updates = AsyncGenerator[tuple[SampleAnswer, Delta], None]


class Generation:
    """Generation of one request's samples. `answers` are in the order of the samples."""

    def __init__(self, front: FrontEnd, fanout: FanOut, received_at: float) -> None:
        self._front = front
        # Role for which the request was prepared.
        self._mode = front.mode
        self._names = fanout.names
        self._is_again = fanout.dispatch.attempt > 0
        self._dp_rank = fanout.dp_rank
        # Whether each delta of a stream is followed by a journal line.
        self.has_journal = fanout.dispatch.journal
        # The time that a router had the request before this attempt counts.
        arrived_at = received_at - fanout.dispatch.elapsed
        self.answers = [SampleAnswer(s, self._detokenizer(s), arrived_at) for s in fanout.samples]
        for answer in self.answers:
            if answer.sample.past is not None:
                answer.push(answer.sample.past, received_at)
        self._by_rid = {a.sample.request.rid: a for a in self.answers}

    async def updates(self) -> Updates:
        """Yield answers as they grow, in order of arrival. Raises SplitserveError; close the generator to abort."""
        requests = [a.sample.request for a in self.answers if a.finish is None]
        if not requests:
            return
        self._front.check_role(self._mode)
        with self._front.requests.admit(self._names, is_again=self._is_again):
            stream = self._front.scheduler.submit(*requests, dp_rank=self._dp_rank)
            try:
                async for output in stream:
                    answer = self._by_rid[output.rid]
                    delta = self._push(answer, output)
                    if answer.finish is not None and output.finish is None:
                        stream.drop(output.rid)
                    if answer.finish is not None and self._has_failed(output.rid, answer.finish):
                        raise AbortedAnswerError(output.rid, answer.finish)
                    yield answer, delta
            finally:
                stream.close()

    async def complete(self) -> list[SampleAnswer]:
        """Run to the end and return the answers. Raises SplitserveError."""
        async with aclosing(self.updates()) as updates:
            async for _ in updates:
                pass
        return self.answers

    def _has_failed(self, rid: str, finish: FinishReason) -> bool:
        """Return whether a sample failed.

        On a prefill worker an abort by the decode worker is no failure, because decode answers the client.
        """
        if finish.type is not FinishType.ABORT:
            return False
        is_wanted = self._front.requests.is_ordered_to_end(rid) or self._front.mode is DisaggregationMode.PREFILL
        return not (is_wanted and finish.status_code == RequestAbortedError.http_status)

    def _push(self, answer: SampleAnswer, output: TokenOutput) -> Delta:
        before, now = answer.last_token_at, self._front.clock.now()
        delta = answer.push(output, now)
        metrics = self._front.metrics
        if delta.token_ids:
            if before is None:
                metrics.observe_first_token(now - answer.received_at, len(answer.prompt_ids))
            metrics.observe_tokens(len(delta.token_ids), None if before is None else now - before)
        if answer.finish is not None:
            metrics.observe_finish(str(answer.finish.type), answer.seconds, answer.timeline, answer.transfer)
        return delta

    def _detokenizer(self, sample: Sample) -> Detokenizer:
        params = sample.request.params
        # A prefill worker's one token ends nothing: the decode worker, which continues from it, matches the stop
        # strings.
        is_prefill = self._front.mode is DisaggregationMode.PREFILL
        return Detokenizer(
            self._front.tokenizer.backend,
            stop=() if is_prefill else params.stop,
            min_new_tokens=params.min_new_tokens,
            skip_special_tokens=params.skip_special_tokens,
            include_stop=params.include_stop,
        )
