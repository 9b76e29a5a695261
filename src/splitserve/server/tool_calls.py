"""Calls out of the text of an answer, as it comes: text before and between them, names, and arguments bit by bit.

The grammar has seen to the form, so the parser only has to find its places. It stands in one of four of them, in
turn: text, a call's name, its arguments, its suffix. What may still become a call's prefix, and
whitespace before one, is held back.
Pure: no tokens, no HTTP.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import dataclass, field

from splitserve.server.tools import ToolForm


@dataclass(frozen=True, slots=True)
class CallDelta:
    """News of call number `index`: its id and name with the first, a piece of its arguments' JSON with the others."""

    index: int
    arguments: str = ""
    id: str | None = None
    name: str | None = None


@dataclass(slots=True)
class Parsed:
    text: str = ""
    calls: list[CallDelta] = field(default_factory=list)


class ToolCallParser:
    """`push` text, then `finish`: what is safe to show of each."""

    def __init__(self, form: ToolForm) -> None:
        self.num_calls = 0
        self._form = form
        self._step: Callable[[Parsed], bool] = self._take_text
        # Not understood yet: the start of a prefix, an infix or a suffix.
        self._held = ""
        self._arguments = _JsonEnd()

    def push(self, text: str) -> Parsed:
        parsed = Parsed()
        self._held += text
        while self._step(parsed):
            pass
        return parsed

    def finish(self) -> Parsed:
        """What was held back, where the answer broke off. The beginning of a call that has no name yet is nobody's."""
        held, self._held = self._held, ""
        # Behind a call, what looks like the beginning of another is one.
        return Parsed(held if self._step == self._take_text and not self.num_calls else "")

    def _take_text(self, parsed: Parsed) -> bool:
        """Each step returns whether to go on with the next."""
        before, prefix, rest = self._held.partition(self._form.prefix)
        if prefix:
            # Whitespace before a call is none of the answer.
            parsed.text += before.rstrip()
            self._held, self._step = rest, self._take_name
            return True
        keep = _overlap(self._held, self._form.prefix)
        shown = self._held[: len(self._held) - keep].rstrip()
        parsed.text += shown
        self._held = self._held[len(shown) :]
        return False

    def _take_name(self, parsed: Parsed) -> bool:
        name, infix, rest = self._held.partition(self._form.infix)
        if infix:
            parsed.calls.append(CallDelta(self.num_calls, id=f"call_{uuid.uuid4().hex[:24]}", name=name))
            self.num_calls += 1
            self._held, self._step, self._arguments = rest, self._take_arguments, _JsonEnd()
        return bool(infix)

    def _take_arguments(self, parsed: Parsed) -> bool:
        end = self._arguments.find(self._held)
        piece = self._held[:end]
        if piece:
            parsed.calls.append(CallDelta(self.num_calls - 1, piece))
        self._held = self._held[len(piece) :]
        if end is not None:
            self._step = self._take_suffix
        return end is not None

    def _take_suffix(self, _: Parsed) -> bool:
        is_whole = len(self._held) >= len(self._form.suffix)
        if is_whole:
            self._held, self._step = self._held[len(self._form.suffix) :], self._take_text
        return is_whole


class _JsonEnd:
    """Where a JSON object that comes in pieces ends."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._is_escaped = False

    def find(self, piece: str) -> int | None:
        """The end of the object within this piece; None if it goes on beyond it."""
        for i, character in enumerate(piece):
            if self._in_string:
                self._in_string = self._is_escaped or character != '"'
                self._is_escaped = character == "\\" and not self._is_escaped
            elif character == '"':
                self._in_string = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if self._depth == 0:
                    return i + 1
        return None


def _overlap(text: str, prefix: str) -> int:
    """Length of the longest end of `text` that `prefix` begins with, but not all of it."""
    return next((n for n in range(min(len(text), len(prefix) - 1), 0, -1) if prefix.startswith(text[-n:])), 0)
