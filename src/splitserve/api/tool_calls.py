"""Parser of tool calls in the text of an answer, in pieces: text around the calls, their names, and their arguments.

The grammar guarantees the format, so the parser only finds the parts. Its state is one of four: text, a call's name,
its arguments, its suffix. Text that may still become a call's prefix is held back, with white space before it. Pure:
no tokens, no HTTP.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import dataclass, field

from splitserve.api.tools import ToolForm


@dataclass(frozen=True, slots=True)
class CallDelta:
    """Change of call number `index`: its id and name first, then pieces of its arguments' JSON."""

    index: int
    arguments: str = ""
    id: str | None = None
    name: str | None = None


@dataclass(slots=True)
class Parsed:
    text: str = ""
    calls: list[CallDelta] = field(default_factory=list)


class ToolCallParser:
    """Incremental parser: `push` text, then `finish`. Each returns the text and calls that are final."""

    def __init__(self, form: ToolForm) -> None:
        self.num_calls = 0
        self._form = form
        self._step: Callable[[Parsed], bool] = self._take_text
        # Unparsed text: the start of a prefix, an infix or a suffix.
        self._held = ""
        self._arguments = _JsonEnd()

    def push(self, text: str) -> Parsed:
        parsed = Parsed()
        self._held += text
        while self._step(parsed):
            pass
        return parsed

    def finish(self) -> Parsed:
        """Return the text held back at the end of the answer. The beginning of a call without a name is dropped."""
        held, self._held = self._held, ""
        # After a call, the held text is the beginning of another one.
        return Parsed(held if self._step == self._take_text and not self.num_calls else "")

    def _take_text(self, parsed: Parsed) -> bool:
        """Consume text before a call. Like all steps, return whether to continue with the next."""
        before, prefix, rest = self._held.partition(self._form.prefix)
        if prefix:
            # White space before a call is not part of the answer.
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
    """Finder of the end of a JSON object that arrives in pieces."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._is_escaped = False

    def find(self, piece: str) -> int | None:
        """Return the end of the object within this piece. None: it continues after it."""
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
    """Return the length of the longest end of `text` that is a proper prefix of `prefix`."""
    return next((n for n in range(min(len(text), len(prefix) - 1), 0, -1) if prefix.startswith(text[-n:])), 0)
