"""Times of one request in the front end of a worker, and the trace that is sent to the router."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from splitserve.core.timeline import Span, Stage, clock_name, encode_trace
from splitserve.server.scheduler_client import OutputStream

if TYPE_CHECKING:
    from splitserve.server.generation import SampleAnswer

# Maximum number of samples in one trace.
_MAX_SAMPLES = 8


@dataclass(slots=True)
class RequestTimes:
    """Clock times of one request. 0: not reached yet."""

    received_at: float
    submitted_at: float = 0.0
    # Time of the first formatted text of a stream.
    responded_at: float = 0.0
    # Outputs of the scheduler. None: nothing was submitted.
    stream: OutputStream | None = None

    def encode(self, mode: str, answers: Sequence[SampleAnswer], now: float, *, is_stream: bool) -> bytes:
        """Return the trace as JSON. `now`: time at which the whole answer is ready."""
        samples = ((answer.index, self._spans(answer, now, is_stream)) for answer in answers[:_MAX_SAMPLES])
        responded_at = self.responded_at if is_stream and self.responded_at else now
        return encode_trace(mode, clock_name(), (self.received_at, responded_at), samples)

    def spans_so_far(self, answer: SampleAnswer) -> list[Span]:
        """Return the spans of a finished sample. Without a stream it has no DETOKENIZE, because formatting follows."""
        is_stream = bool(self.responded_at)
        spans = self._spans(answer, answer.last_token_at or self.received_at, is_stream)
        return [span for span in spans if is_stream or span.name != Stage.DETOKENIZE]

    def _spans(self, answer: SampleAnswer, now: float, is_stream: bool) -> list[Span]:
        """Return the spans of a sample up to its first text if it is streamed, otherwise up to the whole answer."""
        spans = [Span(Stage.TOKENIZE, self.received_at, self.submitted_at or now), *answer.stages.spans]
        if self.stream is None:
            return spans
        if is_stream:
            sent, received, ready = self.stream.first_sent_at, answer.new_output_at, answer.formatted_at
        else:
            sent, received, ready = self.stream.last_sent_at, answer.last_token_at, now
        sent_at = sent.get(answer.rid)
        if sent_at and received is not None:
            spans.append(Span(Stage.TO_FRONT_END, sent_at, received))
            if ready is not None:
                spans.append(Span(Stage.DETOKENIZE, received, ready))
        return spans
