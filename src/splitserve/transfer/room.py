"""Common part of both ends of a room, and the ranks of a worker that share its rooms.

Each rank of a worker has a KVManager with its own end of every room. The driver's ends represent the worker for its
scheduler. A worker of one rank is a group without followers.

1. A call of the scheduler is first applied to the driver's own end. If that raises, followers are not notified.
   Otherwise it is sent to every follower as an order (`ranks/kv_follower.py` executes it).
2. Followers report each change of their ends. A room's state is the minimum over the ranks. A room that fails on one
   rank fails on all (ADR 16, 19).
3. Pages are free only if no rank's end can be written to or read from any more. A follower's quiescence counts once it
   has carried out all orders.

The scheduler's thread may call `poll`, `failure` and `quiescent` at any time. Everything else happens under the
manager's lock.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from splitserve.cache.shared_pages import SharedPages
from splitserve.core.clock import Clock
from splitserve.core.config import DisaggregationConfig
from splitserve.core.errors import (
    DeadlineExceededError,
    RequestAbortedError,
    SplitserveError,
    WorkerUnavailableError,
)
from splitserve.core.parallel import ParallelRank
from splitserve.core.request import BootstrapInfo, RoomKey
from splitserve.transfer import group_wire
from splitserve.transfer.convert import StagingArea
from splitserve.transfer.mail import Mailbox
from splitserve.transfer.metadata import MetadataBuffers
from splitserve.transfer.pool_bytes import Arrivals, Checksums
from splitserve.transfer.state import POLL, KVEvent, KVPoll, RoomState, Table, advance
from splitserve.transfer.synthetic import SyntheticKV
from splitserve.transfer.transports.base import Transport
from splitserve.transfer.wire import KVArgs, RoomFailureCause


@dataclass(frozen=True, slots=True, kw_only=True)
class RoomLimits:
    """Bounds of a manager's tables."""

    # Maximum number of open rooms.
    max_rooms: int = 8192
    # Prefill: announcements and aborts kept for rooms without a request.
    max_early: int = 8192
    # Prefill: finished rooms remembered to answer late messages.
    max_closed: int = 8192
    # Maximum number of peers.
    max_peers: int = 1024


@dataclass(slots=True, kw_only=True)
class Context:
    """Connections, memory and settings of a manager, which it shares with its rooms."""

    clock: Clock
    mailbox: Mailbox
    # Its regions are those of the layout, of the metadata and of the staging memory, in this order.
    transport: Transport
    args: KVArgs
    config: DisaggregationConfig
    metadata: MetadataBuffers
    # On prefill workers: memory to convert and pack KV in. None: KV cannot be converted or packed.
    staging: StagingArea | None = None
    # On decode workers: widens KV that arrives in a narrower dtype. None: all KV arrives in the pool's dtype.
    arrivals: Arrivals | None = None
    # On decode workers: fills rooms without a peer. None: their pages keep what they held.
    synthetic: SyntheticKV | None = None
    # Computes checksums of rooms in our pool. None: the CPU cannot read the pool.
    checksums: Checksums | None = None
    # Pool shared with other workers, for page exchange. None: the pool is not shared.
    shared: SharedPages | None = None
    # On decode workers: KVArgs of all ranks of this worker, including ours, in order of `rank.index`.
    # Empty: the worker has one rank.
    group_args: Sequence[KVArgs] = ()
    limits: RoomLimits = RoomLimits()
    # On drivers: the followers. Empty on followers and on workers of one rank.
    group: RankGroup = field(default_factory=lambda: RankGroup())
    # On prefill workers: random number from the driver, the same for all ranks of this start of the worker.
    instance: int = 0
    # Makes the owner call `tick` soon. May be called from any thread. The default: the owner ticks periodically.
    wake: Callable[[], None] = lambda: None
    # On decode workers: provides the memory of pages up to this number before KV arrives. Must not block.
    expect: Callable[[int], None] = lambda page: None
    # Guards the manager and all its rooms.
    lock: threading.RLock = field(default_factory=threading.RLock)
    # Set when a room's state changes; reset by `tick`.
    changed: bool = False

    def __post_init__(self) -> None:
        self.group_args = self.group_args or [self.args]


class Room:
    """One rank's end of a room. A driver's end combines it with the ends of its followers."""

    table: ClassVar[Table]
    # States in which this rank's pages are free: the peer can neither write nor read them.
    free_states: ClassVar[frozenset[RoomState]]

    def __init__(self, context: Context, key: RoomKey, rid: str, on_clear: Callable[[Room], None]) -> None:
        self.context = context
        self.key = key
        self.rid = rid
        self.opened_at = context.clock.now()
        # Called after each change, under the lock. Must not block. None: no follower reports this room.
        self.on_change: Callable[[], None] | None = None
        self._on_clear = on_clear
        # State of this rank's end.
        self.state = next(iter(self.table))
        # State of the slowest rank.
        self._polled = KVPoll.BOOTSTRAPPING
        self._failure: SplitserveError | None = None
        # The room's number in the group, orders to followers so far, and each follower's last report.
        self.number = 0
        self._num_orders = 0
        self._reports: list[group_wire.RoomReport] = []

    def poll(self) -> KVPoll:
        return self._polled

    def failure(self) -> SplitserveError:
        """Return the cause of the failure on the rank that failed first. Call only in state Failed."""
        if self._failure is None:
            raise RuntimeError(f"room {self.key} of request {self.rid} is {self._polled.name}: it has no failure")
        return self._failure

    def quiescent(self) -> bool:
        """Return whether no peer can access this room's pages on any rank, after all orders. Reuse them then.

        A lost rank does not report its last orders. Open rooms keep their pages until this worker ends.
        """
        if self.state not in self.free_states:
            return False
        return all(r.is_quiescent and r.num_orders == self._num_orders for r in self._reports)

    def abort(self, reason: str, *, status_code: int = 499) -> None:
        """Fail the room on all ranks and notify the peers. Idempotent, no-op once final."""
        error = RequestAbortedError(f"request {self.rid} (room {self.key}): {reason}")
        error.http_status = status_code
        self.end(error)

    def end(self, error: SplitserveError) -> None:
        """Fail the room with that cause, as `abort`."""
        with self.context.lock:
            self._fail(error)
        self.context.wake()

    def clear(self) -> None:
        """Forget the room. Call once, when final and quiescent."""
        with self.context.lock:
            if not (self.is_final and self.quiescent()):
                raise RuntimeError(
                    f"room {self.key} is {self._polled.name}, not quiescent on all ranks: it cannot be cleared yet"
                )
            if self._reports:
                self.order(group_wire.Clear(number=self.number))
                self.context.group.rooms.pop(self.number, None)
            self.state = advance(self.table, self.state, KVEvent.CLEARED)
            self._on_clear(self)

    @property
    def is_final(self) -> bool:
        """True if this rank's end has succeeded or failed."""
        return POLL.get(self.state, self._polled) in (KVPoll.SUCCESS, KVPoll.FAILED)

    def advance(self, event: KVEvent) -> None:
        self.state = advance(self.table, self.state, event)
        self._combine()

    def fail(self, error: SplitserveError, *, informed: object | None = None) -> None:
        """Fail the room because of an event on this rank. `informed`: the peer rank that needs no AbortRoom."""
        if self.is_final:
            return
        self._fail(self.context.group.named(None, RoomFailureCause.of(error), self.key) or error, informed)

    def join_group(self, number: int, reports: list[group_wire.RoomReport]) -> None:
        """Depend on followers, which were ordered to open their ends."""
        self.number, self._reports, self._num_orders = number, reports, 1
        if self._failure is not None:
            self.order(group_wire.GiveUp(number=number, cause=RoomFailureCause.of(self._failure)))
        self._combine()

    def take_report(self, follower: int, report: group_wire.RoomReport) -> None:
        self._reports[follower] = report
        if report.failure is not None and (error := self.context.group.named(follower, report.failure, self.key)):
            self._fail(error)
        self._combine()

    def order(self, order: group_wire.AnyOrder) -> None:
        self._num_orders += 1
        self.context.group.send(order)

    def deadline_error(self, stage: str, seconds: float, setting: str) -> DeadlineExceededError:
        return DeadlineExceededError(
            f"room {self.key} of request {self.rid} spent over {seconds:g} s {stage}: "
            f"see whether the other side is up and not overloaded, or raise {setting}"
        )

    def _fail(self, error: SplitserveError, informed: object | None = None) -> None:
        """Fail the room on every rank. No-op if it is final: the first cause stays."""
        if self._polled in (KVPoll.SUCCESS, KVPoll.FAILED):
            return
        # Set the cause before the state, so that a reader of Failed finds it.
        self._failure = error
        if self._reports:
            self.order(group_wire.GiveUp(number=self.number, cause=RoomFailureCause.of(error)))
        if self.is_final:
            # This rank has succeeded, another one failed.
            self._combine()
        else:
            self.advance(KVEvent.FAILED)
            self._stop(informed)

    def _stop(self, informed: object | None) -> None:
        """End the work of a failed room and notify the peers. `informed`: the peer rank that needs no notice."""
        raise NotImplementedError

    def _combine(self) -> None:
        """Update the state of the slowest rank and report the change."""
        polled = POLL.get(self.state, self._polled)
        if self._failure is not None:
            polled = KVPoll.FAILED
        elif self._reports:
            slowest = poll_and_all_reduce(polled, (report.state for report in self._reports))
            # An order to all ranks counts at once, although some ranks have not reported it yet.
            polled = max(slowest, KVPoll.TRANSFERRING) if polled >= KVPoll.TRANSFERRING else slowest
        self._polled = polled
        self.context.changed = True
        if self.on_change is not None:
            self.on_change()


class RankGroup:
    """The followers of a driver. `rank`: the driver's. `links`: one for each of `followers_of(rank)`."""

    def __init__(self, rank: ParallelRank | None = None, links: Sequence[group_wire.RankLink] = ()) -> None:
        self._rank = rank or ParallelRank()
        self._followers = group_wire.followers_of(self._rank)
        if not self._rank.is_driver or len(links) != len(self._followers):
            raise ValueError(f"{len(links)} links for the {len(self._followers)} followers of {rank}")
        self._links = links
        self._numbers = itertools.count(1)
        self.rooms: dict[int, Room] = {}
        # Indices of followers with a link that has ended.
        self._lost: set[int] = set()

    def open(self, room: Room, bootstrap: BootstrapInfo, attempt: int | None = None, *, num_tokens: int = 0) -> None:
        """Have the followers open their ends of `room`. `attempt`: of receivers, this use of the room."""
        if not self._links:
            return
        number = next(self._numbers)
        self.rooms[number] = room
        order = group_wire.OpenRoom(
            number=number, rid=room.rid, bootstrap=bootstrap, attempt=attempt, num_tokens=num_tokens
        )
        self.send(order)
        nothing = group_wire.RoomReport(number=number, num_orders=0, state=KVPoll.BOOTSTRAPPING, is_quiescent=False)
        room.join_group(number, [nothing] * len(self._links))
        if error := self.lost_rank():
            room.end(error)

    def send(self, order: group_wire.AnyOrder) -> None:
        frame = group_wire.ENCODER.encode(order)
        for i, link in enumerate(self._links):
            if i not in self._lost:
                link.send(frame)

    def collect(self) -> bool:
        """Apply the followers' reports. Return True if any room may have changed."""
        changed = False
        for i, link in enumerate(self._links):
            for frame in link.collect():
                report = group_wire.REPORTS.decode(frame)
                if room := self.rooms.get(report.number):
                    room.take_report(i, report)
                    changed = True
            if not link.is_open and i not in self._lost:
                self._lost.add(i)
                for room in self.rooms.values():
                    room.end(self.lost_rank() or SplitserveError("a rank is gone"))
                changed = True
        return changed

    def lost_rank(self) -> SplitserveError | None:
        """Return why no room can continue. None if all ranks are alive."""
        if not self._lost:
            return None
        name = self._followers[min(self._lost)].name
        return WorkerUnavailableError(f"rank {name} of this worker is gone: retry on another")

    def named(self, follower: int | None, cause: RoomFailureCause, key: RoomKey) -> SplitserveError | None:
        """Return a rank's failure with the rank's name. None: there is only one rank. `follower` None: the driver."""
        if not self._links:
            return None
        rank = self._rank if follower is None else self._followers[follower]
        message = f"rank {rank.name}: {cause.message}"
        return RoomFailureCause(message=message, http_status=cause.http_status, reason=cause.reason).to_error(key)


def poll_and_all_reduce(own: KVPoll, others: Iterable[KVPoll]) -> KVPoll:
    """Return the minimum of this rank's state and the states that the other ranks reported.

    KVPoll only rises, and Failed is the lowest.
    """
    return min((own, *others))
