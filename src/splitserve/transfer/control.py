"""Production runtime of a KVManager: its messages over ZeroMQ, and a thread that ticks it.

Connections are encrypted (CURVE) under a key derived from the cluster token: a peer without the token sends no
frame, and its connection ends within a second.

The scheduler's thread is inside the model for up to a second at a time; this one answers peers meanwhile. It sleeps
until a control message arrives, the transport finished a write, the scheduler called a port, or a heartbeat may be due.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import zmq

from splitserve.core.errors import SplitserveError
from splitserve.process.authentication import curve_keys
from splitserve.process.threads import Waker
from splitserve.transfer.manager import KVManager
from splitserve.transfer.pending import HANDSHAKE_SECONDS

logger = logging.getLogger(__name__)

# Maximum number of peers with an open socket. Beyond it, the least recently used socket is closed.
MAX_CONNECTIONS = 2048
# Maximum number of frames queued for one peer. Further frames are dropped.
MAX_QUEUED_FRAMES = 10_000
# Size of the largest message: the pages of a request with a million of them.
MAX_FRAME_BYTES = 8 << 20
# Size of the kernel's queue of connections that are not accepted yet.
BACKLOG = 1024
# Frames received per tick: a flood must not keep the manager from its rooms and deadlines.
MAX_FRAMES_A_TICK = 1000
# Milliseconds for which a closed socket still tries to deliver queued frames.
LINGER_MS = 500
# Milliseconds between two checks of deadlines and heartbeats when nothing else happens.
TICK_MS = 100


class ZmqChannel:
    """ControlChannel over PUSH and PULL sockets on `host`, each manager with one PULL socket on a free port.

    Peers with another `token` cannot connect.
    """

    def __init__(self, host: str, token: bytes = b"") -> None:
        self._context = zmq.Context()
        # Sending sockets, as many that still deliver their last frames, and the receiving socket. The default is 1,023.
        self._context.set(zmq.MAX_SOCKETS, 2 * MAX_CONNECTIONS + 1)
        listener = curve_keys(token, "control")
        self._listener_key = listener.public
        # Key pair of the sending sockets. A peer authenticates by the listener's key, not by this pair.
        self._own_keys = zmq.curve_keypair()
        self._pull = self._context.socket(zmq.PULL)
        self._pull.setsockopt(zmq.IPV6, ":" in host)
        self._pull.setsockopt(zmq.HANDSHAKE_IVL, int(HANDSHAKE_SECONDS * 1000))
        self._pull.setsockopt(zmq.CURVE_SERVER, True)
        self._pull.setsockopt(zmq.CURVE_SECRETKEY, listener.secret)
        self._pull.setsockopt(zmq.BACKLOG, BACKLOG)
        self._pull.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        self._pull.setsockopt(zmq.RCVHWM, MAX_QUEUED_FRAMES)
        name = f"[{host}]" if ":" in host else host
        port = self._pull.bind_to_random_port(f"tcp://{name}")
        self._address = f"tcp://{name}:{port}"
        self._push: OrderedDict[str, zmq.Socket[bytes]] = OrderedDict()

    @property
    def address(self) -> str:
        return self._address

    @property
    def pull_socket(self) -> zmq.Socket[bytes]:
        """Socket for polling only."""
        return self._pull

    def send(self, address: str, frame: bytes) -> None:
        try:
            self._socket_to(address).send(frame, zmq.NOBLOCK)
        except zmq.ZMQError as error:
            logger.warning("dropped a control message of %d bytes to %s: %s", len(frame), address, error)

    def receive(self) -> list[bytes]:
        frames: list[bytes] = []
        with contextlib.suppress(zmq.Again):
            while len(frames) < MAX_FRAMES_A_TICK:
                frames.append(self._pull.recv(zmq.NOBLOCK))
        return frames

    def forget(self, address: str) -> None:
        if socket := self._push.pop(address, None):
            socket.close(linger=LINGER_MS)

    def close(self) -> None:
        for address in list(self._push):
            self.forget(address)
        self._pull.close(linger=0)
        self._context.term()

    def _socket_to(self, address: str) -> zmq.Socket[bytes]:
        socket = self._push.get(address)
        if socket is None:
            while len(self._push) >= MAX_CONNECTIONS:
                self.forget(next(iter(self._push)))
            socket = self._context.socket(zmq.PUSH)
            socket.setsockopt(zmq.IPV6, "[" in address)
            socket.setsockopt(zmq.SNDHWM, MAX_QUEUED_FRAMES)
            socket.setsockopt(zmq.CURVE_SERVERKEY, self._listener_key)
            socket.setsockopt(zmq.CURVE_PUBLICKEY, self._own_keys[0])
            socket.setsockopt(zmq.CURVE_SECRETKEY, self._own_keys[1])
            socket.connect(address)
            self._push[address] = socket
        self._push.move_to_end(address)
        return socket


class PollingThread:
    """Thread that calls `turn` when a socket has frames, after `wake`, and every `tick_ms` (None: never).

    It ends when `turn` returns False, or with `close`, after a last turn. Close it before the sockets.
    """

    def __init__(
        self,
        name: str,
        sockets: Sequence[zmq.Socket[bytes]],
        turn: Callable[[], bool],
        *,
        tick_ms: int | None = None,
        waker: Waker | None = None,
    ) -> None:
        self._sockets = sockets
        self._turn = turn
        self._tick_ms = tick_ms
        self._waker = waker or Waker()
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def wake(self) -> None:
        """Call `turn` soon. From any thread."""
        self._waker.wake()

    def close(self) -> None:
        """Stop the thread. Idempotent."""
        self._is_closing = True
        self._waker.wake()
        if self._thread.is_alive():
            self._thread.join()
        self._waker.close()

    def _run(self) -> None:
        poller = zmq.Poller()
        for source in (*self._sockets, self._waker.fileno()):
            poller.register(source, zmq.POLLIN)
        while not self._is_closing:
            poller.poll(self._tick_ms)
            self._waker.clear()
            if not self._turn():
                return


class ManagerThread:
    """Thread that ticks a KVManager and ends with it. `close` ends both; the transport stays open.

    `waker` must be the one that the manager's `wake` and the transport's progress callback use. `on_change` is called
    from the thread after a tick in which a room's state changed. It must not block.
    """

    def __init__(
        self, manager: KVManager[Any], channel: ZmqChannel, waker: Waker, on_change: Callable[[], None]
    ) -> None:
        self._manager = manager
        self._channel = channel
        self._on_change = on_change
        self._thread = PollingThread("kv-manager", [channel.pull_socket], self._turn, tick_ms=TICK_MS, waker=waker)
        self.start = self._thread.start

    def close(self) -> None:
        """Fail open rooms, notify the peers, end the thread. Idempotent."""
        self._thread.close()
        self._manager.close()
        self._channel.close()

    def _turn(self) -> bool:
        try:
            changed = self._manager.tick()
        except Exception as error:
            # A bug. Open rooms fail with an error instead of hanging, and the worker keeps serving.
            logger.exception("the KV manager failed")
            self._manager.fail_all(SplitserveError(f"the KV manager failed: {error!r}: see the worker's log"))
            changed = True
        if changed:
            self._on_change()
        return True
