"""State of a prefill peer on a decode worker, from the first room with its bootstrap address until it is lost.

  WAITING      lost recently: not contacted until `retry_at`
  RESOLVING    requesting its ranks from the bootstrap server
  REGISTERING  registering our memory with its ranks, until all have answered
  READY        rooms may be announced; pinged at every heartbeat interval

A prefill worker may consist of several ranks. The sources are those ranks that this decode rank receives from or
announces to (`feeds_of`). Each has its own session. The loss of one is the loss of the whole worker, because every
room needs all.

Each data parallel rank of a prefill worker is a separate peer. Any of them reports how many there are. Until the first
is found, a room uses rank 0; it then moves to its own rank.

A peer leaves the table when it is lost, replaced, rejected, or reports our session as unknown. The next room looks
it up again.
"""

from __future__ import annotations

import enum
from collections import Counter, deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from splitserve.core.request import BootstrapInfo
from splitserve.transfer.mail import Mailbox
from splitserve.transfer.pairing import HeadPair, sources_of
from splitserve.transfer.transports.base import PeerAddress
from splitserve.transfer.wire import (
    PROTOCOL_VERSION,
    AbortRoom,
    AnyControlMessage,
    KVArgs,
    PrefillInfo,
    version_difference,
)

# First and longest pause, and time in which the level halves. In seconds.
FIRST_PAUSE = 0.25
LONGEST_PAUSE = 30.0
HALF_LIFE = 60.0
# Below this level a peer counts as healthy and is forgotten.
_FORGOTTEN_LEVEL = 0.25
# Maximum number of addresses. Beyond it, the address with the oldest loss is forgotten.
_MAX_ADDRESSES = 4096


class BootstrapAddress(NamedTuple):
    """Address of one data parallel rank of a prefill worker, by its bootstrap server."""

    host: str
    port: int
    dp_rank: int = 0


@dataclass(frozen=True, slots=True)
class LookupFailure:
    """Failed lookup of a prefill at its bootstrap server."""

    message: str
    # True if a retry cannot help: unknown rank, malformed request.
    is_definitive: bool = False


class Directory(Protocol):
    """Lookup of the prefill at a bootstrap address. Never blocks."""

    def request(self, address: BootstrapAddress, timeout: float) -> None:
        """Start a lookup. Retry for `timeout` seconds while the server is unreachable or not ready."""
        ...

    def result(self, address: BootstrapAddress) -> list[PrefillInfo] | LookupFailure | None:
        """Return the result, once: all ranks of that prefill, in order of index. None while there is none."""
        ...


class PeerState(enum.StrEnum):
    WAITING = "waiting"
    RESOLVING = "resolving"
    REGISTERING = "registering"
    READY = "ready"


@dataclass(slots=True, eq=False)
class Source:
    """One rank of a prefill, with its session to this decode rank."""

    info: PrefillInfo
    # Heads that it writes of every room.
    pairs: tuple[HeadPair, ...] = ()
    # Number of ranks of our worker that announce each room to it.
    num_targets: int = 1
    # Session through which it writes to us. None until compatibility is proven.
    session: PeerAddress | None = None
    # Whether it has accepted our registration.
    is_registered: bool = False
    # Heartbeat: due time of the next one, whether a message arrived since the last, intervals missed in a row.
    next_beat_at: float = 0.0
    has_answered: bool = False
    misses: int = 0

    @property
    def session_id(self) -> str:
        assert self.session is not None
        return self.session.session_id

    def beat(self, now: float, interval: float) -> bool:
        """Advance the heartbeat if an interval is over. Return True if a message is due now."""
        if now < self.next_beat_at:
            return False
        self.misses = 0 if self.has_answered else self.misses + 1
        self.has_answered = False
        self.next_beat_at = now + interval
        return True

    def post(self, mailbox: Mailbox, body: AnyControlMessage) -> None:
        mailbox.post(self.info.control_address, self.info.epoch, body)


@dataclass(slots=True, eq=False)
class PrefillPeer:
    address: BootstrapAddress
    state: PeerState = PeerState.WAITING
    # Clock time of the next lookup.
    retry_at: float = 0.0
    # Set once resolved. All ranks of the worker if it is incompatible.
    sources: list[Source] = field(default_factory=list)
    # Aborts of rooms that failed before their prefill's address was known.
    unsent_aborts: deque[tuple[BootstrapInfo, AbortRoom]] = field(default_factory=lambda: deque(maxlen=1024))

    def __str__(self) -> str:
        host, port, rank = self.address
        return f"prefill at bootstrap address {host}:{port}" + (f", data parallel rank {rank}" if rank else "")

    @property
    def is_ready(self) -> bool:
        """Return whether rooms may be announced. False while a source is silent: it may have been replaced."""
        return self.state is PeerState.READY and all(source.misses == 0 for source in self.sources)

    @property
    def dp_size(self) -> int | None:
        """Return the data parallel size of its worker. None until resolved."""
        return self.sources[0].info.args.rank.dp_size if self.sources else None

    def name_of(self, source: Source) -> str:
        rank = source.info.args.rank
        return str(self) if rank.group_size == 1 else f"{self}, rank {rank.name}"


def sources_among(infos: Sequence[PrefillInfo], ours: KVArgs, group_args: Sequence[KVArgs]) -> list[Source]:
    """Return the ranks of a prefill that send to this decode rank. `group_args`: KVArgs of all ranks of its worker.

    Raises ValueError if the two workers are incompatible.
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


@dataclass(frozen=True, slots=True)
class Feed:
    """Share of one prefill rank in the KV of one decode rank."""

    # Index of the prefill rank in its worker.
    source: int
    # Heads that it writes. May be empty.
    pairs: tuple[HeadPair, ...]
    # Total number of decode ranks that this prefill rank writes to or that announce rooms to it.
    num_targets: int


def feeds_of(target: int, targets: Sequence[KVArgs], sources: Sequence[KVArgs]) -> list[Feed]:
    """Return the feeds of the decode rank `targets[target]`, in order of sources. Both sequences are whole workers.

    Every decode rank computes the same result by itself, from layouts and ranks of both workers:
    - The decode driver receives from the prefill driver, which writes the metadata row, even if it takes no heads from
      it.
    - A prefill rank may send no heads because other ranks hold the same ones. The decode driver announces every room
      to it: that rank has an end of the room too and must not wait forever.
    Raises ValueError, with both shapes, if the layouts do not fit.
    """
    layouts = [source.layout for source in sources]
    try:
        parts = [sources_of(t.layout, layouts, tp_rank=t.rank.tp_rank, tp_size=t.rank.tp_size) for t in targets]
    except ValueError as error:
        raise ValueError(f"prefill of {_shape(sources)} cannot feed decode of {_shape(targets)}: {error}") from error
    driver = next(part for part, t in zip(parts, targets, strict=True) if t.rank.is_driver)
    fed = {source for part in parts for source in part}
    for i, source in enumerate(sources):
        if source.rank.is_driver or i not in fed:
            driver.setdefault(i, ())
    counts = Counter(source for part in parts for source in part)
    return [Feed(source, pairs, counts[source]) for source, pairs in sorted(parts[target].items())]


def _shape(ranks: Sequence[KVArgs]) -> str:
    rank = ranks[0].rank
    return f"tensor parallel size {rank.tp_size} x pipeline parallel size {rank.pp_size}"


@dataclass(kw_only=True)
class Backoff:
    """Pause before a lost peer is contacted again. It grows with each loss and shrinks again over time.

    A first loss costs nothing: most are a single broken connection. Each further loss raises the peer's level by one,
    and the pause about doubles. The level halves every `half_life` seconds, so no peer is excluded for good after one
    bad minute.
    """

    first_pause: float = FIRST_PAUSE
    longest_pause: float = LONGEST_PAUSE
    half_life: float = HALF_LIFE
    # Lost peers, in order of their last loss: level, times of the last loss and of the next attempt.
    _records: dict[Hashable, tuple[float, float, float]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._records)

    def lost(self, address: Hashable, now: float) -> None:
        level = self.level(address, now) + 1.0
        # Level 1: no pause. Then 1, 3, 7, ... times the first pause.
        pause = min(self.longest_pause, self.first_pause * (2.0 ** min(level - 1.0, 64.0) - 1.0))
        self._records.pop(address, None)
        self._records[address] = level, now, now + pause
        if len(self._records) > _MAX_ADDRESSES:
            del self._records[next(iter(self._records))]

    def level(self, address: Hashable, now: float) -> float:
        """Return the decayed number of losses. 0.0 for a healthy peer."""
        if address not in self._records:
            return 0.0
        level, lost_at, retry_at = self._records[address]
        level = float(level * 0.5 ** ((now - lost_at) / self.half_life))
        if level < _FORGOTTEN_LEVEL and now >= retry_at:
            del self._records[address]
            return 0.0
        return level

    def retry_at(self, address: Hashable, now: float) -> float:
        """Return the time of the next attempt: `now` for a healthy peer."""
        self.level(address, now)
        return max(now, self._records[address][2]) if address in self._records else now
