"""Search for stop strings in text that arrives in pieces.

For each string the search keeps the number of its first characters that the text ends with (Knuth, Morris and Pratt). A
character changes it in constant time on average, however long the strings are and whatever a client sends.
"""

from __future__ import annotations

from array import array
from functools import lru_cache


# All samples of a request have the same strings. Few requests are read at a time.
@lru_cache(maxsize=16)
def _tables(stop: tuple[str, ...]) -> tuple[array[int], ...]:
    return tuple(map(_table, stop))


def _table(text: str) -> array[int]:
    """Return the failure table: entry n is the length of the longest proper prefix of `text[:n]` that also ends it."""
    borders, length = array("I", (0, 0)), 0
    for character in text[1:]:
        while length and text[length] != character:
            length = borders[length]
        length += text[length] == character
        borders.append(length)
    return borders


class StopStrings:
    """Search that holds back every end that may begin a stop string, and finds the one that is complete first."""

    def __init__(self, stop: tuple[str, ...], *, include_stop: bool) -> None:
        self._stop = stop
        self._tables = _tables(stop)
        self._include_stop = include_stop
        # First characters of each string that end the text so far, less than all.
        self._lengths = [0] * len(stop)
        # Text not released yet: between two calls always a proper prefix of some stop string.
        self._held = ""

    def feed(self, text: str, *, may_match: bool) -> tuple[str, str | None]:
        """Return the text to release, and the stop string that ended the sample, or None.

        A match must end inside `text`. Of several with that end, the longest counts.
        """
        if not self._stop:
            return text, None
        window = self._held + text
        ends = [self._advance(i, text) for i in range(len(self._stop))]
        if may_match and any(ends):
            found = [(end, stop) for end, stop in zip(ends, self._stop, strict=True) if end]
            end, stop = min(found, key=lambda match: (match[0], -len(match[1])))
            released = len(self._held) + end - (0 if self._include_stop else len(stop))
            self._held = ""
            return window[:released], stop
        keep = max(self._lengths)
        self._held = window[len(window) - keep :]
        return window[: len(window) - keep], None

    def rest(self) -> str:
        held, self._held = self._held, ""
        return held

    def _advance(self, index: int, text: str) -> int:
        """Follow one stop string through `text`. Return the first place where it is complete. 0: there is none."""
        stop, length, end = self._stop[index], self._lengths[index], 0
        if not length and stop[0] not in text:
            return 0
        borders = self._tables[index]
        for place, character in enumerate(text, 1):
            while length and stop[length] != character:
                length = borders[length]
            length += stop[length] == character
            if length == len(stop):
                end, length = end or place, borders[length]
        self._lengths[index] = length
        return end
