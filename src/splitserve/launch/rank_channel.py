"""What passes between the processes of one scheduler's ranks: the driver's orders, and word of rooms both ways.

Pipes of ZMQ for each follower, one for each kind, so that an order never waits behind word of rooms:

    orders   driver -> follower    one a step, carried out in their order; an empty one is the last
    rooms    both ways             frames of whoever manages rooms over all ranks

Who receives binds, so that what is sent before the other side is there waits for it. Frames of one pipe keep their
order, those of two pipes have none. Neither end knows what the frames say. Between ranks of one host a pipe is a file
in a folder of theirs, between hosts a TCP connection (`pipe_net.py`).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress

import msgspec
import zmq

from splitserve.core.parallel import ParallelRank
from splitserve.disaggregation.group import followers_of
from splitserve.disaggregation.waker import Waker
from splitserve.errors import EngineError, WorkerUnavailableError
from splitserve.launch.pipe_net import TCP, PipeNet

logger = logging.getLogger(__name__)

# Orders that a follower has not taken yet. A loop has a few steps under way; a follower that lets more pile up is lost.
MAX_ORDERS = 256
# The same of frames about rooms.
MAX_ROOM_FRAMES = 65_536
# Seconds that a rank waits for the others while all start.
EXCHANGE_TIMEOUT = 120.0
# Frames taken at a time, and how long a closed pipe still tries to deliver.
_FRAMES_A_TURN = 1000
_LINGER_MS = 1000
# Links are looked at this often when nothing else happens: one may have ended on our own side.
_TICK_MS = 500
_LAST_ORDER = b""

Context = zmq.Context[zmq.Socket[bytes]]


class RankEndpoints(msgspec.Struct, frozen=True, kw_only=True):
    """How the ranks of one scheduler reach each other."""

    # Of torch.distributed: file:///tmp/x, or tcp://address:port where the driver listens.
    init_method: str
    # ZMQ endpoints by `ParallelRank.index`: where that rank hears orders, where it hears of rooms, and where the driver
    # hears of rooms from it.
    orders: tuple[str, ...]
    to_rank: tuple[str, ...]
    from_rank: tuple[str, ...]

    @classmethod
    def in_folder(cls, folder: str, name: str, num_ranks: int) -> RankEndpoints:
        """Of ranks on this host. `name`: theirs alone in the folder, which this user alone can enter."""
        pipes = {
            kind: tuple(f"ipc://{folder}/{name}-{i}-{kind}" for i in range(num_ranks))
            for kind in ("orders", "to_rank", "from_rank")
        }
        return cls(init_method=f"file://{folder}/{name}-rendezvous", **pipes)


class RankLink:
    """Frames about rooms between the driver and one follower, as one of the two sees it.

    `send` from any thread, all else from one.
    """

    def __init__(self, context: Context, *, hears: str, says: str, net: PipeNet | None = None) -> None:
        self.pull_socket = open_pull(context, hears, MAX_ROOM_FRAMES, net)
        self._push = open_push(context, says, MAX_ROOM_FRAMES, net)
        # ZMQ's sockets are for one thread at a time.
        self._lock = threading.Lock()
        # False once a frame was lost: the other rank takes none any more.
        self.is_open = True

    def send(self, frame: bytes) -> None:
        """Never waits. One that cannot be queued ends the link."""
        with self._lock:
            if self.is_open:
                try:
                    self._push.send(frame, zmq.NOBLOCK)
                except zmq.Again:
                    # LinkThread finds it.
                    self.is_open = False

    def collect(self) -> list[bytes]:
        """Frames that have arrived."""
        frames: list[bytes] = []
        with suppress(zmq.Again):
            while len(frames) < _FRAMES_A_TURN:
                frames.append(self.pull_socket.recv(zmq.NOBLOCK))
        return frames

    def wait(self, timeout: float) -> bytes:
        """The next frame. Raises WorkerUnavailableError after so many seconds."""
        if not self.pull_socket.poll(int(timeout * 1000)):
            raise WorkerUnavailableError(f"another rank of this worker said nothing for {timeout:g} s: see its log")
        return self.pull_socket.recv()

    def close(self) -> None:
        with self._lock:
            self.is_open = False
            self._push.close()
        self.pull_socket.close()


class LinkThread:
    """Calls `tick` whenever a link has frames, or `wake` was called, and now and then. `close` it before the links.

    `on_lost` hears, once and last, why there are no more ticks: one failed, or a link has ended. The ranks do not know
    the same of their rooms then, and pages would be held for ever: the process has to end.
    """

    def __init__(self, links: Sequence[RankLink], tick: Callable[[], None], on_lost: Callable[[str], None]) -> None:
        self._links = links
        self._tick = tick
        self._on_lost = on_lost
        self._waker = Waker()
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="rank-links", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def wake(self) -> None:
        """From any thread."""
        self._waker.wake()

    def close(self) -> None:
        """Idempotent."""
        self._is_closing = True
        self._waker.wake()
        if self._thread.is_alive():
            self._thread.join()
        self._waker.close()

    def _run(self) -> None:
        poller = zmq.Poller()
        for link in self._links:
            poller.register(link.pull_socket, zmq.POLLIN)
        poller.register(self._waker.fileno(), zmq.POLLIN)
        while not self._is_closing:
            poller.poll(_TICK_MS)
            self._waker.clear()
            try:
                self._tick()
            except Exception as error:
                logger.exception("word of rooms could not be taken in")
                self._on_lost(
                    f"word of rooms could not be taken in: {error!r}: see the log, and start the worker again"
                )
                return
            if not all(link.is_open for link in self._links):
                self._on_lost("another rank of this worker takes no word of rooms any more: start the worker again")
                return


class DriverChannel:
    """The driver's ends. `close` is the last order of every follower. `net`: for those on other hosts."""

    def __init__(self, endpoints: RankEndpoints, rank: ParallelRank, net: PipeNet | None = None) -> None:
        self._context: Context = zmq.Context()
        followers = [other.index for other in followers_of(rank)]
        self._orders = {i: open_push(self._context, endpoints.orders[i], MAX_ORDERS, net) for i in followers}
        # In the order of `ParallelRank.index`.
        self.links = [
            RankLink(self._context, hears=endpoints.from_rank[i], says=endpoints.to_rank[i], net=net) for i in followers
        ]
        self._rank = rank

    def tell(self, order: bytes) -> None:
        """Order a step of every follower, from one thread at a time. Raises EngineError."""
        for index, socket in self._orders.items():
            try:
                socket.send(order, zmq.NOBLOCK)
            except zmq.Again:
                raise EngineError(f"rank {index} of this worker does not take its orders: restart the worker") from None

    def exchange(self, own: bytes, timeout: float) -> list[bytes]:
        """What each rank says of itself, by `ParallelRank.index`; all ranks call it, before anything else is said."""
        said = [link.wait(timeout) for link in self.links]
        said.insert(self._rank.index, own)
        frame = msgspec.msgpack.encode(said)
        for link in self.links:
            link.send(frame)
        return said

    def close(self) -> None:
        """Idempotent."""
        for link in self.links:
            link.close()
        for socket in self._orders.values():
            with suppress(zmq.Again):
                socket.send(_LAST_ORDER, zmq.NOBLOCK)
            socket.close()
        self.links, self._orders = [], {}
        self._context.term()


class FollowerChannel:
    """A follower's ends. `net`: where its driver is on another host."""

    def __init__(self, endpoints: RankEndpoints, rank: ParallelRank, net: PipeNet | None = None) -> None:
        self._context: Context = zmq.Context()
        hears, says = endpoints.to_rank[rank.index], endpoints.from_rank[rank.index]
        self._orders = open_pull(self._context, endpoints.orders[rank.index], MAX_ORDERS, net)
        self.link = RankLink(self._context, hears=hears, says=says, net=net)

    def orders(self) -> Iterator[bytes]:
        """Each order when it comes, up to the last."""
        while order := self._orders.recv():
            yield order

    def exchange(self, own: bytes, timeout: float) -> list[bytes]:
        """See DriverChannel."""
        self.link.send(own)
        return msgspec.msgpack.decode(self.link.wait(timeout), type=list[bytes])

    def close(self) -> None:
        self.link.close()
        self._orders.close()
        self._context.term()


def open_pull(context: Context, endpoint: str, high_water_mark: int, net: PipeNet | None = None) -> zmq.Socket[bytes]:
    socket = context.socket(zmq.PULL)
    socket.set_hwm(high_water_mark)
    socket.linger = 0
    if endpoint.startswith(TCP) and net is not None:
        net.bind(socket, endpoint)
    else:
        socket.bind(endpoint)
    return socket


def open_push(context: Context, endpoint: str, high_water_mark: int, net: PipeNet | None = None) -> zmq.Socket[bytes]:
    socket = context.socket(zmq.PUSH)
    socket.set_hwm(high_water_mark)
    # What a rank that is gone has not taken goes with it.
    socket.linger = _LINGER_MS
    if endpoint.startswith(TCP) and net is not None:
        net.connect(socket, endpoint)
    else:
        socket.connect(endpoint)
    return socket
