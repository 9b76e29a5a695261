"""A prefill as decode knows it, from the first room that names its bootstrap server to its loss.

  WAITING      it was lost a short while ago: left alone until `retry_at`
  RESOLVING    asking the bootstrap server who is there
  REGISTERING  telling its ranks about our memory, until all have answered
  READY        rooms may be announced; pinged at every heartbeat interval

A prefill worker may be cut over several ranks. Of these, the sources are those that this decode rank has to do with
(`feeds.py`): each has a session of its own, and the loss of one is that of the whole worker, for every room needs all.

Each data parallel rank of a prefill worker is a peer of its own. How many there are any of them says; until the first
is found, a room looks for rank 0, and moves to its own rank then.

It leaves the table when it is lost, replaced, refused or says that it does not know us; the next room starts afresh.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from splitserve.core.request import BootstrapInfo
from splitserve.disaggregation.feeds import feeds_of
from splitserve.disaggregation.pairing import Pair
from splitserve.disaggregation.transports.base import PeerAddress
from splitserve.disaggregation.wire import PROTOCOL_VERSION, AbortRoom, KVArgs, PrefillInfo, version_difference


class BootstrapAddress(NamedTuple):
    """A data parallel rank of a prefill worker, by its bootstrap server."""

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
    """Finds the prefill behind a bootstrap address. Never blocks."""

    def request(self, address: BootstrapAddress, timeout: float) -> None:
        """Begin to ask, and go on for `timeout` seconds while the server is not there or not ready."""
        ...

    def result(self, address: BootstrapAddress) -> list[PrefillInfo] | LookupFailure | None:
        """The answer, once: all ranks of that prefill, in order of their index. None while there is none."""
        ...


class PeerState(enum.StrEnum):
    WAITING = "waiting"
    RESOLVING = "resolving"
    REGISTERING = "registering"
    READY = "ready"


@dataclass(slots=True, eq=False)
class Source:
    """A rank of a prefill, as this decode rank deals with it."""

    info: PrefillInfo
    # Its part of every room.
    pairs: tuple[Pair, ...] = ()
    # Ranks of ours that announce each room to it.
    num_targets: int = 1
    # Where it writes to us; None until we fit together.
    session: PeerAddress | None = None
    # It has taken our memory in.
    is_registered: bool = False
    # Heartbeat: when the next one is due, whether it spoke since the last one, how many in a row it missed.
    next_beat_at: float = 0.0
    heard: bool = False
    misses: int = 0

    @property
    def session_id(self) -> str:
        assert self.session is not None
        return self.session.session_id

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


@dataclass(slots=True, eq=False)
class PrefillPeer:
    address: BootstrapAddress
    state: PeerState = PeerState.WAITING
    # Clock time from which on it may be asked for.
    retry_at: float = 0.0
    # Once resolved; all ranks of the worker while it is not known to fit.
    sources: list[Source] = field(default_factory=list)
    # Aborts of rooms that failed before we knew where to send them.
    unsent_aborts: deque[tuple[BootstrapInfo, AbortRoom]] = field(default_factory=lambda: deque(maxlen=1024))

    def __str__(self) -> str:
        host, port, rank = self.address
        return f"prefill at bootstrap address {host}:{port}" + (f", data parallel rank {rank}" if rank else "")

    @property
    def is_ready(self) -> bool:
        """Rooms may be announced. Not while a source is silent: it may have been replaced."""
        return self.state is PeerState.READY and all(source.misses == 0 for source in self.sources)

    @property
    def dp_size(self) -> int | None:
        """Of the worker it belongs to; None until it is resolved."""
        return self.sources[0].info.args.rank.dp_size if self.sources else None

    def name_of(self, source: Source) -> str:
        """What to call one of its ranks in messages."""
        rank = source.info.args.rank
        return str(self) if rank.group_size == 1 else f"{self}, rank {rank.name}"


def sources_among(infos: Sequence[PrefillInfo], ours: KVArgs, group_args: Sequence[KVArgs]) -> list[Source]:
    """The ranks of a prefill that a decode rank has to do with; `group_args` are those of all ranks of its own worker.

    Raises ValueError where the two do not fit.
    """
    for info in infos:
        if info.version != PROTOCOL_VERSION:
            raise ValueError(version_difference(ours=PROTOCOL_VERSION, theirs=info.version))
        if difference := info.args.difference(ours, ()):
            raise ValueError(f"prefill and decode differ: {difference}")
    feeds = feeds_of(ours.rank.index, group_args, [info.args for info in infos])
    for feed in feeds:
        if difference := infos[feed.source].args.difference(ours, feed.pairs):
            raise ValueError(f"prefill and decode differ: {difference}")
    return [Source(infos[feed.source], feed.pairs, feed.num_targets) for feed in feeds]
