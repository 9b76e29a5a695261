"""Transport without a peer: a sink that takes as long as a link of some bandwidth and delay, and copies no byte.

A prefill worker alone writes its KV into the sink. A decode worker alone uses the sink as the clock of synthetic KV,
which it fills into its own pages (`transfer/synthetic.py`). The worker's options choose it: `--transfer-backend fake`.

All writes of a transport share one link, one after another. A write is DONE when the link has carried its bytes and
the delay has passed. `tests/support/fake_transport.py` is a different transport, with two ends in one process.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections import deque
from collections.abc import Sequence

from splitserve.core.clock import Clock, SystemClock
from splitserve.core.errors import OptionError
from splitserve.core.layout import Region
from splitserve.transfer.copies import Copies
from splitserve.transfer.transports.backend import Memory
from splitserve.transfer.transports.base import (
    PeerAddress,
    ProgressCallback,
    Ticket,
    TransportOptions,
    WriteState,
    WriteStatus,
    ignore_progress,
)

_PENDING, _DONE = WriteStatus(WriteState.PENDING), WriteStatus(WriteState.DONE)


class FakeLink:
    """A link that carries writes one after another. `bandwidth`: bytes per second. `delay`: seconds per write."""

    def __init__(self, bandwidth: float = math.inf, delay: float = 0.0) -> None:
        self._bandwidth = bandwidth
        self._delay = delay
        # Time at which the link has carried all earlier writes.
        self._free_at = -math.inf

    def carry(self, now: float, num_bytes: int) -> float:
        """Return the time at which a write that is submitted now is in place."""
        self._free_at = max(now, self._free_at) + num_bytes / self._bandwidth
        return self._free_at + self._delay


class FakeTransport:
    """The sink. A drained or closed session fails its pending writes, as with other transports."""

    def __init__(
        self, link: FakeLink, *, on_progress: ProgressCallback = ignore_progress, clock: Clock | None = None
    ) -> None:
        self._link = link
        self._on_progress = on_progress
        self._clock = clock or SystemClock()
        self._memory = Memory()
        self._ids = itertools.count()
        self._sessions: set[str] = set()
        # Unpolled writes: session, and the time at which the write is in place.
        self._writes: dict[Ticket, tuple[str, float]] = {}
        # Times at which pollers must be woken, in order.
        self._wake_times: deque[float] = deque()
        self._changed = threading.Condition()
        self._is_closed = False
        # Started by the first write that takes time.
        self._thread: threading.Thread | None = None

    def register(self, regions: Sequence[Region]) -> None:
        self._memory.add(regions)

    def open_session(self) -> PeerAddress:
        session_id = f"fake-{next(self._ids)}"
        self._sessions.add(session_id)
        return PeerAddress(session_id, "sink")

    def write(self, peer: PeerAddress, copies: Copies) -> Ticket:
        num_bytes = self._memory.check_sources(copies)
        ticket, now = Ticket(next(self._ids)), self._clock.now()
        with self._changed:
            ready_at = self._link.carry(now, num_bytes)
            self._writes[ticket] = (peer.session_id, ready_at)
            if ready_at > now:
                self._wake_times.append(ready_at)
                self._start()
                self._changed.notify()
        if ready_at <= now:
            self._on_progress()
        return ticket

    def poll(self, ticket: Ticket) -> WriteStatus:
        with self._changed:
            session_id, ready_at = self._writes[ticket]
            if session_id not in self._sessions:
                status = WriteStatus(WriteState.FAILED, f"session {session_id} is unknown or drained")
            else:
                status = _DONE if ready_at <= self._clock.now() else _PENDING
            if status.is_final:
                del self._writes[ticket]
            return status

    def drain(self, session_id: str) -> None:
        with self._changed:
            self._sessions.discard(session_id)
        self._on_progress()

    def is_fenced(self, session_id: str) -> bool:
        return session_id not in self._sessions

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._sessions.clear()
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()

    def _start(self) -> None:
        if self._thread is None and not self._is_closed:
            self._thread = threading.Thread(target=self._run, name="kv-sink", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        """Wake the pollers when writes are in place."""
        while True:
            with self._changed:
                if self._is_closed:
                    return
                now = self._clock.now()
                if not self._wake_times or self._wake_times[0] > now:
                    self._changed.wait(self._wake_times[0] - now if self._wake_times else None)
                    continue
                while self._wake_times and self._wake_times[0] <= now:
                    self._wake_times.popleft()
            self._on_progress()


def number_from(name: str, least: float, rule: str, text: str) -> float:
    """Return the value of an option as a number of at least `least`. Raises OptionError with name, value and rule."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value >= least):
        raise OptionError("--transfer-option", f"{name}={text}: {rule}")
    return value


def bandwidth_of(text: str) -> float:
    """Return the bandwidth in bytes per second. Raises OptionError."""
    return 1e9 * number_from("bandwidth", 1e-6, "a number of GB/s (10^9 bytes per second), at least 0.000001", text)


def delay_of(text: str) -> float:
    """Return the delay in seconds. Raises OptionError."""
    return number_from("delay", 0.0, "a number of milliseconds, at least 0", text) / 1e3


def fake_transport(options: TransportOptions) -> FakeTransport:
    """Return the sink. Options: bandwidth (GB/s, default: unlimited), delay (ms per write, default: 0)."""
    bandwidth, delay = options.extra.get("bandwidth"), options.extra.get("delay")
    link = FakeLink(math.inf if bandwidth is None else bandwidth_of(bandwidth), delay_of(delay or "0"))
    return FakeTransport(link, on_progress=options.on_progress)
