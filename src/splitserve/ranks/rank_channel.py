"""Channels between the processes of one scheduler's ranks: the driver's orders, and frames about rooms both ways.

Each follower has one ZMQ pipe of each kind, so that an order never waits behind frames about rooms:

    orders   driver -> follower    steps, and copies in host memory; executed in order; an empty one is the last
    rooms    both ways             frames of the group manager and its followers; each opening of a KV transfer has
                                   links of its own, so that no frame of an earlier one arrives

The receiver binds, so that frames sent before it has started wait for it. Frames of one pipe keep their order, frames
of two pipes have no order. This module does not read the frames. Between ranks of one host a pipe is a file in their
folder, between hosts a TCP connection (`PipeNet`).
"""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import msgspec
import zmq

from splitserve.core.errors import EngineError, WorkerUnavailableError
from splitserve.core.parallel import ParallelRank
from splitserve.process.authentication import CurveKeys, curve_keys
from splitserve.ranks.group_orders import CloseTransfer, OpenTransfer, encode_order
from splitserve.transfer.control import PollingThread
from splitserve.transfer.group_wire import followers_of
from splitserve.transfer.wire import new_epoch

logger = logging.getLogger(__name__)

# Maximum number of queued orders. A loop has a few steps in flight, and each retracted request has at most two orders
# about its copy behind a step. A follower with a longer queue is lost.
MAX_ORDERS = 16_384
# Maximum number of queued frames about rooms.
MAX_ROOM_FRAMES = 65_536
# Seconds that a rank waits for the others while all start.
EXCHANGE_TIMEOUT = 120.0
# Frames received per turn, and milliseconds for which a closed pipe still tries to deliver.
_FRAMES_A_TURN = 1000
_LINGER_MS = 1000
# Milliseconds between two checks of the links when nothing else happens. A link may also end because our own send
# failed.
_TICK_MS = 500
_LAST_ORDER = b""

Context = zmq.Context[zmq.Socket[bytes]]


class RankEndpoints(msgspec.Struct, frozen=True, kw_only=True):
    """Addresses by which the ranks of one scheduler reach each other."""

    # torch.distributed init method: file:///tmp/x, or tcp://address:port at which the driver listens.
    init_method: str
    # ZMQ endpoints by `ParallelRank.index`, at which: that rank receives orders, that rank receives frames about rooms,
    # and the driver receives frames about rooms from it.
    orders: tuple[str, ...]
    to_rank: tuple[str, ...]
    from_rank: tuple[str, ...]

    @classmethod
    def in_folder(cls, folder: str, name: str, num_ranks: int) -> RankEndpoints:
        """Return endpoints for ranks on this host. `name`: unique in the folder. Only this user may access it."""
        pipes = {
            kind: tuple(f"ipc://{folder}/{name}-{i}-{kind}" for i in range(num_ranks))
            for kind in ("orders", "to_rank", "from_rank")
        }
        return cls(init_method=f"file://{folder}/{name}-rendezvous", **pipes)

    def numbered(self, number: int) -> RankEndpoints:
        """Return the endpoints with the links of this number. Pipes between hosts have only number 0."""
        if number == 0:
            return self
        to_rank, from_rank = (
            tuple(f"{endpoint}-{number}" for endpoint in endpoints) for endpoints in (self.to_rank, self.from_rank)
        )
        return msgspec.structs.replace(self, to_rank=to_rank, from_rank=from_rank)


class RankLinkEnd:
    """One end of a link: frames about rooms between the driver and one follower.

    `send` may be called from any thread, all else from one.
    """

    def __init__(self, context: Context, *, hears: str, says: str, net: PipeNet | None = None) -> None:
        self.pull_socket = open_pull(context, hears, MAX_ROOM_FRAMES, net)
        self._push = open_push(context, says, MAX_ROOM_FRAMES, net)
        # A ZMQ socket may be used by one thread at a time.
        self._lock = threading.Lock()
        # False once a frame was lost, because the other rank receives no more.
        self.is_open = True

    def send(self, frame: bytes) -> None:
        """Send a frame without waiting. A frame that cannot be queued ends the link."""
        with self._lock:
            if self.is_open:
                try:
                    self._push.send(frame, zmq.NOBLOCK)
                except zmq.Again:
                    # LinkThread checks this.
                    self.is_open = False

    def collect(self) -> list[bytes]:
        """Return the received frames."""
        frames: list[bytes] = []
        with suppress(zmq.Again):
            while len(frames) < _FRAMES_A_TURN:
                frames.append(self.pull_socket.recv(zmq.NOBLOCK))
        return frames

    def wait(self, timeout: float) -> bytes:
        """Return the next frame. Raises WorkerUnavailableError after `timeout` seconds."""
        if not self.pull_socket.poll(int(timeout * 1000)):
            raise WorkerUnavailableError(f"another rank of this worker said nothing for {timeout:g} s: see its log")
        return self.pull_socket.recv()

    def close(self) -> None:
        with self._lock:
            self.is_open = False
            self._push.close()
        self.pull_socket.close()


class LinkThread(PollingThread):
    """Thread that calls `tick` when a link has frames, after `wake`, and periodically. `close` it before the links.

    `on_lost` is called once, with the reason, when ticks stop: one failed, or a link has ended. The ranks then disagree
    about their rooms, and pages would be held forever. The process must end.
    """

    def __init__(self, links: Sequence[RankLinkEnd], tick: Callable[[], None], on_lost: Callable[[str], None]) -> None:
        super().__init__("rank-links", [link.pull_socket for link in links], self._tick_links, tick_ms=_TICK_MS)
        self._links = links
        self._tick = tick
        self._on_lost = on_lost

    def _tick_links(self) -> bool:
        try:
            self._tick()
        except Exception as error:
            logger.exception("word of rooms could not be taken in")
            self._on_lost(f"word of rooms could not be taken in: {error!r}: see the log, and start the worker again")
            return False
        if not all(link.is_open for link in self._links):
            self._on_lost("another rank of this worker takes no word of rooms any more: start the worker again")
            return False
        return True


class DriverChannel:
    """The driver's ends. `close` sends every follower its last order. `net`: for followers on other hosts."""

    def __init__(self, endpoints: RankEndpoints, rank: ParallelRank, net: PipeNet | None = None) -> None:
        self._context: Context = zmq.Context()
        # The thread of the steps and that of the scheduler send orders. A ZMQ socket may be used by one at a time.
        self._lock = threading.Lock()
        self._followers = [other.index for other in followers_of(rank)]
        self._orders = {i: open_push(self._context, endpoints.orders[i], MAX_ORDERS, net) for i in self._followers}
        # Links of the open KV transfer, sorted by `ParallelRank.index`. Empty: none is open.
        self.links: list[RankLinkEnd] = []
        self._rank = rank
        self._endpoints = endpoints
        self._net = net
        self._num_openings = 0

    def open_transfer(self, bootstrap_url: str | None) -> int:
        """Let every follower open its KV transfer, over new links. Return the instance of all ranks.

        Raises EngineError.
        """
        number, self._num_openings = self._num_openings, self._num_openings + 1
        ends = self._endpoints.numbered(number)
        self.links = [
            RankLinkEnd(self._context, hears=ends.from_rank[i], says=ends.to_rank[i], net=self._net)
            for i in self._followers
        ]
        instance = new_epoch()
        self.send_order(encode_order(OpenTransfer(number, instance, bootstrap_url)))
        return instance

    def close_transfer(self) -> None:
        """Let every follower close its KV transfer, after the driver has closed its own."""
        # A follower that is gone has closed it.
        with suppress(EngineError):
            self.send_order(encode_order(CloseTransfer()))
        self._close_links()

    def _close_links(self) -> None:
        for link in self.links:
            link.close()
        self.links = []

    def send_order(self, order: bytes) -> None:
        """Send an order to every follower, from any thread. Raises EngineError."""
        with self._lock:
            for index, push in self._orders.items():
                try:
                    push.send(order, zmq.NOBLOCK)
                except zmq.Again:
                    raise EngineError(
                        f"rank {index} of this worker does not take its orders: restart the worker"
                    ) from None

    def exchange(self, own: bytes, timeout: float) -> list[bytes]:
        """Exchange one value per rank, by `ParallelRank.index`. All call it before any other message of their links."""
        said = [link.wait(timeout) for link in self.links]
        said.insert(self._rank.index, own)
        frame = msgspec.msgpack.encode(said)
        for link in self.links:
            link.send(frame)
        return said

    def close(self) -> None:
        """Send the last orders and close. Idempotent."""
        self._close_links()
        for push in self._orders.values():
            with suppress(zmq.Again):
                push.send(_LAST_ORDER, zmq.NOBLOCK)
            push.close()
        self._orders = {}
        self._context.term()


class FollowerChannel:
    """A follower's ends. `net`: given if its driver is on another host."""

    def __init__(self, endpoints: RankEndpoints, rank: ParallelRank, net: PipeNet | None = None) -> None:
        self._context: Context = zmq.Context()
        self._orders = open_pull(self._context, endpoints.orders[rank.index], MAX_ORDERS, net)
        self._endpoints = endpoints
        self._index = rank.index
        self._net = net
        self._link: RankLinkEnd | None = None

    @property
    def link(self) -> RankLinkEnd:
        """Return the link of the open KV transfer."""
        assert self._link is not None
        return self._link

    def open_link(self, number: int) -> None:
        """Open the link of this number, as the driver has ordered."""
        ends = self._endpoints.numbered(number)
        hears, says = ends.to_rank[self._index], ends.from_rank[self._index]
        self._link = RankLinkEnd(self._context, hears=hears, says=says, net=self._net)

    def close_link(self) -> None:
        link, self._link = self._link, None
        if link is not None:
            link.close()

    def orders(self) -> Iterator[bytes]:
        """Yield orders as they arrive, up to the last."""
        while order := self._orders.recv():
            yield order

    def exchange(self, own: bytes, timeout: float) -> list[bytes]:
        """Exchange values as `DriverChannel.exchange`."""
        self.link.send(own)
        return msgspec.msgpack.decode(self.link.wait(timeout), type=list[bytes])

    def close(self) -> None:
        self.close_link()
        self._orders.close()
        self._context.term()


def open_pull(context: Context, endpoint: str, high_water_mark: int, net: PipeNet | None = None) -> zmq.Socket[bytes]:
    pipe = context.socket(zmq.PULL)
    pipe.set_hwm(high_water_mark)
    pipe.linger = 0
    if endpoint.startswith(TCP) and net is not None:
        net.secure(pipe, net.listener)
        pipe.curve_server = True
        pipe.setsockopt(zmq.USE_FD, net.descriptors[endpoint])
    pipe.bind(endpoint)
    return pipe


def open_push(context: Context, endpoint: str, high_water_mark: int, net: PipeNet | None = None) -> zmq.Socket[bytes]:
    pipe = context.socket(zmq.PUSH)
    pipe.set_hwm(high_water_mark)
    # Orders that a lost rank has not received are dropped.
    pipe.linger = _LINGER_MS
    if endpoint.startswith(TCP) and net is not None:
        net.secure(pipe, net.caller)
        pipe.curve_serverkey = net.listener.public
        # The other end listens, but may answer only after its process has loaded its libraries.
        pipe.setsockopt(zmq.HANDSHAKE_IVL, 0)
        # Frames in flight on a broken connection are lost. Therefore the pipe does not reconnect, and later sends fail.
        pipe.setsockopt(zmq.RECONNECT_IVL, -1)
    pipe.connect(endpoint)
    return pipe


# Milliseconds between two heartbeats, and of silence after which a connection is broken.
_HEARTBEAT_MS = 5_000
_SILENCE_MS = 15_000
TCP = "tcp://"


@dataclass(frozen=True, slots=True)
class PipeNet:
    """Keys of the pipes of one start. `descriptors`: endpoint -> descriptor of a socket to listen on."""

    listener: CurveKeys
    caller: CurveKeys
    descriptors: Mapping[str, int]

    @classmethod
    def of(cls, token: bytes, instance: int, descriptors: Mapping[str, int]) -> PipeNet:
        """Derive the keys. `instance`: random number of this start of the worker."""
        salt = str(instance).encode()
        return cls(curve_keys(token, "pipe listener", salt), curve_keys(token, "pipe caller", salt), descriptors)

    @staticmethod
    def secure(pipe: zmq.Socket[bytes], keys: CurveKeys) -> None:
        """Set the keys and heartbeats: firewalls drop idle connections, and a broken path must be noticed."""
        pipe.curve_publickey, pipe.curve_secretkey = keys.public, keys.secret
        pipe.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
        pipe.setsockopt(zmq.HEARTBEAT_TIMEOUT, _SILENCE_MS)


class Listeners:
    """Sockets that listen on free ports of one address, for processes to be started. Close them after that."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._sockets: dict[str, socket.socket] = {}

    def open(self) -> str:
        """Open one more socket and return its endpoint. Raises OSError."""
        sock = socket.create_server((self._address, 0))
        endpoint = f"{TCP}{self._address}:{sock.getsockname()[1]}"
        self._sockets[endpoint] = sock
        return endpoint

    def descriptors(self, endpoints: Iterable[str]) -> dict[str, int]:
        """Return the descriptors of those endpoints that are ours."""
        return {e: self._sockets[e].fileno() for e in endpoints if e in self._sockets}

    def close(self) -> None:
        """Close our copies. Processes that have inherited the sockets keep listening. Idempotent."""
        for sock in self._sockets.values():
            sock.close()
        self._sockets.clear()
