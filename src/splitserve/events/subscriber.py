"""Follows one worker's KV events without a gap.

1. Subscribe, then load the worker's whole index, which says up to which number it is true.
2. Batches are applied in the order of their numbers; one that came before is dropped.
3. A missing number: ask the replay socket. What it no longer has: load the index again.
4. A number that went back in a batch that is new: the worker started again; load the index.
5. Nothing comes for some time: ask the replay socket too, for what was lost last shows in no later number.

Works with every publisher of the public format; where there is no index to load, it begins empty and loses what it
missed. Who uses the index, and for what, is not known here.
"""

from __future__ import annotations

import asyncio
import enum
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing

import zmq
import zmq.asyncio

from splitserve.events.index import BlockIndex
from splitserve.events.publisher import END_OF_REPLAY
from splitserve.events.schema import EventBatch, EventFormatError, IndexSnapshot, decode

logger = logging.getLogger(__name__)

# Seconds without another message after which a replay has ended badly, and between tries to load an index.
_REPLAY_TIMEOUT = 2.0
_RETRY_SECONDS = 1.0
# Seconds without a message after which it asks whether there was one.
QUIET_SECONDS = 5.0
# Messages that may wait here while a gap is healed.
_RECEIVE_HWM = 100_000


# Raises OSError where the worker cannot be asked.
LoadIndex = Callable[[], Awaitable[IndexSnapshot]]


class Verdict(enum.Enum):
    NEXT = "apply it"
    OLD = "it was applied before"
    GAP = "some before it are missing"
    RESTART = "the publisher began again"


class Sequencer:
    """Which batch comes next. Pure."""

    def __init__(self) -> None:
        self.expected = 0
        # Of what is known: nothing in it is newer.
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
        """Whatever has a smaller number is known, or lost, if it is not newer than `ts`."""
        self.expected, self._last_ts = number, ts


class KVEventSubscriber:
    """`index` is what the worker holds, as far as it is known. `replay_endpoint`: empty where there is none."""

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
        """All batches before this number are in the index."""
        return self._sequencer.expected

    async def run(self) -> None:
        """Until it is cancelled."""
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
            has_restarted = not await self._replay(context)
            verdict = Verdict.RESTART if has_restarted else self._sequencer.judge(number, batch.ts)
        if verdict in (Verdict.GAP, Verdict.RESTART):
            if await self._load():
                verdict = self._sequencer.judge(number, batch.ts)
            if verdict in (Verdict.GAP, Verdict.RESTART):
                # Nobody knows what was missed.
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
        # Of the new publisher all is news.
        self.index.replace(())
        self._sequencer.begin_at(0, 0.0)

    async def _replay(self, context: zmq.asyncio.Context) -> bool:
        """Apply what the publisher still has from the expected number on. False: it is not the publisher it was."""
        if not self._replay_endpoint:
            return True
        self.num_replays += 1
        # The one before is known, and shows whether the numbers are still those of the same publisher.
        start = max(0, self._sequencer.expected - 1)
        async with aclosing(_replayed(context, self._replay_endpoint, start)) as batches:
            async for number, batch in batches:
                verdict = self._sequencer.judge(number, batch.ts)
                if verdict is Verdict.RESTART:
                    return False
                if verdict is Verdict.NEXT:
                    self._apply(number, batch)
        return True

    async def _load(self) -> bool:
        """Take the worker's whole index; tried until the worker answers. False where there is none to load."""
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
    """What a replay socket answers, until its end or until it falls silent."""
    with context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVHWM, _RECEIVE_HWM)
        socket.connect(endpoint)
        await socket.send_multipart((b"", start.to_bytes(8, "big")))
        while True:
            try:
                async with asyncio.timeout(_REPLAY_TIMEOUT):
                    frames = await socket.recv_multipart()
            except TimeoutError:
                logger.info("KV events: the replay at %s fell silent", endpoint)
                return
            if frames[-2] == END_OF_REPLAY:
                return
            yield _parse(frames)


def _parse(frames: Sequence[bytes]) -> tuple[int, EventBatch]:
    """Number and batch of [.., number, payload]. Raises EventFormatError."""
    if len(frames) < 2 or len(frames[-2]) != 8:
        raise EventFormatError(f"not a batch of KV events: {[len(f) for f in frames]} bytes in its frames")
    return int.from_bytes(frames[-2], "big"), decode(frames[-1])
