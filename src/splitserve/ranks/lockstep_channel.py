"""Messages between the schedulers of a worker with data parallel ranks that compute their steps together.

    to_hub    each rank -> hub     joins a step, or leaves
    to_rank   hub -> each rank     order to join a step, notice that it is complete, or that there will be no more steps

The hub runs in the process of rank 0, in a thread of its own. Every rank has a receiving thread. Pipes of ZMQ: the
receiver binds, so that frames sent before the receiver has started wait for it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress

import msgspec
import zmq

from splitserve.core.errors import EngineError
from splitserve.ranks.rank_channel import Context, open_pull, open_push
from splitserve.scheduler.lockstep import Hub, Joined, Member, Order, Orders, RankLeft
from splitserve.transfer.control import PollingThread

# Maximum number of queued messages per receiver. A rank has one step in flight.
MAX_MESSAGES = 256
# Seconds for the other ranks to join a step, the same as in the middle of a step.
JOIN_TIMEOUT = 300.0
_AT_THE_END = "it has ended"


class LockstepEndpoints(msgspec.Struct, frozen=True, kw_only=True):
    """Addresses by which the data parallel ranks of one worker reach each other."""

    # torch.distributed init method, e.g. file:///tmp/x.
    init_method: str
    # ZMQ endpoints at which the hub receives, and at which each rank receives.
    to_hub: str
    to_rank: tuple[str, ...]

    @classmethod
    def in_folder(cls, folder: str, num_ranks: int) -> LockstepEndpoints:
        """Return endpoints for ranks on this host. Only this user may have access to the folder."""
        return cls(
            init_method=f"file://{folder}/lockstep-rendezvous",
            to_hub=f"ipc://{folder}/lockstep-hub",
            to_rank=tuple(f"ipc://{folder}/lockstep-{rank}" for rank in range(num_ranks)),
        )


class LockstepChannel:
    """One rank's end, with its `member` of the group. `wake`: wakes the rank's scheduler; called from any thread."""

    def __init__(
        self, endpoints: LockstepEndpoints, rank: int, wake: Callable[[], None], timeout: float = JOIN_TIMEOUT
    ) -> None:
        self._context: Context = zmq.Context()
        self._hub = _HubEnd(self._context, endpoints) if rank == 0 else None
        self._push = open_push(self._context, endpoints.to_hub, MAX_MESSAGES)
        # A ZMQ socket may be used by one thread at a time.
        self._lock = threading.Lock()
        self._is_open = True
        self._rank = rank
        self.member = Member(rank, self._send, self._leave, wake, timeout)
        pull = open_pull(self._context, endpoints.to_rank[rank], MAX_MESSAGES)
        self._listener = _Listener(pull, self._hear, f"lockstep-rank-{rank}")

    def retire(self) -> None:
        """Request to leave, from any thread. The hub decides whether the step in flight or the group ends first."""
        self._leave(_AT_THE_END)

    def close(self) -> None:
        """Close the channel. Idempotent. On rank 0 this ends the group."""
        self._listener.close()
        with self._lock:
            self._is_open = False
            self._push.close()
        if self._hub is not None:
            self._hub.close()
        self._context.term()

    def _hear(self, frame: bytes) -> None:
        self.member.receive(msgspec.msgpack.decode(frame, type=Order))

    def _send(self, message: Joined | RankLeft) -> None:
        with self._lock:
            if not self._is_open:
                return
            try:
                self._push.send(msgspec.msgpack.encode(message), zmq.NOBLOCK)
            except zmq.Again:
                raise EngineError("data parallel rank 0 does not take messages: restart the worker") from None

    def _leave(self, reason: str) -> None:
        # If the hub does not receive, no rank waits in one of its steps.
        with suppress(EngineError):
            self._send(RankLeft(self._rank, reason))


class _HubEnd:
    """The hub with its pipes."""

    def __init__(self, context: Context, endpoints: LockstepEndpoints) -> None:
        self._hub = Hub(len(endpoints.to_rank))
        self._to_rank = [open_push(context, endpoint, MAX_MESSAGES) for endpoint in endpoints.to_rank]
        # Rank 0 closes its own end first: a message that cannot arrive would delay the end of the context.
        self._to_rank[0].linger = 0
        self._listener = _Listener(open_pull(context, endpoints.to_hub, MAX_MESSAGES), self._hear, "lockstep-hub")

    def close(self) -> None:
        """Close the hub. Ranks that still wait for a step are notified that there will be none. Idempotent."""
        self._listener.close()
        self._post(self._hub.leave(0, _AT_THE_END))
        for socket in self._to_rank:
            socket.close()
        self._to_rank = []

    def _hear(self, frame: bytes) -> None:
        message = msgspec.msgpack.decode(frame, type=Joined | RankLeft)
        match message:
            case Joined():
                self._post(self._hub.join(message))
            case RankLeft():
                self._post(self._hub.leave(message.rank, message.reason))

    def _post(self, orders: Orders) -> None:
        for rank, order in orders:
            try:
                self._to_rank[rank].send(msgspec.msgpack.encode(order), zmq.NOBLOCK)
            except zmq.Again:
                self._post(self._hub.leave(rank, "it takes no messages"))


class _Listener(PollingThread):
    """Thread that calls `hear` with each frame of a socket. It owns the socket."""

    def __init__(self, socket: zmq.Socket[bytes], hear: Callable[[bytes], None], name: str) -> None:
        super().__init__(name, [socket], self._drain)
        self._socket = socket
        self._hear = hear
        self.start()

    def close(self) -> None:
        """Close the socket after `hear` has processed all frames that have arrived. Idempotent."""
        super().close()
        self._socket.close()

    def _drain(self) -> bool:
        with suppress(zmq.Again):
            while True:
                self._hear(self._socket.recv(zmq.NOBLOCK))
        return True
