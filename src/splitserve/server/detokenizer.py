"""Token ids to text, one sample, one token at a time, never taking back what was shown.

The life of a token in here:
1. DecodeStream turns it into text, or keeps it while a multi-byte character is incomplete.
2. The text is searched for stop strings. A match ends the sample: the text before it is the last that is shown.
3. What could still become a stop string is held back; the rest is released.
4. At the end all that is held comes out.

A match counts if the token that completes it is number `min_new_tokens` or later. Of several matches the one that is
complete first counts, and of those the longest, so the result does not depend on how the text was cut into tokens.
Knows nothing of requests, streams or HTTP.
"""

from __future__ import annotations

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream


class Detokenizer:
    """`push` tokens, then `finish`: both return text that is safe to show. `matched` is the stop string found."""

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
        self._decoder = IncrementalDecoder(tokenizer, skip_special_tokens=skip_special_tokens)
        self._stops = StopStrings(stop, include_stop=include_stop)
        self._min_new_tokens = min_new_tokens
        self._num_tokens = 0

    def push(self, token_id: int) -> str:
        """The text this token releases. No more tokens are taken once `matched` is set."""
        self._num_tokens += 1
        text = self._decoder.push(token_id)
        return self._feed(text)

    def finish(self) -> str:
        """The rest: incomplete characters (as U+FFFD) and what was held back."""
        if self.matched is not None:
            return ""
        text = self._feed(self._decoder.finish())
        return text if self.matched is not None else text + self._stops.rest()

    def _feed(self, text: str) -> str:
        released, self.matched = self._stops.feed(text, may_match=self._num_tokens >= self._min_new_tokens)
        return released


class IncrementalDecoder:
    """Text in whole characters. Concatenated, its pieces are what decoding all tokens at once gives."""

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special_tokens
        self._stream = DecodeStream(skip_special_tokens=skip_special_tokens)
        # Tokens that gave text last, and those since then that have given none yet.
        self._context: list[int] = []
        self._pending: list[int] = []

    def push(self, token_id: int) -> str:
        self._pending.append(token_id)
        text: str | None = self._stream.step(self._tokenizer, token_id)
        if text is None:
            return ""
        self._context, self._pending = self._pending, []
        return text

    def finish(self) -> str:
        """What the pending tokens are worth as they stand."""
        if not self._pending:
            return ""
        before = self._decode(self._context)
        after = self._decode(self._context + self._pending)
        self._pending = []
        return after[len(before) :] if after.startswith(before) else after

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=self._skip_special)


class StopStrings:
    """Holds back every suffix that may begin a stop string, and finds the one that completes first."""

    def __init__(self, stop: tuple[str, ...], *, include_stop: bool) -> None:
        self._stop = stop
        self._include_stop = include_stop
        self._longest = max(map(len, stop), default=0)
        # Text not released yet: always a proper prefix of some stop string between two calls.
        self._held = ""

    def feed(self, text: str, *, may_match: bool) -> tuple[str, str | None]:
        """Text to release, and the stop string that ended the sample, if one did. A match must end inside `text`."""
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
        """(start, stop string) of the match that ends first, the longest of those; ends at or before `done` are old."""
        best: tuple[int, int, str] | None = None
        for stop in self._stop:
            at = window.find(stop, max(0, done - len(stop) + 1))
            if at >= 0 and (best is None or (at + len(stop), at) < best[:2]):
                best = (at + len(stop), at, stop)
        return None if best is None else (best[1], best[2])

    def _may_begin_a_stop(self, window: str) -> int:
        """Length of the longest suffix of `window` that is a proper prefix of a stop string."""
        for length in range(min(len(window), self._longest - 1), 0, -1):
            suffix = window[len(window) - length :]
            if any(len(stop) > length and stop.startswith(suffix) for stop in self._stop):
                return length
        return 0
