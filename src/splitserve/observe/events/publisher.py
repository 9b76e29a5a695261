"""Publishers of KV events, by name.

1. The scheduler calls `publish` with the changes of a turn; that never waits and never fails.
2. `ZmqEventPublisher` numbers the batch and queues it for its thread, which sends it to all subscribers and stores it.
3. A subscriber that missed batches requests all from a number on from the replay socket.
4. If these are too old, or a queue overflowed, numbers are missing, and the subscriber loads the worker's index. An
   empty batch follows lost ones, so that the gap is visible even if no change follows.

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

from splitserve.core.errors import ConfigError, OptionError, clause
from splitserve.core.kv_events import KVEventsConfig
from splitserve.observe.events.schema import EventBatch, KVEvent, encode

logger = logging.getLogger(__name__)

# Seconds: between two checks of the stop flag, and for a shutdown.
_POLL_SECONDS = 0.1
_SHUTDOWN_SECONDS = 2.0
# Ends a replay, in place of a number.
END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)
MAX_PORT = 65535
# For tcp: a host or `*`, a colon and a port. A missing port is reported separately.
_ENDPOINT = re.compile(r"tcp://(?:[^:/\s]+|\[[0-9A-Fa-f:.%\w]+\])(?::(?P<port>\d{1,5}))?|(?:ipc|inproc)://\S+")


class EventPublisher(Protocol):
    # Bound addresses, with the chosen ports. Empty: it connects to subscribers, publishes nothing, or has no replay.
    endpoint: str
    replay_endpoint: str

    def publish(self, events: Sequence[KVEvent]) -> None:
        """Publish changes in order; often there are none. Never waits."""
        ...

    @property
    def next_sequence(self) -> int:
        """Return the number of the next batch."""
        ...

    def shutdown(self) -> None:
        """Send queued batches, within a time limit, and close. Idempotent."""
        ...


class NullEventPublisher:
    endpoint = replay_endpoint = ""
    next_sequence = 0

    def publish(self, events: Sequence[KVEvent]) -> None:
        pass

    def shutdown(self) -> None:
        pass


class ZmqEventPublisher:
    """Publisher with one PUB socket and an optional ROUTER socket for replay, both in a thread of its own.

    Raises ConfigError for an address on which it cannot listen.
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
        # (number, payload), oldest first.
        self._sent: deque[tuple[int, bytes]] = deque(maxlen=buffer_steps)
        # Whether the last batch was lost, and no later one was published.
        self._has_overrun = False
        self._has_warned = False
        self._is_over = threading.Event()
        self._context = zmq.Context()
        self._pub = self._context.socket(zmq.PUB)
        self._pub.setsockopt(zmq.SNDHWM, hwm)
        self._replay = self._context.socket(zmq.ROUTER) if replay_endpoint else None
        if self._replay is not None:
            # A ROUTER drops messages beyond its high-water mark, so that must allow for a whole replay.
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
        # Lost batches are counted too: a subscriber that misses the number requests all.
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
        """Bind or connect. Return the bound address, empty for a connection."""
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
        """Bind, and return the address with its actual port."""
        address = offset_endpoint_port(endpoint, self._dp_rank)
        try:
            socket.bind(address)
        except zmq.ZMQError as error:
            raise ConfigError(
                f"KV events: cannot listen at {address}: {clause(error)}. Choose another endpoint, or port 0"
            ) from error
        # ZMQ replaces the wildcard that it was given.
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
        # A PUB socket drops messages that a slow subscriber does not receive.
        self._pub.send_multipart((self._topic, number.to_bytes(8, "big"), payload))

    def _answer_replays(self) -> None:
        while self._replay is not None and self._replay.poll(0):
            client, *frames = self._replay.recv_multipart()
            # A REQ socket sends an empty frame before its own, and expects it in the answer.
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
    """Return whether a publisher listens at `endpoint`.

    By vLLM's rule it connects to a TCP address without a wildcard. Port 0 is a wildcard too: it means any free port.
    """
    has_wildcard = any(wildcard in endpoint for wildcard in ("*", "::", "//0.0.0.0:"))
    return has_wildcard or endpoint.endswith(":0") or not endpoint.startswith("tcp://")


def offset_endpoint_port(endpoint: str, data_parallel_rank: int) -> str:
    """Return the endpoint of one rank: the rank is added to a port, or appended to a name. Port 0 stays:
    any free one."""
    if endpoint.startswith("tcp://"):
        base, _, port = endpoint.rpartition(":")
        if not port.isdecimal():
            raise OptionError("--kv-events-config", f": {endpoint!r} has no port: write tcp://HOST:PORT")
        return f"{base}:{int(port) + data_parallel_rank if int(port) else '*'}"
    return f"{endpoint}_dp{data_parallel_rank}" if data_parallel_rank else endpoint


def check_config(config: KVEventsConfig, dp_size: int) -> None:
    """Check what can be checked without a socket, for `dp_size` data parallel ranks. Raises ConfigError."""
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
        raise OptionError(
            "--kv-events-config",
            f": {twice[0]} would be used twice: each of the {dp_size} data parallel ranks has a port "
            "of its own, counted up from that of endpoint and of replay_endpoint: put these further apart",
        )


def _check_endpoint(endpoint: str, dp_size: int) -> None:
    """Raise ConfigError for an address that ZeroMQ cannot use."""
    match = _ENDPOINT.fullmatch(endpoint)
    if match is None:
        raise OptionError("--kv-events-config", f": {endpoint!r} is no address: write tcp://HOST:PORT or ipc://PATH")
    last = int(match["port"] or 0) + dp_size - 1
    if last > MAX_PORT:
        raise OptionError(
            "--kv-events-config",
            f": {endpoint!r} needs the ports up to {last} for {dp_size} data parallel ranks, and "
            f"{MAX_PORT} is the last: choose a lower port",
        )


class EventPublisherFactory:
    """Registry of publishers by the name in the configuration."""

    _makers: ClassVar[dict[str, Callable[[KVEventsConfig, int], EventPublisher]]] = {}

    @classmethod
    def register_publisher(cls, name: str, make: Callable[[KVEventsConfig, int], EventPublisher]) -> None:
        """Register a publisher. Raises ValueError for a name in use."""
        if name in cls._makers:
            raise ValueError(f"there is a publisher {name!r} already")
        cls._makers[name] = make

    @classmethod
    def check(cls, name: str) -> None:
        """Raise ConfigError for an unknown name."""
        if name not in cls._makers:
            raise OptionError("--kv-events-config", f": there is no publisher {name!r}, only {', '.join(cls._makers)}")

    @classmethod
    def create(cls, config: KVEventsConfig, attn_dp_rank: int = 0) -> EventPublisher:
        """Create the publisher of a config. Raises ConfigError."""
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
