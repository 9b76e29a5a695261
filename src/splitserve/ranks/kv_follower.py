"""FollowerRooms: a follower's ends of its worker's rooms, controlled by the driver's orders.

1. `tick` carries out the received orders on this rank's own KVManager.
2. It reports every room that has changed since: state, quiescence, orders carried out.
3. If an order cannot be carried out, or the driver is gone, the rooms fail here, and their peers are notified.

One thread calls `tick`: after the link received frames, and after a room of the KVManager changed.
"""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass
from typing import cast

from splitserve.core.errors import SplitserveError, WorkerUnavailableError
from splitserve.core.request import BootstrapInfo
from splitserve.ranks.kv_group import RankLink
from splitserve.ranks.kv_group_wire import (
    AnnouncePages,
    AnyOrder,
    Clear,
    GiveUp,
    OpenReceiver,
    OpenSender,
    RoomReport,
    SendPages,
    decode_order,
    encode,
)
from splitserve.ranks.touched import TouchedRooms
from splitserve.transfer.ports import RankManager, RankReceiver, RankSender
from splitserve.transfer.state import KVPoll
from splitserve.transfer.wire import RoomFailureCause

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Followed:
    """One room. `end` is None if it could not be opened; `failure` is the cause."""

    bootstrap: BootstrapInfo
    end: RankSender | RankReceiver | None = None
    failure: SplitserveError | None = None
    num_orders: int = 1
    reported: RoomReport | None = None

    def report(self, number: int) -> RoomReport:
        end = self.end
        if end is None:
            assert self.failure is not None
            cause = RoomFailureCause.of(self.failure)
            return RoomReport(
                number=number, num_orders=self.num_orders, state=KVPoll.FAILED, is_quiescent=True, failure=cause
            )
        # Read the state first: the quiescence read after it is at least as new.
        state = end.poll()
        return RoomReport(
            number=number,
            num_orders=self.num_orders,
            state=state,
            is_quiescent=end.quiescent(),
            failure=RoomFailureCause.of(end.failure()) if state is KVPoll.FAILED else None,
            stats=cast("RankSender", end).stats() if state is KVPoll.SUCCESS and hasattr(end, "stats") else None,
        )


class FollowerRooms:
    """Rooms of one follower. `manager`: this rank's. `link`: to the driver."""

    def __init__(self, manager: RankManager, link: RankLink) -> None:
        self._manager = manager
        self._link = link
        self._rooms: dict[int, _Followed] = {}
        # Rooms that changed since their last report.
        self._touched = TouchedRooms()

    @property
    def num_rooms(self) -> int:
        return len(self._rooms)

    def tick(self) -> None:
        for frame in self._link.collect():
            self._carry_out(decode_order(frame))
        if not self._link.is_open:
            self._end_all(WorkerUnavailableError("the driver of this worker is gone: retry on another"))
            return
        for number in self._touched.take():
            room = self._rooms.get(number)
            if room is None:
                continue
            report = room.report(number)
            if report != room.reported:
                room.reported = report
                self._link.send(encode(report))

    def _carry_out(self, order: AnyOrder) -> None:
        # Also report the new number of orders.
        self._touched.add(order.number)
        if isinstance(order, OpenSender | OpenReceiver):
            self._open(order)
            return
        room = self._rooms[order.number]
        room.num_orders += 1
        try:
            self._apply(order, room)
        except Exception as error:
            # A bug, here or in the driver. The room fails instead of hanging, and the rank keeps serving.
            logger.exception("a follower cannot carry out %s", type(order).__name__)
            if room.end is not None:
                room.end.give_up(SplitserveError(f"{type(order).__name__} failed: {error!r}: see this rank's log"))

    def _open(self, order: OpenSender | OpenReceiver) -> None:
        room = self._rooms[order.number] = _Followed(order.bootstrap)
        try:
            if isinstance(order, OpenSender):
                room.end = self._manager.sender(order.rid, order.bootstrap)
            else:
                room.end = self._manager.receiver(order.rid, order.bootstrap, order.attempt)
        except SplitserveError as error:
            room.failure = error
        else:
            room.end.watch(functools.partial(self._touched.add, order.number))

    def _apply(self, order: AnyOrder, room: _Followed) -> None:
        match order:
            case Clear(number=number):
                del self._rooms[number]
                if room.end is not None:
                    room.end.clear()
            case _ if room.end is None:
                pass
            case SendPages() as sent:
                cast("RankSender", room.end).send(
                    sent.pages,
                    is_last=sent.is_last,
                    metadata_index=sent.metadata_index,
                    window_pages=sent.window_pages,
                )
            case AnnouncePages() as target:
                cast("RankReceiver", room.end).init(
                    target.pages,
                    target.metadata_index,
                    num_tokens=target.num_tokens,
                    num_held_tokens=target.num_held_tokens,
                    window_pages=target.window_pages,
                )
            case GiveUp(cause=cause):
                room.end.give_up(cause.to_error(room.bootstrap.key))

    def _end_all(self, error: SplitserveError) -> None:
        for room in self._rooms.values():
            if room.end is not None:
                room.end.give_up(error)
