"""What passes between the schedulers of a worker whose data parallel ranks compute their steps together.

    to_hub    each rank -> hub     joins a step, or leaves
    to_rank   hub -> each rank     is called to a step, learns that it is complete, or that there will be none any more

The hub is in the process of rank 0, in a thread of its own; every rank has a thread that hears. Pipes of ZMQ: who
receives binds, so that what is sent before the other side is there waits for it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress

import msgspec
import zmq

from splitserve.disaggregation.waker import Waker
from splitserve.errors import EngineError
from splitserve.launch.rank_channel import Context, open_pull, open_push
from splitserve.scheduler.lockstep import Hub, Joined, Left, Member, Order, Orders

# Messages that one end has not taken yet. A rank has one step under way.
MAX_MESSAGES = 256
# Seconds that the others have to join a step: as long as they have in the middle of one.
JOIN_TIMEOUT = 300.0
_AT_THE_END = "it has ended"


class LockstepEndpoints(msgspec.Struct, frozen=True, kw_only=True):
    """How the data parallel ranks of one worker reach each other."""

    # Of torch.distributed, e.g. file:///tmp/x.
    init_method: str
    # ZMQ endpoints: where the hub hears, and by rank where that one does.
    to_hub: str
    to_rank: tuple[str, ...]

    @classmethod
    def in_folder(cls, folder: str, num_ranks: int) -> LockstepEndpoints:
        """Of ranks on this host. The folder is one that this user alone can enter."""
        return cls(
            init_method=f"file://{folder}/lockstep-rendezvous",
            to_hub=f"ipc://{folder}/lockstep-hub",
            to_rank=tuple(f"ipc://{folder}/lockstep-{rank}" for rank in range(num_ranks)),
        )


class LockstepChannel:
    """One rank's end, and its `member` of the group. `wake` ends its scheduler's waiting, from any thread."""

    def __init__(
        self, endpoints: LockstepEndpoints, rank: int, wake: Callable[[], None], timeout: float = JOIN_TIMEOUT
    ) -> None:
        self._context: Context = zmq.Context()
        self._hub = _HubEnd(self._context, endpoints) if rank == 0 else None
        self._push = open_push(self._context, endpoints.to_hub, MAX_MESSAGES)
        # ZMQ's sockets are for one thread at a time.
        self._lock = threading.Lock()
        self._is_open = True
        self._rank = rank
        self.member = Member(rank, self._send, self._leave, wake, timeout)
        pull = open_pull(self._context, endpoints.to_rank[rank], MAX_MESSAGES)
        self._listener = _Listener(pull, self._hear, f"lockstep-rank-{rank}")

    def retire(self) -> None:
        """This rank takes part in no further step, and ends nobody's in the middle. From any thread."""
        self.member.retire(_AT_THE_END)

    def close(self) -> None:
        """Idempotent. Rank 0's is the end of the group."""
        self._listener.close()
        with self._lock:
            self._is_open = False
            self._push.close()
        if self._hub is not None:
            self._hub.close()
        self._context.term()

    def _hear(self, frame: bytes) -> None:
        self.member.hear(msgspec.msgpack.decode(frame, type=Order))

    def _send(self, message: Joined | Left) -> None:
        with self._lock:
            if not self._is_open:
                return
            try:
                self._push.send(msgspec.msgpack.encode(message), zmq.NOBLOCK)
            except zmq.Again:
                raise EngineError("data parallel rank 0 does not take messages: restart the worker") from None

    def _leave(self, reason: str) -> None:
        # A hub that takes nothing has no step that anybody waits in.
        with suppress(EngineError):
            self._send(Left(self._rank, reason))


class _HubEnd:
    """The hub with its pipes."""

    def __init__(self, context: Context, endpoints: LockstepEndpoints) -> None:
        self._hub = Hub(len(endpoints.to_rank))
        self._to_rank = [open_push(context, endpoint, MAX_MESSAGES) for endpoint in endpoints.to_rank]
        self._listener = _Listener(open_pull(context, endpoints.to_hub, MAX_MESSAGES), self._hear, "lockstep-hub")

    def close(self) -> None:
        """Idempotent. Whoever still waits for a step hears that there will be none."""
        self._listener.close()
        self._post(self._hub.leave(0, _AT_THE_END))
        for socket in self._to_rank:
            socket.close()
        self._to_rank = []

    def _hear(self, frame: bytes) -> None:
        message = msgspec.msgpack.decode(frame, type=Joined | Left)
        match message:
            case Joined():
                self._post(self._hub.join(message))
            case Left():
                self._post(self._hub.leave(message.rank, message.reason))

    def _post(self, orders: Orders) -> None:
        for rank, order in orders:
            try:
                self._to_rank[rank].send(msgspec.msgpack.encode(order), zmq.NOBLOCK)
            except zmq.Again:
                self._post(self._hub.leave(rank, "it takes no messages"))


class _Listener:
    """Calls `hear` with each frame of a socket, which is its own from now on."""

    def __init__(self, socket: zmq.Socket[bytes], hear: Callable[[bytes], None], name: str) -> None:
        self._socket = socket
        self._hear = hear
        self._waker = Waker()
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Idempotent. What has arrived is heard."""
        self._is_closing = True
        self._waker.wake()
        self._thread.join()
        self._waker.close()
        self._socket.close()

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._waker.fileno(), zmq.POLLIN)
        while not self._is_closing:
            poller.poll()
            self._waker.clear()
            self._drain()

    def _drain(self) -> None:
        while True:
            try:
                frame = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._hear(frame)
