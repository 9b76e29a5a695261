"""Journal of one client's stream: the deltas that were sent to the client, so that another worker can continue.

A worker with a journal (announced in a header) sends the events of one delta and then a line, an SSE comment, that
describes them. The router sends whole deltas to the client, keeps the lines, and sends them unchanged to the next
worker. So the client has a delta if and only if its line is in `lines`, wherever the stream breaks.

This module reads only the number of tokens from the lines.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from splitserve.api.responses import EventSplitter, event_data
from splitserve.router.failure import error_in_event

_DONE = b"data: [DONE]\n\n"


class _LineTokens(msgspec.Struct):
    token_ids: list[int] = []


_LINE = msgspec.json.Decoder(_LineTokens)


@dataclass(slots=True)
class Journal:
    """Journal of one request, over all its attempts."""

    # One JSON line per delta that was accepted for the client.
    lines: list[bytes] = field(default_factory=list)
    # Whether the end of the stream was accepted for the client.
    is_done: bool = False

    def count_tokens(self) -> int | None:
        """Return the output tokens over all samples. None: a line has an unknown format."""
        try:
            return sum(len(_LINE.decode(line).token_ids) for line in self.lines)
        except msgspec.MsgspecError:
            return None


@dataclass(slots=True)
class Deltas:
    """Deltas completed by a chunk: events for the client, and their journal lines."""

    events: list[bytes] = field(default_factory=list)
    lines: list[bytes] = field(default_factory=list)
    is_done: bool = False
    # Status and body of the error that ended the stream; its event is not among `events`.
    error: tuple[int, bytes] | None = None


class DeltaReader:
    """Splitter of one attempt's stream into whole deltas."""

    def __init__(self) -> None:
        self._splitter = EventSplitter()
        # Events that still miss their journal line.
        self._pending: list[bytes] = []

    def feed(self, chunk: bytes) -> Deltas:
        ready = Deltas()
        for event in self._splitter.feed(chunk):
            if event.startswith(b":"):
                ready.events += self._pending
                ready.lines.append(event[1:].strip())
                self._pending.clear()
            elif event == _DONE:
                # Between the last line and the end there is only an error or the usage.
                ready.error = self._error()
                if ready.error is None:
                    ready.events += [*self._pending, event]
                    ready.is_done = True
            else:
                self._pending.append(event)
        return ready

    def _error(self) -> tuple[int, bytes] | None:
        errors = (error_in_event(event_data(event)) for event in self._pending if b'"error"' in event[:64])
        return next((error for error in errors if error is not None), None)
