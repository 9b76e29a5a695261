"""Text of errors for clients: of bounded length, whatever the request contained."""

from __future__ import annotations

_MAX_CHARS = 1_500


def shortened(text: str, max_chars: int = _MAX_CHARS) -> str:
    """Return the text, or its beginning and its end if it is longer than `max_chars`."""
    if len(text) <= max_chars:
        return text
    half = (max_chars - 5) // 2
    return f"{text[:half]} ... {text[-half:]}"
