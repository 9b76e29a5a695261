"""A worker on fakes tells of its caches over real sockets; a subscriber ends with what the worker holds, come what may.

The worker's turns are taken by hand. Between its sockets and the subscriber stand links that can be cut.
"""

import asyncio
import contextlib
import random
import time

import msgspec
import pytest

from splitserve.core.sampling import SamplingParams
from splitserve.events.index import BlockIndex
from splitserve.events.publisher import ZmqEventPublisher
from splitserve.events.schema import IndexSnapshot
from splitserve.events.subscriber import KVEventSubscriber
from splitserve.messages import FlushCacheRequest, GenerateRequest, KVIndexReply, KVIndexRequest
from splitserve.testing.sim import ColocatedWorld

DEADLINE = 60.0
PAGE = 4
ANY = "tcp://127.0.0.1:0"


class Link:
    """A TCP port that forwards to another, until it is cut; and again from then on, to whoever connects anew."""

    def __init__(self, endpoint):
        self._port = int(endpoint.rpartition(":")[2])
        self._tasks = set()
        self._writers = []

    async def __aenter__(self):
        self._server = await asyncio.start_server(self._carry, "127.0.0.1", 0)
        self.endpoint = f"tcp://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_):
        self._server.close()
        self.cut()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def cut(self):
        """All connections end, with what is under way in them. Whether there were any."""
        was_connected = self.is_connected()
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()
        return was_connected

    def is_connected(self):
        return any(not writer.is_closing() for writer in self._writers)

    async def _carry(self, reader, writer):
        self._tasks.add(asyncio.current_task())
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._port)
        self._writers += [writer, far_writer]
        with contextlib.suppress(OSError):
            await asyncio.gather(self._copy(reader, far_writer), self._copy(far_reader, writer))

    async def _copy(self, reader, writer):
        try:
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
        finally:
            writer.transport.abort()


class Worker:
    """A null worker under random prompts that share beginnings, with fewer pages than they fill."""

    def __init__(self, seed, *, is_overlapped=False, **options):
        self.publisher = ZmqEventPublisher(0, ANY, ANY, **options)
        self._rng = random.Random(seed)
        late = self._rng if is_overlapped else None
        # Of 32 bytes: the host has room for 500 pages.
        self.world = ColocatedWorld(
            num_pages=256, page_size=PAGE, prefix_host_memory=16_000, late_steps=late, publisher=self.publisher
        )
        self.num_stored = 0
        self._num_requests = self._num_calls = 0

    def work(self):
        """A few requests from their arrival to their end."""
        for _ in range(4):
            self._num_requests += 1
            length = self._rng.randrange(40, 160)
            prompt = [self._rng.randrange(6)] * self._rng.randrange(30) + [
                self._rng.randrange(500) for _ in range(length)
            ]
            params = SamplingParams(max_new_tokens=4, temperature=0.0)
            self.world.submit(GenerateRequest(rid=f"r{self._num_requests}", prompt_ids=prompt, params=params))
            # At least these are stored: nobody else has them.
            self.num_stored += length // PAGE - 1
        self.world.run_until_idle()

    def flush(self):
        self.world.submit(FlushCacheRequest(call_id=0))
        self.world.run_until_idle()
        self.world.turn()

    async def snapshot(self):
        self._num_calls += 1
        self.world.submit(KVIndexRequest(call_id=self._num_calls))
        self.world.turn()
        reply = self.world.replies.pop()
        assert isinstance(reply, KVIndexReply)
        assert reply.call_id == self._num_calls
        return msgspec.json.decode(reply.snapshot, type=IndexSnapshot)

    async def index(self):
        index = BlockIndex()
        index.replace((await self.snapshot()).events)
        return index.blocks()


@pytest.fixture
def make_worker():
    made = []

    def make(seed, **options):
        made.append(Worker(seed, **options))
        return made[-1]

    yield make
    for worker in made:
        worker.publisher.shutdown()


@contextlib.asynccontextmanager
async def following(worker, **options):
    """A subscriber through two links, and the one that carries its events."""
    async with Link(worker.publisher.endpoint) as events, Link(worker.publisher.replay_endpoint) as replay:
        subscriber = KVEventSubscriber(events.endpoint, replay.endpoint, **options)
        task = asyncio.create_task(subscriber.run())
        try:
            yield subscriber, events
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def until(is_true):
    limit = time.monotonic() + DEADLINE
    while not is_true():
        assert time.monotonic() < limit, "it never became true"
        await asyncio.sleep(0.005)


async def connected(subscriber, worker):
    """The subscription has reached the publisher: a batch came through it."""
    async with asyncio.timeout(DEADLINE):
        while subscriber.next_sequence < worker.publisher.next_sequence or not subscriber.next_sequence:
            worker.work()
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("is_overlapped", [False, True], ids=["normal", "overlapped"])
async def test_ten_thousand_blocks_through_evictions_and_killed_connections(make_worker, is_overlapped):
    worker = make_worker(1, is_overlapped=is_overlapped)
    async with following(worker, quiet_seconds=0.2) as (subscriber, link):
        await connected(subscriber, worker)
        for target in range(2000, 12_000, 2000):
            while worker.num_stored < target:
                worker.work()
                await asyncio.sleep(0)
            assert link.cut()
            # Told while it is away.
            worker.work()
            await until(link.is_connected)
        held = await worker.index()
        # Nothing more is told: what was lost last it must ask for.
        await until(lambda: subscriber.next_sequence == worker.publisher.next_sequence)
        assert subscriber.index.blocks() == held
        assert {medium for media in subscriber.index.blocks().values() for medium in media} == {"GPU", "CPU_PINNED"}
        assert len(held) < 256 + 500 < worker.num_stored
        assert subscriber.num_replays > 0
        assert subscriber.num_loads == 0
        worker.flush()
        await until(lambda: not subscriber.index.blocks())
        assert await worker.index() == {}


async def test_what_the_replay_no_longer_has_comes_with_the_whole_index(make_worker):
    worker = make_worker(7, buffer_steps=3)
    worker.work()
    async with following(worker, quiet_seconds=0.2, load_index=worker.snapshot) as (subscriber, link):
        await connected(subscriber, worker)
        assert subscriber.num_loads == 1
        link.cut()
        for _ in range(20):
            worker.work()
        # The first number that it hears after those shows the gap.
        await connected(subscriber, worker)
        held = await worker.index()
        await until(lambda: subscriber.next_sequence == worker.publisher.next_sequence)
        assert subscriber.num_loads == 2
        assert subscriber.index.blocks() == held
