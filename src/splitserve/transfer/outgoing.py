"""Queue of the writes of one room, in the order in which they must land.

1. `add` queues copies, and CastPlans in parts that fit the staging memory.
2. `submit` packs and submits them as far as staging memory and transport allow. The rest waits for the next call.
3. `poll` forgets final tickets and frees their staging memory.

Independent of rooms and their states: the sender decides what a failure means.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple, cast

from splitserve.core.errors import CapacityError
from splitserve.transfer.convert import CastPlan
from splitserve.transfer.copies import Copies, num_bytes
from splitserve.transfer.reshard import LayoutPlan
from splitserve.transfer.staging import StagingArea
from splitserve.transfer.transports.base import LocalTransport, PeerAddress, Ticket, Transport, WriteState


class _Write(NamedTuple):
    copies: Copies
    # Staging slot that the copies read. None: they read the pool itself.
    slot: int | None = None


Action = Callable[[], None]


class Outgoing:
    def __init__(self, transport: Transport, staging: StagingArea | None) -> None:
        self._transport = transport
        self._staging = staging
        self._queue: deque[_Write | CastPlan | Action] = deque()
        self._tickets: list[tuple[Ticket, int | None]] = []
        # Bytes and pieces submitted to the transport so far.
        self.num_bytes = self.num_writes = 0

    def __len__(self) -> int:
        """Return the number of writes that are queued or in flight."""
        return len(self._queue) + len(self._tickets)

    def add(self, plan: LayoutPlan) -> None:
        """Queue a plan. Raises ValueError if it needs staging memory and there is none."""
        if len(plan.copies):
            self._queue.append(_Write(plan.copies))
        for conversion in plan.casts:
            if self._staging is None:
                raise ValueError(f"no staging memory to convert {conversion.src_dtype} to {conversion.dst_dtype} in")
            self._queue += self._staging.parts(conversion)

    def add_action(self, action: Action) -> None:
        """Queue a call to run in order, while the peer cannot fence us. The transport must be a LocalTransport."""
        self._queue.append(action)

    def submit(self, peer: PeerAddress) -> None:
        """Submit as many writes as the transport accepts. Call again when a ticket becomes final."""
        while self._queue:
            first = self._queue[0]
            try:
                if isinstance(first, _Write | CastPlan):
                    write = self._packed(first, peer.session_id)
                    if write is None:
                        return
                    self._queue[0] = write
                    ticket, slot = self._transport.write(peer, write.copies), write.slot
                    self.num_bytes += num_bytes(write.copies)
                    self.num_writes += len(write.copies)
                else:
                    ticket, slot = cast(LocalTransport, self._transport).call(peer, first), None
            except CapacityError:
                return
            self._queue.popleft()
            self._tickets.append((ticket, slot))

    def poll(self) -> tuple[int, tuple[WriteState, str] | None]:
        """Forget final tickets. Return their number, and the worst failure with its cause (None: no failure)."""
        worst: tuple[WriteState, str] | None = None
        pending = []
        for ticket, slot in self._tickets:
            status = self._transport.poll(ticket)
            if not status.is_final:
                pending.append((ticket, slot))
                continue
            self._release(slot)
            if status.state is not WriteState.DONE and (worst is None or status.state > worst[0]):
                worst = (status.state, status.error or "no cause given")
        num_final = len(self._tickets) - len(pending)
        self._tickets = pending
        return num_final, worst

    def drop_unsent(self) -> None:
        for write in self._queue:
            if isinstance(write, _Write):
                self._release(write.slot)
        self._queue.clear()

    def _packed(self, write: _Write | CastPlan, session_id: str) -> _Write | None:
        """Return a write with its data packed. None while the staging memory is full."""
        if isinstance(write, _Write):
            return write
        assert self._staging is not None
        packed = self._staging.pack(write, session_id)
        return None if packed is None else _Write(packed[1], packed[0])

    def _release(self, slot: int | None) -> None:
        if slot is not None and self._staging is not None:
            self._staging.release(slot)
