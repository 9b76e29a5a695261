"""Incremental conversion of tokens to text, with stop strings.

The text of a token depends on its neighbours: characters of several tokens, and the spaces that some decoders strip
from the first word. So each step decodes a window: the tokens that last released text, and later ones. Its text beyond
the released part is new. Sent text is never retracted:

1. Tokens wait while the text ends with U+FFFD, which may be an incomplete character. After as many tokens as a
   character can have, only the end of the text waits, so that no window grows.
2. Text that could still become a stop string waits. A match ends the sample: only the text before it is released. It
   counts if the token that completes it has number `min_new_tokens` or later. Of several matches the one that is
   complete first counts, and of those the longest, so the result does not depend on the split of the text into tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

from splitserve.api.tokenizer import Tokenizer
from splitserve.server.stop_strings import StopStrings

_INCOMPLETE = "\ufffd"
# Most tokens that wait for the rest of a character. A character has at most 4 bytes.
_MAX_PENDING = 8
# Most U+FFFD that stand for an incomplete character: some decoders write one for each of its bytes.
_MAX_HELD = 3
# Tokens of the prompt in the first window: at least 4, and more if the first of these is inside a character.
_CONTEXT_TOKENS = range(4, 8)
# Last tokens of the prompt to take them from: some have no text.
_CONTEXT_TAIL = 32


class Detokenizer:
    """Converter of tokens. `push` and `finish` return text that is final. `matched`: stop string that was found.

    `prompt_ids`: tokens that the text continues. Empty: it is a text of its own.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        prompt_ids: Sequence[int] = (),
        stop: tuple[str, ...] = (),
        min_new_tokens: int = 0,
        skip_special_tokens: bool = True,
        include_stop: bool = False,
    ) -> None:
        self.matched: str | None = None
        # Characters of text so far, including those that wait for a stop string.
        self.num_chars = 0
        self._tokenizer = tokenizer
        self._skip_special = skip_special_tokens
        self._window: list[int] = []
        # Text of the window that was released, and the number of tokens at its end with text that was not.
        self._released = ""
        self._num_pending = 0
        self._stops = StopStrings(stop, include_stop=include_stop)
        self._min_new_tokens = min_new_tokens
        self._num_tokens = 0
        self._continue(prompt_ids)

    def push(self, token_id: int) -> str:
        """Return the text that this token releases. Tokens after a match are ignored."""
        self._num_tokens += 1
        if not self._has_text(token_id):
            return self._feed("")
        self._window.append(token_id)
        self._num_pending += 1
        text = self._decode(self._window)
        is_incomplete = text.endswith(_INCOMPLETE)
        # A token that adds no text is no context for the next one.
        if (is_incomplete or text == self._released) and self._num_pending <= _MAX_PENDING:
            return self._feed("")
        return self._feed(self._release(text, _MAX_HELD if is_incomplete else 0))

    def _release(self, text: str, num_held: int) -> str:
        """Return the new text of the window without its last `num_held` characters, and shorten the window."""
        new = self._new_text(text)
        self._window = self._window[-min(self._num_pending, _MAX_PENDING) :]
        self._released = self._decode(self._window)
        self._num_pending = 0
        if num_held:
            self._num_pending = _MAX_PENDING
            new, self._released = (part[: max(0, len(part) - num_held)] for part in (new, self._released))
        return new

    def finish(self) -> str:
        """Return the rest: incomplete characters (as U+FFFD) and held text."""
        if self.matched is not None:
            return ""
        text = self._feed(self._new_text(self._decode(self._window)) if self._num_pending else "")
        return text if self.matched is not None else text + self._stops.rest()

    def _continue(self, prompt_ids: Sequence[int]) -> None:
        """Begin with the end of a prompt. A prompt that ends inside a character is no context."""
        tail = [token_id for token_id in prompt_ids[-_CONTEXT_TAIL:] if self._has_text(token_id)]
        for num_tokens in _CONTEXT_TOKENS:
            text = self._decode(tail[-num_tokens:])
            if not text.endswith(_INCOMPLETE):
                self._window, self._released = tail[-num_tokens:], text
                return

    def _new_text(self, text: str) -> str:
        """Return the part of the window's text that is not released."""
        if text.startswith(self._released):
            return text[len(self._released) :]
        # An invalid byte has changed the text of the bytes before it.
        return self._decode(self._window[-self._num_pending :])

    def _feed(self, text: str) -> str:
        self.num_chars += len(text)
        released, self.matched = self._stops.feed(text, may_match=self._num_tokens >= self._min_new_tokens)
        return released

    def _has_text(self, token_id: int) -> bool:
        return self._tokenizer.has_text(token_id, skip_special_tokens=self._skip_special)

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)
