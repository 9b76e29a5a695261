"""Answer of one sample as it grows: the scheduler's tokens and their text.

1. `push` takes an output, converts its tokens to text one by one and stops at the token that completes a stop string.
2. A Delta is what one push added; the SampleAnswer contains all of it.
3. The last push sets `finish`: the scheduler's reason, or the stop string.

The text of a stop token is omitted unless the request includes it; its id stays in `output_ids`, because it was
generated.

The Detokenizer never retracts sent text. It keeps tokens while a multi-byte character is incomplete, and text that
could still become a stop string. A match ends the sample: only the text before it is released. It counts if the token
that completes it has number `min_new_tokens` or later. Of several matches the one that is complete first counts, and
of those the longest, so the result does not depend on the split of the text into tokens.

Pure: no sockets, no HTTP.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from splitserve.api.samples import Sample
from splitserve.api.schemas import JournalEntry
from splitserve.core.batch import TokenLogprob
from splitserve.core.errors import InvalidRequestError, RequestAbortedError, SplitserveError
from splitserve.core.messages import SpeculationStats, TokenOutput, TransferStats
from splitserve.core.request import FinishReason, FinishType


class Detokenizer:
    """Converter of tokens. `push` and `finish` return text that is final. `matched`: stop string that was found."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stop: tuple[str, ...] = (),
        min_new_tokens: int = 0,
        skip_special_tokens: bool = True,
        include_stop: bool = False,
    ) -> None:
        self.matched: str | None = None
        self._tokenizer = tokenizer
        self._skip_special = skip_special_tokens
        self._stream = DecodeStream(skip_special_tokens=skip_special_tokens)
        # Tokens that last yielded text, and later ones that have yielded none yet.
        self._context: list[int] = []
        self._pending: list[int] = []
        self._stops = StopStrings(stop, include_stop=include_stop)
        self._min_new_tokens = min_new_tokens
        self._num_tokens = 0

    def push(self, token_id: int) -> str:
        """Return the text that this token releases. Tokens after a match are ignored."""
        self._num_tokens += 1
        self._pending.append(token_id)
        text: str | None = self._stream.step(self._tokenizer, token_id)
        if text is None:
            return self._feed("")
        self._context, self._pending = self._pending, []
        return self._feed(text)

    def finish(self) -> str:
        """Return the rest: incomplete characters (as U+FFFD) and held text."""
        if self.matched is not None:
            return ""
        rest = ""
        if self._pending:
            before, after = self._decode(self._context), self._decode(self._context + self._pending)
            rest = after[len(before) :] if after.startswith(before) else after
        text = self._feed(rest)
        return text if self.matched is not None else text + self._stops.rest()

    def _feed(self, text: str) -> str:
        released, self.matched = self._stops.feed(text, may_match=self._num_tokens >= self._min_new_tokens)
        return released

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=self._skip_special)


class StopStrings:
    """Search for stop strings. Holds back every suffix that may begin one, and finds the one that completes first."""

    def __init__(self, stop: tuple[str, ...], *, include_stop: bool) -> None:
        self._stop = stop
        self._include_stop = include_stop
        self._longest = max(map(len, stop), default=0)
        # Text not released yet: between two calls always a proper prefix of some stop string.
        self._held = ""

    def feed(self, text: str, *, may_match: bool) -> tuple[str, str | None]:
        """Return the text to release, and the stop string that ended the sample, or None.

        A match must end inside `text`.
        """
        if not self._stop:
            return text, None
        window = self._held + text
        if may_match and (found := self._first_match(window, len(self._held))) is not None:
            start, matched = found
            self._held = ""
            return window[: start + len(matched) if self._include_stop else start], matched
        keep = self._may_begin_a_stop(window)
        self._held = window[len(window) - keep :]
        return window[: len(window) - keep], None

    def rest(self) -> str:
        held, self._held = self._held, ""
        return held

    def _first_match(self, window: str, done: int) -> tuple[int, str] | None:
        """Return (start, stop string) of the first match to end after `done`. Of several with that end, the longest."""
        best: tuple[int, int, str] | None = None
        for stop in self._stop:
            at = window.find(stop, max(0, done - len(stop) + 1))
            if at >= 0 and (best is None or (at + len(stop), at) < best[:2]):
                best = (at + len(stop), at, stop)
        return None if best is None else (best[1], best[2])

    def _may_begin_a_stop(self, window: str) -> int:
        """Return the length of the longest suffix of `window` that is a proper prefix of a stop string."""
        for length in range(min(len(window), self._longest - 1), 0, -1):
            suffix = window[len(window) - length :]
            if any(len(stop) > length and stop.startswith(suffix) for stop in self._stop):
                return length
        return 0


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
    line = JournalEntry(answer.sample.index, delta.token_ids, delta.logprobs, answer.num_cached_tokens, answer.finish)
    return b": " + msgspec.json.encode(line) + b"\n\n"
