"""A prefill as decode knows it, from the first room that names its bootstrap server to its loss.

  WAITING      it was lost a short while ago: left alone until `retry_at`
  RESOLVING    asking the bootstrap server who is there
  REGISTERING  telling it about our memory, until it answers
  READY        rooms may be announced; pinged at every heartbeat interval

Each data parallel rank of a prefill worker is a peer of its own. How many there are any of them says; until the first
is found, a room looks for rank 0, and moves to its own rank then.

It leaves the table when it is lost, replaced, refused or says that it does not know us; the next room starts afresh.
"""

from __future__ import annotations

import enum
from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from splitserve.core.request import BootstrapInfo
from splitserve.disaggregation.transports.base import PeerAddress
from splitserve.disaggregation.wire import AbortRoom, PrefillInfo


class BootstrapAddress(NamedTuple):
    """A rank of a prefill worker, by its bootstrap server."""

    host: str
    port: int
    dp_rank: int = 0


@dataclass(frozen=True, slots=True)
class LookupFailure:
    """The bootstrap server could not name a prefill."""

    message: str
    # It will not get better by asking again: an unknown rank, a malformed question.
    is_definitive: bool = False


class Directory(Protocol):
    """Finds the prefill rank behind a bootstrap address. Never blocks."""

    def request(self, address: BootstrapAddress, timeout: float) -> None:
        """Begin to ask, and go on for `timeout` seconds while the server is not there or not ready."""
        ...

    def result(self, address: BootstrapAddress) -> PrefillInfo | LookupFailure | None:
        """The answer, once; None while there is none."""
        ...


class PeerState(enum.StrEnum):
    WAITING = "waiting"
    RESOLVING = "resolving"
    REGISTERING = "registering"
    READY = "ready"


@dataclass(slots=True, eq=False)
class PrefillPeer:
    address: BootstrapAddress
    state: PeerState = PeerState.WAITING
    # Clock time from which on it may be asked for.
    retry_at: float = 0.0
    # Both set once resolved.
    info: PrefillInfo | None = None
    session: PeerAddress | None = None
    # Heartbeat: when the next one is due, whether it spoke since the last one, how many in a row it missed.
    next_beat_at: float = 0.0
    heard: bool = True
    misses: int = 0
    # Aborts of rooms that failed before we knew where to send them.
    unsent_aborts: deque[tuple[BootstrapInfo, AbortRoom]] = field(default_factory=lambda: deque(maxlen=1024))

    def __str__(self) -> str:
        host, port, rank = self.address
        return f"prefill at bootstrap address {host}:{port}" + (f", data parallel rank {rank}" if rank else "")

    @property
    def is_ready(self) -> bool:
        """Rooms may be announced. Not while it is silent: it may have been replaced."""
        return self.state is PeerState.READY and self.misses == 0

    def beat(self, now: float, interval: float) -> bool:
        """Account for one heartbeat interval if it is over. True where a message is due now."""
        if now < self.next_beat_at:
            return False
        self.misses = 0 if self.heard else self.misses + 1
        self.heard = False
        self.next_beat_at = now + interval
        return True

    def speaks(self) -> None:
        self.heard, self.misses = True, 0
