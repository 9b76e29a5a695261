"""Encoding of client values for log lines."""

from __future__ import annotations

import re

import msgspec

_WORD = re.compile(r"[\w.:/@+-]{1,128}", re.ASCII)


def one_word(value: object) -> str:
    """Return a client's value as one word that cannot begin a line or a field of the log. None: `-`."""
    if value is None:
        return "-"
    text = str(value)
    return text if _WORD.fullmatch(text) else msgspec.json.encode(text[:128]).decode().replace(" ", "\\u0020")
