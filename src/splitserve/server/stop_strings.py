"""Search for stop strings in text that arrives in pieces.

Each string has a number: how many of its first characters end the text so far (Knuth, Morris and Pratt). A character
changes it in constant time on average, however long the strings are and whatever a client sends.
"""

from __future__ import annotations

from array import array
from functools import lru_cache


@lru_cache(maxsize=256)
def _borders(text: str) -> array[int]:
    """Return for each length the longest proper end of that many first characters that is also a beginning of them."""
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
            end, neg_size = min((end, -len(stop)) for end, stop in zip(ends, self._stop, strict=True) if end)
            start = len(self._held) + end + neg_size
            self._held = ""
            return window[: start - neg_size if self._include_stop else start], window[start : start - neg_size]
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
        borders = _borders(stop)
        for place, character in enumerate(text, 1):
            while length and stop[length] != character:
                length = borders[length]
            length += stop[length] == character
            if length == len(stop):
                end, length = end or place, borders[length]
        self._lengths[index] = length
        return end
