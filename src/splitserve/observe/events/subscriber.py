"""Subscriber of one worker's KV events, without gaps, and discovery of the events by the worker's URL.

`/server_info` has the publisher of each data parallel rank (`find_publishers`). A publisher that is bound to all
addresses is reached at the host name of the worker's URL. `/kv_index` returns the whole index of a rank (`load_index`).

1. The subscriber subscribes, then loads the worker's whole index, which contains the sequence number up to which it is
   complete.
2. Batches are applied in the order of their numbers; repeated ones are dropped.
3. If a number is missing, it requests the batches from the replay socket. If that does not have them any more, it
   loads the index again.
4. If a new batch has a smaller number, the worker was restarted: it loads the index.
5. If no batch arrives for some time, it also requests the replay socket, as no later number reveals that the last
   batch was lost.

Works with every publisher of the public format. Without an index to load, it begins empty and misses lost batches.
This module does not know how the index is used.
"""

from __future__ import annotations

import asyncio
import enum
import functools
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import Annotated, TypeVar
from urllib.parse import urlsplit

import aiohttp
import msgspec
import zmq
import zmq.asyncio

from splitserve.core.errors import UNREADABLE
from splitserve.observe.events.publisher import END_OF_REPLAY
from splitserve.observe.events.schema import BlockIndex, EventBatch, EventFormatError, IndexSnapshot, decode

T = TypeVar("T")

_TIMEOUT = aiohttp.ClientTimeout(total=30.0)


class RankPublisher(msgspec.Struct, frozen=True):
    """Addresses of one rank's events."""

    dp_rank: int
    # Empty: the publisher connects to its subscribers.
    endpoint: str
    # Empty: there is no replay.
    replay_endpoint: str = ""


class PublisherInfo(msgspec.Struct, frozen=True):
    """Field `kv_events` of `/server_info`. Other keys are for readers of the public format."""

    topic: str
    # Tokens per block.
    block_size: Annotated[int, msgspec.Meta(ge=1)]
    # Publishers by rank.
    publishers: list[RankPublisher]
    # Whether blocks may lack the pages of layers with windows. Such blocks are reported, but cannot be used.
    has_window_pages: bool = False


class _State(msgspec.Struct, frozen=True):
    window_pages_total: int = 0


class _ServerInfo(msgspec.Struct, frozen=True):
    kv_events: PublisherInfo | None = None
    internal_states: list[_State] = []


async def find_publishers(session: aiohttp.ClientSession, url: str) -> PublisherInfo | None:
    """Return the publishers of a worker. None: it publishes nothing, or connects to its subscribers.

    Raises OSError if it cannot be reached or its answer cannot be parsed.
    """
    answer = await _get(session, f"{url}/server_info", _ServerInfo)
    info = answer.kv_events
    # A publisher that connects to its subscribers has no address to subscribe to.
    if info is None or not info.publishers or not all(publisher.endpoint for publisher in info.publishers):
        return None
    host = urlsplit(url).netloc.rpartition("@")[2].removesuffix(f":{urlsplit(url).port}")
    publishers = [
        RankPublisher(
            p.dp_rank, p.endpoint.replace("//*:", f"//{host}:"), p.replay_endpoint.replace("//*:", f"//{host}:")
        )
        for p in sorted(info.publishers, key=lambda p: p.dp_rank)
    ]
    if [p.dp_rank for p in publishers] != list(range(len(publishers))):
        raise OSError(f"{url}: its publishers of KV events are not those of ranks 0 to {len(publishers) - 1}")
    has_window_pages = any(state.window_pages_total for state in answer.internal_states)
    return msgspec.structs.replace(info, publishers=publishers, has_window_pages=has_window_pages)


async def load_index(session: aiohttp.ClientSession, url: str, dp_rank: int) -> IndexSnapshot:
    """Return all blocks that this rank holds.

    Raises OSError if the worker cannot be reached or its answer cannot be parsed.
    """
    return await _get(session, f"{url}/kv_index?dp_rank={dp_rank}", IndexSnapshot)


def follow(session: aiohttp.ClientSession, url: str, info: PublisherInfo, dp_rank: int) -> KVEventSubscriber:
    """Return a subscriber to one rank of a worker; its caller runs it."""
    publisher = info.publishers[dp_rank]
    return KVEventSubscriber(
        publisher.endpoint,
        publisher.replay_endpoint,
        info.topic,
        functools.partial(load_index, session, url, dp_rank),
    )


async def _get(session: aiohttp.ClientSession, url: str, form: type[T]) -> T:
    try:
        async with session.get(url, timeout=_TIMEOUT) as response:
            response.raise_for_status()
            return msgspec.json.decode(await response.read(), type=form)
    except (aiohttp.ClientError, TimeoutError, *UNREADABLE) as error:
        raise OSError(f"{url}: {error or 'no answer in time'}") from error


logger = logging.getLogger(__name__)

# Seconds without another message after which a replay has failed, and between attempts to load an index.
_REPLAY_TIMEOUT = 2.0
_RETRY_SECONDS = 1.0
# Seconds without a message after which it requests the replay socket.
QUIET_SECONDS = 5.0
# Messages that may wait here while a gap is repaired.
_RECEIVE_HWM = 100_000


# Raises OSError if the worker cannot be reached.
LoadIndex = Callable[[], Awaitable[IndexSnapshot]]


class Verdict(enum.Enum):
    NEXT = "apply it"
    OLD = "it was applied before"
    GAP = "some before it are missing"
    RESTART = "the publisher began again"


class Sequencer:
    """Order of the batches. Pure."""

    def __init__(self) -> None:
        self.expected = 0
        # Time of the newest applied batch, seconds since the epoch.
        self._last_ts = 0.0

    def judge(self, number: int, ts: float) -> Verdict:
        if number == self.expected:
            return Verdict.NEXT
        if number > self.expected:
            return Verdict.GAP
        return Verdict.RESTART if ts > self._last_ts else Verdict.OLD

    def advance(self, number: int, ts: float) -> None:
        self.expected, self._last_ts = number + 1, max(ts, self._last_ts)

    def begin_at(self, number: int, ts: float) -> None:
        """Expect the batch `number` next. Batches with a smaller number that are not newer than `ts` count as old."""
        self.expected, self._last_ts = number, ts


class KVEventSubscriber:
    """Subscriber with `index`: the known blocks of the worker. `replay_endpoint`: empty if there is none."""

    def __init__(
        self,
        endpoint: str,
        replay_endpoint: str = "",
        topic: str = "",
        load_index: LoadIndex | None = None,
        quiet_seconds: float = QUIET_SECONDS,
    ) -> None:
        self.index = BlockIndex()
        self.num_replays = 0
        self.num_loads = 0
        self._endpoint = endpoint
        self._replay_endpoint = replay_endpoint
        self._topic = topic.encode()
        self._load_index = load_index
        self._quiet_seconds = quiet_seconds
        self._sequencer = Sequencer()

    @property
    def next_sequence(self) -> int:
        """Return the number before which all batches are in the index."""
        return self._sequencer.expected

    async def run(self) -> None:
        """Follow the events until cancelled."""
        with zmq.asyncio.Context() as context, context.socket(zmq.SUB) as socket:
            socket.setsockopt(zmq.RCVHWM, _RECEIVE_HWM)
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.SUBSCRIBE, self._topic)
            socket.connect(self._endpoint)
            await self._load()
            while True:
                try:
                    if await socket.poll(int(self._quiet_seconds * 1000)):
                        await self._take(context, *_parse(await socket.recv_multipart()))
                    else:
                        await self._ask_for_news(context)
                except EventFormatError as error:
                    logger.warning("KV events of %s: %s", self._endpoint, error)

    async def _take(self, context: zmq.asyncio.Context, number: int, batch: EventBatch) -> None:
        verdict = self._sequencer.judge(number, batch.ts)
        if verdict is Verdict.GAP:
            is_complete = await self._replay(context)
            verdict = self._sequencer.judge(number, batch.ts) if is_complete else Verdict.RESTART
        if verdict in (Verdict.GAP, Verdict.RESTART):
            if await self._load():
                verdict = self._sequencer.judge(number, batch.ts)
            if verdict in (Verdict.GAP, Verdict.RESTART):
                # The missed batches are unknown.
                self.index.replace(())
                self._sequencer.begin_at(number, batch.ts)
                verdict = Verdict.NEXT
        if verdict is Verdict.NEXT:
            self._apply(number, batch)

    def _apply(self, number: int, batch: EventBatch) -> None:
        for event in batch.events:
            self.index.apply(event)
        self._sequencer.advance(number, batch.ts)

    async def _ask_for_news(self, context: zmq.asyncio.Context) -> None:
        if await self._replay(context) or await self._load():
            return
        # All batches of a new publisher are still to be applied.
        self.index.replace(())
        self._sequencer.begin_at(0, 0.0)

    async def _replay(self, context: zmq.asyncio.Context) -> bool:
        """Apply the publisher's batches from the expected number on.

        Return False if it is another publisher, or no longer has the next batch.
        """
        if not self._replay_endpoint:
            return True
        self.num_replays += 1
        # The batch before is known, and reveals whether the numbers are still those of the same publisher.
        start = max(0, self._sequencer.expected - 1)
        is_known = self._sequencer.expected == 0
        try:
            async with aclosing(_replayed(context, self._replay_endpoint, start)) as batches:
                async for number, batch in batches:
                    is_known = True
                    verdict = self._sequencer.judge(number, batch.ts)
                    if verdict in (Verdict.GAP, Verdict.RESTART):
                        return False
                    if verdict is Verdict.NEXT:
                        self._apply(number, batch)
        except TimeoutError:
            logger.info("KV events: replay timed out endpoint=%s seconds=%g", self._replay_endpoint, _REPLAY_TIMEOUT)
            return True
        # A publisher that has published nothing yet has no batch at all.
        return is_known

    async def _load(self) -> bool:
        """Load the worker's whole index, with retries until the worker answers. False: it has no index."""
        if self._load_index is None:
            return False
        while True:
            try:
                snapshot = await self._load_index()
                break
            except OSError as error:
                logger.warning("the KV index of %s cannot be loaded: %s", self._endpoint, error)
                await asyncio.sleep(_RETRY_SECONDS)
        self.num_loads += 1
        self.index.replace(snapshot.events)
        self._sequencer.begin_at(snapshot.next_sequence, snapshot.ts)
        return True


async def _replayed(context: zmq.asyncio.Context, endpoint: str, start: int) -> AsyncGenerator[tuple[int, EventBatch]]:
    """Yield the batches of a replay socket, until its end marker. Raises TimeoutError."""
    with context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVHWM, _RECEIVE_HWM)
        socket.connect(endpoint)
        await socket.send_multipart((b"", start.to_bytes(8, "big")))
        while True:
            async with asyncio.timeout(_REPLAY_TIMEOUT):
                frames = await socket.recv_multipart()
            if frames[-2] == END_OF_REPLAY:
                return
            yield _parse(frames)


def _parse(frames: Sequence[bytes]) -> tuple[int, EventBatch]:
    """Return number and batch of the frames [.., number, payload]. Raises EventFormatError."""
    if len(frames) < 2 or len(frames[-2]) != 8:
        raise EventFormatError(f"not a batch of KV events: {[len(f) for f in frames]} bytes in its frames")
    return int.from_bytes(frames[-2], "big"), decode(frames[-1])
