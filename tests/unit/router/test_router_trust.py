"""How far a worker is trusted after failures, and what a cancelled writer leaves for the client."""

from __future__ import annotations

import asyncio
from collections.abc import MutableMapping
from typing import Any

import pytest

from splitserve.core.clock import ManualClock
from splitserve.core.errors import WorkerUnavailableError
from splitserve.core.request import DisaggregationMode
from splitserve.router.client_stream import ClientStream
from splitserve.router.registry import Avoid, WorkerRegistry
from splitserve.router.worker import FORGIVENESS, Worker, WorkerPair

PREFILL, DECODE = DisaggregationMode.PREFILL, DisaggregationMode.DECODE


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def registry(clock: ManualClock) -> WorkerRegistry:
    registry = WorkerRegistry(clock=clock)
    registry.add("p", PREFILL, 1)
    registry.add("d1", DECODE)
    registry.add("d2", DECODE)
    return registry


def decodes(registry: WorkerRegistry, count: int = 4, avoid: Avoid | None = None) -> set[str]:
    pairs = [registry.select(avoid=avoid or Avoid()) for _ in range(count)]
    return {pair.decode.url for pair in pairs if isinstance(pair, WorkerPair)}


def worker(registry: WorkerRegistry, url: str) -> Worker:
    return next(w for w in registry.all() if w.url == url)


async def test_a_fault_keeps_requests_away_then_lets_one_through_and_success_ends_it(registry, clock) -> None:
    d1 = worker(registry, "d1")
    d1.add_fault()
    assert decodes(registry) == {"d2"}
    clock.advance(0.001)
    assert decodes(registry) == {"d1", "d2"}
    d1.calls.add(asyncio.timeout(None))
    assert decodes(registry) == {"d2"}
    d1.forgive()
    assert decodes(registry) == {"d1", "d2"}


def test_several_faults_are_held_against_it_for_longer_and_are_forgotten_in_time(registry, clock) -> None:
    d1 = worker(registry, "d1")
    for _ in range(4):
        d1.add_fault()
    clock.advance(1.9 * FORGIVENESS)
    assert decodes(registry) == {"d2"}
    clock.advance(0.2 * FORGIVENESS)
    assert decodes(registry) == {"d1", "d2"}
    clock.advance(10 * FORGIVENESS)
    assert d1.faults() < 0.01


def test_with_nobody_else_a_worker_at_fault_still_serves(registry) -> None:
    for url in ("d1", "d2"):
        worker(registry, url).add_fault()
    assert decodes(registry) == {"d1", "d2"}


def test_a_request_does_not_meet_again_whom_it_saw_fail_and_suspects_only_where_there_is_nobody_else(registry) -> None:
    d1, d2 = worker(registry, "d1"), worker(registry, "d2")
    assert decodes(registry, avoid=Avoid(suspects={d1})) == {"d2"}
    assert decodes(registry, avoid=Avoid(failed={d2: 0.0}, suspects={d1})) == {"d1"}
    with pytest.raises(WorkerUnavailableError, match="none of the 2 decode"):
        registry.select(avoid=Avoid(failed={d1: 0.0, d2: 0.0}))


async def test_what_a_cancelled_writer_accepted_goes_out_once_and_in_order() -> None:
    has_room = asyncio.Event()
    sent: list[bytes] = []

    async def send(message: MutableMapping[str, Any]) -> None:
        # As uvicorn does: wait for room, then write.
        await has_room.wait()
        sent.append(message.get("body", b""))

    async def receive() -> MutableMapping[str, Any]:
        raise AssertionError("no probe is expected")

    client = ClientStream(receive, send)
    writer = asyncio.create_task(client.write(b"one "))
    await asyncio.sleep(0)
    writer.cancel()
    await asyncio.gather(writer, return_exceptions=True)
    assert sent == []
    has_room.set()
    await client.write(b"two ")
    await client.end(b"three")
    assert b"".join(sent) == b"one two three"
    assert client.finished


async def test_a_start_that_was_cancelled_has_not_happened() -> None:
    has_room = asyncio.Event()

    async def send(message: MutableMapping[str, Any]) -> None:
        await has_room.wait()

    async def receive() -> MutableMapping[str, Any]:
        raise AssertionError("no probe is expected")

    client = ClientStream(receive, send)
    start = asyncio.create_task(client.start(200, {}))
    await asyncio.sleep(0)
    start.cancel()
    await asyncio.gather(start, return_exceptions=True)
    assert not client.started
