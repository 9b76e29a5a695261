"""Publishers of KV events, chosen by name.

1. The scheduler calls `publish` with what changed in a turn; that never waits and never fails.
2. `ZmqEventPublisher` numbers the batch and leaves it to its thread, which sends it to all subscribers and keeps it.
3. A subscriber that missed some asks the replay socket for all from a number on.
4. Where that is too long ago, or a queue ran over, numbers are missing: the subscriber asks the worker for its index.
   After lost batches comes an empty one, so that the gap shows also where nothing changes any more.

Batches are ordered by their number, from 0 on. A subscriber may get one twice, by replay.
"""

from __future__ import annotations

import logging
import queue
import re
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import ClassVar, Protocol

import zmq

from splitserve.config import KVEventsConfig
from splitserve.errors import ConfigError, clause
from splitserve.events.schema import EventBatch, KVEvent, encode

logger = logging.getLogger(__name__)

# Seconds: between two looks at the stop flag, and what a shutdown waits for.
_POLL_SECONDS = 0.1
_SHUTDOWN_SECONDS = 2.0
# Ends a replay, in the place of a number.
END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)
MAX_PORT = 65535
# Of tcp, a host or `*`, a colon and a port; the port's absence is reported apart.
_ENDPOINT = re.compile(r"tcp://(?:[^:/\s]+|\[[0-9A-Fa-f:.%\w]+\])(?::(?P<port>\d{1,5}))?|(?:ipc|inproc)://\S+")


class EventPublisher(Protocol):
    # Addresses bound, with the ports chosen. Empty: none, because it connects out, publishes nothing or has no replay.
    endpoint: str
    replay_endpoint: str

    def publish(self, events: Sequence[KVEvent]) -> None:
        """What changed, in its order; often nothing. Never waits."""
        ...

    @property
    def next_sequence(self) -> int:
        """The number that the next batch will have."""
        ...

    def shutdown(self) -> None:
        """Send what is queued, within a bound of time, and close. Idempotent."""
        ...


class NullEventPublisher:
    endpoint = replay_endpoint = ""
    next_sequence = 0

    def publish(self, events: Sequence[KVEvent]) -> None:
        pass

    def shutdown(self) -> None:
        pass


class ZmqEventPublisher:
    """One PUB socket and, where asked for, one ROUTER socket for replay, both in a thread of their own.

    Raises ConfigError for an address that cannot be listened at.
    """

    def __init__(
        self,
        attn_dp_rank: int,
        endpoint: str = "tcp://*:5557",
        replay_endpoint: str = "",
        buffer_steps: int = 10_000,
        hwm: int = 100_000,
        max_queue_size: int = 100_000,
        topic: str = "",
        as_arrays: bool = False,
        replay_topic: bool = True,
    ) -> None:
        self._dp_rank = attn_dp_rank
        self._topic = topic.encode()
        self._as_arrays = as_arrays
        self._replay_topic = replay_topic
        self._sequence = 0
        self._queue: queue.Queue[tuple[int, EventBatch]] = queue.Queue(max_queue_size)
        # (number, payload), the oldest first.
        self._sent: deque[tuple[int, bytes]] = deque(maxlen=buffer_steps)
        # The last batch was lost, and no later one has told of it.
        self._has_overrun = False
        self._has_warned = False
        self._is_over = threading.Event()
        self._context = zmq.Context()
        self._pub = self._context.socket(zmq.PUB)
        self._pub.setsockopt(zmq.SNDHWM, hwm)
        self._replay = self._context.socket(zmq.ROUTER) if replay_endpoint else None
        if self._replay is not None:
            # A ROUTER drops what a client has no room for: there must be room for a whole replay.
            self._replay.setsockopt(zmq.SNDHWM, max(hwm, buffer_steps + 1))
        try:
            self.endpoint = self._open(self._pub, endpoint)
            self.replay_endpoint = self._bind(self._replay, replay_endpoint) if self._replay is not None else ""
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self._thread = threading.Thread(target=self._run, name=f"kv-events-{attn_dp_rank}", daemon=True)
        self._thread.start()

    @property
    def next_sequence(self) -> int:
        return self._sequence

    def publish(self, events: Sequence[KVEvent]) -> None:
        if not events and not (self._has_overrun and not self._queue.full()):
            return
        batch = (self._sequence, EventBatch.now(events, self._dp_rank))
        # Also of a batch that is lost: who misses the number asks for all.
        self._sequence += 1
        try:
            self._queue.put_nowait(batch)
            self._has_overrun = False
        except queue.Full:
            if not self._has_warned:
                logger.warning("KV events: the queue is full, batches are lost; subscribers must ask for the index")
            self._has_overrun = self._has_warned = True

    def shutdown(self) -> None:
        self._is_over.set()
        self._thread.join(_SHUTDOWN_SECONDS + 1)

    def _open(self, socket: zmq.Socket[bytes], endpoint: str) -> str:
        """Bind or connect; the address bound, empty for a connection."""
        if is_bound(endpoint):
            return self._bind(socket, endpoint)
        address = offset_endpoint_port(endpoint, self._dp_rank)
        try:
            socket.connect(address)
        except zmq.ZMQError as error:
            raise ConfigError(
                f"KV events: cannot connect to {address}: {clause(error)}. Choose another endpoint"
            ) from error
        return ""

    def _bind(self, socket: zmq.Socket[bytes], endpoint: str) -> str:
        """The address with the port that it was given."""
        address = offset_endpoint_port(endpoint, self._dp_rank)
        try:
            socket.bind(address)
        except zmq.ZMQError as error:
            raise ConfigError(
                f"KV events: cannot listen at {address}: {clause(error)}. Choose another endpoint, or port 0"
            ) from error
        # ZMQ writes out the wildcard that it was given.
        return socket.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0").replace("//0.0.0.0:", "//*:")

    def _run(self) -> None:
        try:
            while not (self._is_over.is_set() and self._queue.empty()):
                self._send_next()
                self._answer_replays()
        finally:
            self._context.destroy(linger=int(_SHUTDOWN_SECONDS * 1000))

    def _send_next(self) -> None:
        try:
            number, batch = self._queue.get(timeout=_POLL_SECONDS)
        except queue.Empty:
            return
        payload = encode(batch, as_arrays=self._as_arrays)
        self._sent.append((number, payload))
        # A PUB socket drops what a slow subscriber does not take.
        self._pub.send_multipart((self._topic, number.to_bytes(8, "big"), payload))

    def _answer_replays(self) -> None:
        while self._replay is not None and self._replay.poll(0):
            client, *frames = self._replay.recv_multipart()
            # A REQ socket puts an empty frame before its own, and wants it back.
            envelope = (client, b"") if len(frames) > 1 and not frames[0] else (client,)
            if len(frames[-1]) != 8:
                logger.warning("KV events: a replay was asked for by %d bytes instead of 8", len(frames[-1]))
                continue
            start = int.from_bytes(frames[-1], "big")
            topic, no_topic = ((self._topic,), (b"",)) if self._replay_topic else ((), ())
            for number, payload in self._sent:
                if number >= start:
                    self._reply(*envelope, *topic, number.to_bytes(8, "big"), payload)
            self._reply(*envelope, *no_topic, END_OF_REPLAY, b"")

    def _reply(self, *frames: bytes) -> None:
        assert self._replay is not None
        try:
            self._replay.send_multipart(frames, zmq.NOBLOCK)
        except zmq.ZMQError as error:
            logger.warning("KV events: a replay was given up: %s", error)


def is_bound(endpoint: str) -> bool:
    """Whether a publisher listens at `endpoint`, by vLLM's rule: it connects out to a TCP address without a wildcard.

    Port 0 is a wildcard too: it stands for any free port.
    """
    has_wildcard = any(wildcard in endpoint for wildcard in ("*", "::", "//0.0.0.0:"))
    return has_wildcard or endpoint.endswith(":0") or not endpoint.startswith("tcp://")


def offset_endpoint_port(endpoint: str, data_parallel_rank: int) -> str:
    """The endpoint of one rank: a port is counted up, a name gets the rank behind it. Port 0 stays: any free one."""
    if endpoint.startswith("tcp://"):
        base, _, port = endpoint.rpartition(":")
        if not port.isdecimal():
            raise ConfigError(f"--kv-events-config: {endpoint!r} has no port: write tcp://HOST:PORT")
        return f"{base}:{int(port) + data_parallel_rank if int(port) else '*'}"
    return f"{endpoint}_dp{data_parallel_rank}" if data_parallel_rank else endpoint


def check_config(config: KVEventsConfig, dp_size: int) -> None:
    """Check all that shows without a socket, for `dp_size` data parallel ranks. Raises ConfigError."""
    EventPublisherFactory.check(config.publisher)
    if config.publisher == "null":
        return
    endpoints = [config.endpoint, *([config.replay_endpoint] if config.replay_endpoint else [])]
    for endpoint in endpoints:
        _check_endpoint(endpoint, dp_size)
    taken = [offset_endpoint_port(endpoint, rank) for endpoint in endpoints for rank in range(dp_size)]
    fixed = [address for address in taken if not address.endswith(":*")]
    twice = sorted({address for address in fixed if fixed.count(address) > 1})
    if twice:
        raise ConfigError(
            f"--kv-events-config: {twice[0]} would be used twice: each of the {dp_size} data parallel ranks has a port "
            "of its own, counted up from that of endpoint and of replay_endpoint: put these further apart"
        )


def _check_endpoint(endpoint: str, dp_size: int) -> None:
    """Raises ConfigError for an address that ZeroMQ could not use."""
    match = _ENDPOINT.fullmatch(endpoint)
    if match is None:
        raise ConfigError(f"--kv-events-config: {endpoint!r} is no address: write tcp://HOST:PORT or ipc://PATH")
    last = int(match["port"] or 0) + dp_size - 1
    if last > MAX_PORT:
        raise ConfigError(
            f"--kv-events-config: {endpoint!r} needs the ports up to {last} for {dp_size} data parallel ranks, and "
            f"{MAX_PORT} is the last: choose a lower port"
        )


class EventPublisherFactory:
    """Publishers by the name in the configuration."""

    _makers: ClassVar[dict[str, Callable[[KVEventsConfig, int], EventPublisher]]] = {}

    @classmethod
    def register_publisher(cls, name: str, make: Callable[[KVEventsConfig, int], EventPublisher]) -> None:
        """Raises ValueError for a name that is taken."""
        if name in cls._makers:
            raise ValueError(f"there is a publisher {name!r} already")
        cls._makers[name] = make

    @classmethod
    def check(cls, name: str) -> None:
        """Raises ConfigError for a name that no publisher has."""
        if name not in cls._makers:
            raise ConfigError(f"--kv-events-config: there is no publisher {name!r}, only {', '.join(cls._makers)}")

    @classmethod
    def create(cls, config: KVEventsConfig, attn_dp_rank: int = 0) -> EventPublisher:
        """Raises ConfigError."""
        cls.check(config.publisher)
        return cls._makers[config.publisher](config, attn_dp_rank)


def _zmq(config: KVEventsConfig, rank: int) -> EventPublisher:
    return ZmqEventPublisher(
        rank,
        config.endpoint,
        config.replay_endpoint or "",
        config.buffer_steps,
        config.hwm,
        config.max_queue_size,
        config.topic,
        config.as_arrays,
        config.replay_topic,
    )


EventPublisherFactory.register_publisher("null", lambda config, rank: NullEventPublisher())
EventPublisherFactory.register_publisher("zmq", _zmq)
