"""FollowerRooms: the rooms of a worker on a rank without a scheduler. It executes the driver's orders.

1. `tick` executes the orders that have arrived on this rank's KVManager, in order. An order that fails here fails its
   room. The driver reads that from the report and aborts the room on the other ranks.
2. It reports each room that changed: state, quiescence, number of executed orders.
3. When the link ends, the driver is gone and every room fails.

The owner calls `tick` after the link received frames, and after a room of the KVManager changed.
"""

from __future__ import annotations

import functools
import logging
import threading
from dataclasses import dataclass

from splitserve.core.errors import SplitserveError, WorkerUnavailableError
from splitserve.core.request import BootstrapInfo
from splitserve.transfer import group_wire
from splitserve.transfer.decode_manager import DecodeManager
from splitserve.transfer.prefill_manager import PrefillManager
from splitserve.transfer.receiver import KVReceiver
from splitserve.transfer.sender import KVSender
from splitserve.transfer.state import KVPoll
from splitserve.transfer.wire import RoomFailureCause

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Followed:
    """One room. `end` is None if it could not be opened; `failure` is the cause."""

    bootstrap: BootstrapInfo
    end: KVSender | KVReceiver | None = None
    failure: SplitserveError | None = None
    num_orders: int = 1
    reported: group_wire.RoomReport | None = None

    def report(self, number: int) -> group_wire.RoomReport:
        end = self.end
        # Read the state first: the quiescence read after it is at least as new.
        state = end.poll() if end else KVPoll.FAILED
        failure = None
        if state is KVPoll.FAILED:
            failure = end.failure() if end else self.failure
        return group_wire.RoomReport(
            number=number,
            num_orders=self.num_orders,
            state=state,
            is_quiescent=end is None or end.quiescent(),
            failure=RoomFailureCause.of(failure) if failure else None,
            stats=end.stats() if isinstance(end, KVSender) else None,
        )


class FollowerRooms:
    """Rooms of one follower. `manager`: this rank's. `link`: to the driver."""

    def __init__(self, manager: PrefillManager | DecodeManager, link: group_wire.RankLink) -> None:
        self._manager = manager
        self._link = link
        self._rooms: dict[int, _Followed] = {}
        # Numbers of rooms that changed since their last report. Other threads add to it, under the lock.
        self._dirty: set[int] = set()
        self._lock = threading.Lock()

    @property
    def num_rooms(self) -> int:
        return len(self._rooms)

    def tick(self) -> None:
        for frame in self._link.collect():
            self._execute(group_wire.ORDERS.decode(frame))
        if not self._link.is_open:
            error = WorkerUnavailableError("the driver of this worker is gone: retry on another")
            for room in self._rooms.values():
                if room.end is not None:
                    room.end.end(error)
            return
        with self._lock:
            dirty, self._dirty = self._dirty, set()
        # In the order in which the rooms were opened.
        for number in sorted(dirty):
            changed = self._rooms.get(number)
            if changed is None:
                continue
            report = changed.report(number)
            if report != changed.reported:
                changed.reported = report
                self._link.send(group_wire.ENCODER.encode(report))

    def _mark(self, number: int) -> None:
        with self._lock:
            self._dirty.add(number)

    def _execute(self, order: group_wire.AnyOrder) -> None:
        # Also report the new number of orders.
        self._mark(order.number)
        if isinstance(order, group_wire.OpenRoom):
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
                room.end.end(SplitserveError(f"{type(order).__name__} failed: {error!r}: see this rank's log"))

    def _open(self, order: group_wire.OpenRoom) -> None:
        room = self._rooms[order.number] = _Followed(order.bootstrap)
        try:
            if isinstance(self._manager, PrefillManager):
                room.end = self._manager.sender(order.rid, order.bootstrap, order.num_tokens)
            else:
                room.end = self._manager.receiver(order.rid, order.bootstrap, order.attempt)
        except SplitserveError as error:
            room.failure = error
        else:
            room.end.on_change = functools.partial(self._mark, order.number)

    def _apply(self, order: group_wire.AnyOrder, room: _Followed) -> None:
        match order, room.end:
            case group_wire.Clear(number=number), end:
                del self._rooms[number]
                if end is not None:
                    end.clear()
            case group_wire.SendPages() as sent, KVSender() as sender:
                sender.send(
                    sent.pages,
                    is_last=sent.is_last,
                    metadata_index=sent.metadata_index,
                    window_pages=sent.window_pages,
                )
            case group_wire.AnnouncePages() as target, KVReceiver() as receiver:
                receiver.init(
                    target.pages,
                    target.metadata_index,
                    num_tokens=target.num_tokens,
                    num_held_tokens=target.num_held_tokens,
                    window_pages=target.window_pages,
                )
            case group_wire.GiveUp(cause=cause), (KVSender() | KVReceiver()) as end:
                end.end(cause.to_error(room.bootstrap.key))
            case _:
                # The room could not be opened.
                pass
