"""The writes of one room, in the order in which they must land.

1. `add` queues copies, and CastPlans in parts that fit the staging memory.
2. `submit` packs and hands them to the transport, as far as both take them; what is left waits for the next call.
3. `poll` forgets what is final and gives its staging memory back.

Knows neither rooms nor their states: what a failure means is the sender's to decide.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple, cast

from splitserve.disaggregation.convert import CastPlan
from splitserve.disaggregation.copies import Copies, num_bytes
from splitserve.disaggregation.reshard import Plan
from splitserve.disaggregation.staging import Staging
from splitserve.disaggregation.transports.base import LocalTransport, PeerAddress, Ticket, Transport, WriteState
from splitserve.errors import CapacityError


class _Write(NamedTuple):
    copies: Copies
    # Staging slot that the copies read; None: the pool itself.
    slot: int | None = None


Action = Callable[[], None]


class Outgoing:
    def __init__(self, transport: Transport, staging: Staging | None) -> None:
        self._transport = transport
        self._staging = staging
        self._queue: deque[_Write | CastPlan | Action] = deque()
        self._tickets: list[tuple[Ticket, int | None]] = []
        # Bytes and pieces given to the transport so far.
        self.num_bytes = self.num_writes = 0

    def __len__(self) -> int:
        """Writes that are queued or under way."""
        return len(self._queue) + len(self._tickets)

    def add(self, plan: Plan) -> None:
        """Raises ValueError where the plan needs staging memory and there is none."""
        if len(plan.copies):
            self._queue.append(_Write(plan.copies))
        for conversion in plan.casts:
            if self._staging is None:
                raise ValueError(f"no staging memory to convert {conversion.src_dtype} to {conversion.dst_dtype} in")
            self._queue += self._staging.parts(conversion)

    def add_action(self, action: Action) -> None:
        """Something to run in its turn, while the peer cannot fence us. The transport must be a LocalTransport."""
        self._queue.append(action)

    def submit(self, peer: PeerAddress) -> None:
        """Give the transport what it takes; the next ticket that becomes final makes room for more."""
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
        """Forget final tickets: how many, and the worst of what went wrong with its cause, None where nothing did."""
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
        """None while the staging memory is full."""
        if isinstance(write, _Write):
            return write
        assert self._staging is not None
        packed = self._staging.pack(write, session_id)
        return None if packed is None else _Write(packed[1], packed[0])

    def _release(self, slot: int | None) -> None:
        if slot is not None and self._staging is not None:
            self._staging.release(slot)
