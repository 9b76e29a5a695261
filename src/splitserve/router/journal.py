"""The journal of one client's stream: what its workers said they told the client, so that another can go on.

A worker that keeps one (it says so in a header) sends the events of one delta and then a line, an SSE comment, that
says what they were. Whole deltas go to the client, the lines stay here and go to the next worker as they came. So a
delta is with the client if and only if its line is in `lines`, wherever the stream breaks.

It does not know what the lines say, but for how many tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from splitserve.router.failure import error_in_event
from splitserve.router.sse import EventSplitter, event_data

_DONE = b"data: [DONE]\n\n"


class _Told(msgspec.Struct):
    token_ids: list[int] = []


_TOLD = msgspec.json.Decoder(_Told)


@dataclass(slots=True)
class Journal:
    """Of one request, over all its tries."""

    # JSON, each of one delta that was accepted for the client.
    lines: list[bytes] = field(default_factory=list)
    # The end of the stream was accepted for the client.
    is_done: bool = False

    def count_tokens(self) -> int | None:
        """Of the output, over all samples; None: the lines are in no form that we know."""
        try:
            return sum(len(_TOLD.decode(line).token_ids) for line in self.lines)
        except msgspec.MsgspecError:
            return None


@dataclass(slots=True)
class Deltas:
    """What a chunk completed: events for the client, and their lines."""

    events: list[bytes] = field(default_factory=list)
    lines: list[bytes] = field(default_factory=list)
    is_done: bool = False
    # Status and body of the error that ended the stream; its event is not among `events`.
    error: tuple[int, bytes] | None = None


class DeltaReader:
    """Cuts one try's stream into whole deltas."""

    def __init__(self) -> None:
        self._splitter = EventSplitter()
        # Events whose line has not come.
        self._pending: list[bytes] = []

    def feed(self, chunk: bytes) -> Deltas:
        ready = Deltas()
        for event in self._splitter.feed(chunk):
            if event.startswith(b":"):
                ready.events += self._pending
                ready.lines.append(event[1:].strip())
                self._pending.clear()
            elif event == _DONE:
                # Nothing but an error or the usage stands between the last line and the end.
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
