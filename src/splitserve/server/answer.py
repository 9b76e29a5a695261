"""Answer of one sample as it grows: the scheduler's tokens and their text.

1. `push` takes an output, converts its tokens to text one by one and stops at the token that completes a stop string.
2. A Delta is what one push added; the SampleAnswer contains all of it.
3. The last push sets `finish`: the scheduler's reason, or the stop string.

The text of a stop token is omitted unless the request includes it; its id stays in `output_ids`, because it was
generated. Pure: no sockets, no HTTP.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from splitserve.api.samples import Sample
from splitserve.api.schemas import JournalEntry
from splitserve.core.batch import TokenLogprob
from splitserve.core.errors import InvalidRequestError, RequestAbortedError, SplitserveError
from splitserve.core.messages import SpeculationStats, TokenOutput, TransferStats
from splitserve.core.request import FinishReason, FinishType
from splitserve.server.detokenizer import Detokenizer


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
    input_logprobs: list[TokenLogprob] = field(default_factory=list)
    num_cached_tokens: int = 0
    finish: FinishReason | None = None
    timeline: dict[str, float] | None = None
    transfer: TransferStats | None = None
    speculation: SpeculationStats | None = None
    _num_pushes: int = 0

    @property
    def prompt_ids(self) -> list[int]:
        return self.sample.request.prompt_ids

    @property
    def seconds(self) -> float:
        """Return the seconds from arrival to the latest token."""
        return (self.last_token_at or self.received_at) - self.received_at

    def push(self, output: TokenOutput, now: float) -> Delta:
        is_first, self._num_pushes = self._num_pushes == 0, self._num_pushes + 1
        text, count = self._detokenize(output)
        delta = Delta(text, output.token_ids[:count], output.logprobs[:count], is_first)
        self.text += text
        self.output_ids += delta.token_ids
        self.logprobs += delta.logprobs
        if output.input_logprobs is not None:
            self.input_logprobs = output.input_logprobs
        if is_first:
            # Ignore later values: they may be of a prompt that was computed again.
            self.num_cached_tokens = output.num_cached_tokens
        self.timeline, self.transfer, self.speculation = output.timeline, output.transfer, output.speculation
        self.finish = self._finish(output)
        if count or self.finish is not None:
            self.first_token_at = now if self.first_token_at is None else self.first_token_at
            self.last_token_at = now
        return delta

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

    def __init__(self, rid: str, finish: FinishReason) -> None:
        message = finish.message or f"request {rid} was aborted (stage: generation): send it again"
        super().__init__(message, param=finish.param)
        self.http_status = finish.status_code or 499
        self.reason = finish.reason or "aborted"
        if self.http_status == RequestAbortedError.http_status:
            self.openai_type = RequestAbortedError.openai_type
        elif 400 <= self.http_status < 500:
            self.openai_type = InvalidRequestError.openai_type


def journal_line(answer: SampleAnswer, delta: Delta) -> bytes:
    """Return a comment event that reports `delta` to the router, which resumes the stream from it elsewhere."""
    told = JournalEntry(answer.sample.index, delta.token_ids, delta.logprobs, answer.num_cached_tokens, answer.finish)
    return b": " + msgspec.json.encode(told) + b"\n\n"
