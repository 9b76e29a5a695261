"""GroupManager: the rooms of a worker with a model sharded over several ranks, as seen by its one scheduler.

Each rank has a KVManager and an end of every room. The driver's GroupManager sends orders to all of them. A room's
state is the minimum over the ranks, so one failed rank fails the room. Pages are free only when no rank's end can be
written to or read from any more (ADR 16, 19).

1. A call of the scheduler is first applied to the driver's own end. If that raises, followers are not notified.
   Otherwise it is sent to every follower as an order.
2. `tick` collects the followers' reports and polls the rooms that changed on any rank. A room that failed on one rank
   is aborted on all others.
3. A follower's quiescence counts once it has carried out all orders.

The scheduler's thread calls the ports. One other thread calls `tick` after a link received frames, or after a room of
the driver's own KVManager changed.
"""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

from splitserve.core.errors import SplitserveError, WorkerUnavailableError
from splitserve.core.messages import TransferStats
from splitserve.core.parallel import ParallelRank
from splitserve.core.request import BootstrapInfo, RoomKey
from splitserve.ranks.kv_group_wire import (
    AnnouncePages,
    AnyOrder,
    Clear,
    GiveUp,
    OpenReceiver,
    OpenSender,
    RoomReport,
    SendPages,
    decode_report,
    encode,
)
from splitserve.ranks.touched import TouchedRooms
from splitserve.transfer.ports import AskedPrompt, RankManager, RankReceiver, RankSender, ReceiverPort, SenderPort
from splitserve.transfer.room import abort_error
from splitserve.transfer.state import KVEvent, KVPoll, advance
from splitserve.transfer.wire import RoomFailureCause

End = TypeVar("End", bound=RankSender | RankReceiver)


class RankLink(Protocol):
    """Link between the driver and one follower: frames in order, none lost, never blocking, until the link ends.

    The driver sends from the scheduler's thread and from the one that ticks, never at the same time. It collects in
    the latter only.
    """

    def send(self, frame: bytes) -> None:
        """Send a frame. A frame that cannot be queued ends the link."""
        ...

    def collect(self) -> list[bytes]:
        """Return the received frames."""
        ...

    @property
    def is_open(self) -> bool:
        """Return whether the link is open. Once False it stays False: the other rank is gone."""
        ...


def followers_of(rank: ParallelRank) -> list[ParallelRank]:
    """Return the followers in the group of `rank`, in the order in which the driver keeps their links."""
    return [other for other in rank.group() if not other.is_driver]


class GroupManager:
    """Implementation of ManagerPort for the driver.

    `local`: the driver's own KVManager. `rank`: the driver's. `links`: one for each of `followers_of(rank)`.
    """

    def __init__(self, local: RankManager, rank: ParallelRank, links: Sequence[RankLink]) -> None:
        self._followers = followers_of(rank)
        if not rank.is_driver or len(links) != len(self._followers):
            raise ValueError(f"{len(links)} links for the {len(self._followers)} followers of {rank}")
        self._local = local
        self._rank = rank
        self._links = links
        self._lock = threading.RLock()
        self._numbers = itertools.count(1)
        self._rooms: dict[int, GroupSender | GroupReceiver] = {}
        # Rooms that changed since the last poll.
        self._touched = TouchedRooms()
        # Indices of followers with a link that has ended.
        self._gone: set[int] = set()

    @property
    def num_rooms(self) -> int:
        return len(self._rooms)

    # -- ManagerPort ----------------------------------------------------------------------------------------------

    def sender(self, rid: str, bootstrap: BootstrapInfo) -> SenderPort:
        with self._lock:
            room = GroupSender(self, rid, bootstrap.key, next(self._numbers), self._local.sender(rid, bootstrap))
            self._add(room, OpenSender(number=room.number, rid=rid, bootstrap=bootstrap))
            return room

    def receiver(self, rid: str, bootstrap: BootstrapInfo) -> ReceiverPort:
        with self._lock:
            room = GroupReceiver(self, rid, bootstrap.key, next(self._numbers), self._local.receiver(rid, bootstrap))
            attempt = room.local.attempt
            self._add(room, OpenReceiver(number=room.number, rid=rid, bootstrap=bootstrap, attempt=attempt))
            return room

    def take_asked_prompts(self) -> list[AskedPrompt]:
        """Return requested prompts. Only drivers get them; followers keep announcements until the room is opened."""
        return self._local.take_asked_prompts()

    # -- for the owner --------------------------------------------------------------------------------------------

    def tick(self) -> bool:
        """Collect the followers' reports. Return True after a change that a room's state may depend on."""
        changed = False
        with self._lock:
            for i, link in enumerate(self._links):
                for frame in link.collect():
                    report = decode_report(frame)
                    if room := self._rooms.get(report.number):
                        room.take(i, report)
                        self._touched.add(report.number)
                        changed = True
                if not link.is_open and i not in self._gone:
                    self._gone.add(i)
                    for number in self._rooms:
                        self._touched.add(number)
                    changed = True
            for number in self._touched.take():
                if room := self._rooms.get(number):
                    room.poll()
        return changed

    # -- for the rooms, under the lock ----------------------------------------------------------------------------

    @property
    def lock(self) -> threading.RLock:
        return self._lock

    @property
    def num_followers(self) -> int:
        return len(self._followers)

    def order(self, order: AnyOrder) -> None:
        frame = encode(order)
        for i, link in enumerate(self._links):
            if i not in self._gone:
                link.send(frame)

    def remove(self, number: int) -> None:
        self._rooms.pop(number, None)

    def first_gone(self) -> SplitserveError | None:
        """Return why no room can continue. None if all ranks are alive."""
        if not self._gone:
            return None
        return WorkerUnavailableError(f"{self.name_of(min(self._gone))} of this worker is gone: retry on another")

    def name_of(self, follower: int | None) -> str:
        rank = self._rank if follower is None else self._followers[follower]
        return f"rank {rank.name}"

    def _add(self, room: GroupSender | GroupReceiver, order: AnyOrder) -> None:
        self._rooms[room.number] = room
        room.local.watch(functools.partial(self._touched.add, room.number))
        # Include changes that happened before `watch`.
        self._touched.add(room.number)
        self.order(order)


class _GroupRoom(Generic[End]):
    """Common part of both ends: reports of the room, one failure cause, abort and clear."""

    def __init__(self, group: GroupManager, rid: str, key: RoomKey, number: int, local: End) -> None:
        self.number = number
        self.local = local
        self._group = group
        self.rid = rid
        self.key = key
        # Orders of this room so far. The first one opens it.
        self._num_orders = 1
        # Last report of each follower.
        nothing = RoomReport(number=number, num_orders=0, state=KVPoll.BOOTSTRAPPING, is_quiescent=False)
        self._reports = [nothing] * group.num_followers
        # True once pages were sent or announced on every rank. All ranks were ready for that.
        self._has_started = False
        self._failure: SplitserveError | None = None

    def take(self, follower: int, report: RoomReport) -> None:
        self._reports[follower] = report

    def poll(self) -> KVPoll:
        state = KVPoll.FAILED if self._group.first_gone() else poll_and_all_reduce([self.local], self)[0]
        if state is KVPoll.FAILED and self._failure is None:
            with self._group.lock:
                self._give_up(self._first_failure())
        if self._failure is not None:
            return KVPoll.FAILED
        # An order to all ranks counts at once, although some ranks have not reported it yet.
        return max(state, KVPoll.TRANSFERRING) if self._has_started else state

    def all_reduce_min(self, values: list[int]) -> list[int]:
        """Return the minimum of `values` and the followers' last reports. Implements `Reducer` for this room."""
        return [min([value, *(int(report.state) for report in self._reports)]) for value in values]

    def failure(self) -> SplitserveError:
        if self._failure is None:
            raise RuntimeError(f"room {self.key} of request {self.rid} has no failure")
        return self._failure

    def abort(self, reason: str, *, status_code: int = 499) -> None:
        with self._group.lock:
            if self.poll() not in (KVPoll.SUCCESS, KVPoll.FAILED):
                self._give_up(abort_error(self.rid, self.key, reason, status_code))

    def quiescent(self) -> bool:
        """Return whether every rank is quiescent after all orders.

        A rank that is gone cannot report that. Its rooms keep their pages until this worker ends.
        """
        # A room that failed on some rank must first be aborted on the others; `poll` starts that.
        self.poll()
        said = all(r.is_quiescent and r.num_orders == self._num_orders for r in self._reports)
        return said and self.local.quiescent() and self._group.first_gone() is None

    def clear(self) -> None:
        with self._group.lock:
            if not self.quiescent():
                raise RuntimeError(f"room {self.key} is not quiescent on all ranks: it cannot be cleared yet")
            self.local.clear()
            self._order(Clear(number=self.number))
            self._group.remove(self.number)

    def _order(self, order: AnyOrder) -> None:
        self._num_orders += 1
        self._group.order(order)

    def _first_failure(self) -> SplitserveError:
        """Return the cause reported by a rank, with the rank's name."""
        if self.local.poll() is KVPoll.FAILED:
            return self._named(None, RoomFailureCause.of(self.local.failure()))
        for i, report in enumerate(self._reports):
            if report.failure is not None:
                return self._named(i, report.failure)
        gone = self._group.first_gone()
        assert gone is not None
        return gone

    def _named(self, follower: int | None, cause: RoomFailureCause) -> SplitserveError:
        message = f"{self._group.name_of(follower)}: {cause.message}"
        return RoomFailureCause(message=message, http_status=cause.http_status, reason=cause.reason).to_error(self.key)

    def _give_up(self, error: SplitserveError) -> None:
        """Fail the room on every rank. Ranks on which it has already failed ignore this."""
        if self._failure is None:
            self._failure = error
            self.local.give_up(error)
            self._order(GiveUp(number=self.number, cause=RoomFailureCause.of(error)))


class GroupSender(_GroupRoom[RankSender]):
    def send(
        self,
        pages: Sequence[int],
        *,
        is_last: bool,
        metadata_index: int | None = None,
        window_pages: Sequence[int] = (),
    ) -> None:
        with self._group.lock:
            if (state := self.poll()) is KVPoll.FAILED:
                return
            if state is KVPoll.BOOTSTRAPPING:
                raise ValueError(f"room {self.key}: send before every rank knows decode's pages")
            self.local.send(pages, is_last=is_last, metadata_index=metadata_index, window_pages=window_pages)
            self._has_started = True
            self._order(
                SendPages(
                    number=self.number,
                    pages=list(pages),
                    is_last=is_last,
                    metadata_index=metadata_index,
                    window_pages=list(window_pages),
                )
            )

    def stats(self) -> TransferStats | None:
        """Return the statistics of all ranks together. They send in parallel: bytes add up, seconds do not."""
        each = [self.local.stats(), *(report.stats for report in self._reports)]
        known = [stats for stats in each if stats is not None]
        if len(known) < len(each):
            return None
        return TransferStats(
            num_bytes=sum(s.num_bytes for s in known),
            num_writes=sum(s.num_writes for s in known),
            num_pages_exchanged=max(s.num_pages_exchanged for s in known),
            seconds=max(s.seconds for s in known),
            exposed_seconds=max(s.exposed_seconds for s in known),
        )


class GroupReceiver(_GroupRoom[RankReceiver]):
    def init(
        self,
        pages: Sequence[int],
        metadata_index: int,
        *,
        num_tokens: int,
        num_held_tokens: int = 0,
        prompt_ids: Sequence[int] = (),
        window_pages: Sequence[int] = (),
    ) -> None:
        with self._group.lock:
            if (state := self.poll()) is KVPoll.FAILED:
                return
            # Every rank must have finished its handshake.
            advance(state, KVEvent.STARTED)
            self.local.init(
                pages,
                metadata_index,
                num_tokens=num_tokens,
                num_held_tokens=num_held_tokens,
                prompt_ids=prompt_ids,
                window_pages=window_pages,
            )
            self._has_started = True
            self._order(
                AnnouncePages(
                    number=self.number,
                    pages=list(pages),
                    metadata_index=metadata_index,
                    num_tokens=num_tokens,
                    num_held_tokens=num_held_tokens,
                    window_pages=list(window_pages),
                )
            )


class Pollable(Protocol):
    def poll(self) -> KVPoll: ...


class Reducer(Protocol):
    """Reduction over the ranks of a group, by their last reports or collectively."""

    def all_reduce_min(self, values: list[int]) -> list[int]:
        """Return the element-wise minimum over all ranks. `values`: this rank's."""
        ...


def poll_and_all_reduce(pollers: Sequence[Pollable], group: Reducer | None = None) -> list[KVPoll]:
    """Return the minimum of each poller's states over all ranks of `group`. Without a group: this rank's own.

    KVPoll only rises, and Failed is the lowest.
    """
    states = [poller.poll() for poller in pollers]
    return states if group is None else [KVPoll(v) for v in group.all_reduce_min([int(s) for s in states])]
