"""Detokenizer of one sample: token ids to text, one token at a time, without retracting sent text.

Life cycle of a token:
1. DecodeStream converts it to text, or keeps it while a multi-byte character is incomplete.
2. The text is searched for stop strings. A match ends the sample: only the text before it is released.
3. Text that could still become a stop string is held back; the rest is released.
4. At the end all held text is released.

A match counts if the token that completes it has number `min_new_tokens` or later. Of several matches the one that is
complete first counts, and of those the longest, so the result does not depend on the split of the text into tokens.
This module does not know requests, streams or HTTP.
"""

from __future__ import annotations

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream


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
        self._decoder = IncrementalDecoder(tokenizer, skip_special_tokens=skip_special_tokens)
        self._stops = StopStrings(stop, include_stop=include_stop)
        self._min_new_tokens = min_new_tokens
        self._num_tokens = 0

    def push(self, token_id: int) -> str:
        """Return the text that this token releases. Tokens after a match are ignored."""
        self._num_tokens += 1
        text = self._decoder.push(token_id)
        return self._feed(text)

    def finish(self) -> str:
        """Return the rest: incomplete characters (as U+FFFD) and held text."""
        if self.matched is not None:
            return ""
        text = self._feed(self._decoder.finish())
        return text if self.matched is not None else text + self._stops.rest()

    def _feed(self, text: str) -> str:
        released, self.matched = self._stops.feed(text, may_match=self._num_tokens >= self._min_new_tokens)
        return released


class IncrementalDecoder:
    """Decoder into whole characters. Its concatenated pieces equal the text of all tokens decoded at once."""

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special_tokens
        self._stream = DecodeStream(skip_special_tokens=skip_special_tokens)
        # Tokens that last yielded text, and later ones that have yielded none yet.
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
        """Return the text of the pending tokens in their incomplete state."""
        if not self._pending:
            return ""
        before = self._decode(self._context)
        after = self._decode(self._context + self._pending)
        self._pending = []
        return after[len(before) :] if after.startswith(before) else after

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
