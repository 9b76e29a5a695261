"""Server-sent events as bytes: only what is needed to parse a stream."""

from __future__ import annotations

from typing import Any

import msgspec


class EventSplitter:
    """Splitter of a byte stream into whole events, each with its closing blank line."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, chunk: bytes) -> list[bytes]:
        *events, self._rest = (self._rest + chunk).split(b"\n\n")
        return [event + b"\n\n" for event in events]

    @property
    def rest(self) -> bytes:
        """Return the bytes after the last whole event."""
        return self._rest


def event_data(event: bytes) -> Any:
    """Return the JSON data of an event. None: [DONE], a comment, or no JSON."""
    if not event.startswith(b"data:"):
        return None
    try:
        return msgspec.json.decode(event[len(b"data:") :])
    except msgspec.DecodeError:
        return None


def encode_event(data: Any) -> bytes:
    return b"data: " + msgspec.json.encode(data) + b"\n\n"
