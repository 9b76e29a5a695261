"""A worker on fakes publishes its caches over real sockets; a subscriber always ends with the worker's blocks.

The tests run the worker's turns. Between its sockets and the subscriber are links that can be cut.
"""

import asyncio
import contextlib
import time

import pytest

from splitserve.observe.events import subscriber as subscriber_module
from splitserve.observe.events.subscriber import KVEventSubscriber
from support.kv_events_world import PublishingSimWorker, TcpRelay

DEADLINE = 60.0


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """On a busy machine a publisher's thread may need more than the usual time for a replay."""
    monkeypatch.setattr(subscriber_module, "_REPLAY_TIMEOUT", DEADLINE)


@pytest.fixture
def make_worker():
    made = []

    def make(seed, **options):
        made.append(PublishingSimWorker(seed, **options))
        return made[-1]

    yield make
    for worker in made:
        worker.publisher.shutdown()


@contextlib.asynccontextmanager
async def following(worker, **options):
    """A subscriber through two links, and the one that carries its events."""
    async with TcpRelay(worker.publisher.endpoint) as events, TcpRelay(worker.publisher.replay_endpoint) as replay:
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
            # Published while it is away.
            worker.work()
            await until(link.is_connected)
        held = await worker.index()
        # Nothing more is published: the subscriber must request what was lost last.
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
        # The first number that it receives after those shows the gap.
        await connected(subscriber, worker)
        held = await worker.index()
        await until(lambda: subscriber.next_sequence == worker.publisher.next_sequence)
        assert subscriber.num_loads == 2
        assert subscriber.index.blocks() == held
