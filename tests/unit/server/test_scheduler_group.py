"""Two schedulers behind one front end: who gets which sample, and what concerns both."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass

import msgspec
import pytest

from splitserve.core.errors import DeadlineExceededError, EngineError, InvalidRequestError, WorkerUnavailableError
from splitserve.core.messages import GenerateRequest, RoleStep
from splitserve.core.request import BootstrapInfo, DisaggregationMode, RoomKey
from splitserve.core.sampling import ResolvedSampling
from splitserve.server.scheduler_client import OutputStream, SchedulerClient
from splitserve.server.scheduler_group import HalfSwitchedError, SchedulerGroup

from .server_fakes import READY, EchoScheduler

DEADLINE = 60.0


@dataclass
class Two:
    clients: list[SchedulerClient]
    schedulers: list[EchoScheduler]

    def group(self, *, is_prefill: bool = False) -> SchedulerGroup:
        return SchedulerGroup(self.clients, is_prefill=is_prefill, output_timeout=DEADLINE)

    def received(self) -> list[list[str]]:
        """Ids by rank."""
        return [[r.rid for r in scheduler.received] for scheduler in self.schedulers]


@pytest.fixture
async def two() -> AsyncIterator[Two]:
    async with AsyncExitStack() as closing:
        two = Two([], [])
        for _ in range(2):
            client = SchedulerClient("tcp://127.0.0.1:*", "tcp://127.0.0.1:*")
            closing.push_async_callback(client.close)
            await client.start()
            scheduler = EchoScheduler(client.to_scheduler, client.from_scheduler)
            closing.push_async_callback(scheduler.close)
            await scheduler.start()
            two.clients.append(client)
            two.schedulers.append(scheduler)
        await two.group().ready(DEADLINE)
        yield two


def request(rid: str, num_tokens: int = 3, num_prompt_tokens: int = 3, room: int | None = None) -> GenerateRequest:
    bootstrap = None if room is None else BootstrapInfo("h", 1, RoomKey(room))
    params = ResolvedSampling(max_new_tokens=num_tokens)
    return GenerateRequest(rid=rid, prompt_ids=[1] * num_prompt_tokens, params=params, bootstrap=bootstrap)


async def finish(stream: OutputStream) -> None:
    async for _ in stream:
        pass


async def test_samples_go_where_the_fewest_tokens_are_outstanding(two: Two) -> None:
    for scheduler in two.schedulers:
        scheduler.hold_after = 0
    group = two.group()
    # Rank 0 has 100, rank 1 then 10, 75 and 120, rank 0 125.
    for rid, num_tokens in (("a", 90), ("b", 5), ("c", 55), ("d", 35), ("e", 15)):
        group.submit(request(rid, num_tokens, num_prompt_tokens=10 if num_tokens > 5 else 5))
    await group.states()
    assert two.received() == [["a", "e"], ["b", "c", "d"]]


async def test_what_has_ended_or_was_given_up_counts_no_longer(two: Two) -> None:
    group = two.group()
    await finish(group.submit(request("a", 50)))
    two.schedulers[0].hold_after = 0
    group.submit(request("b", 60)).close()
    assert [client.num_tokens_outstanding for client in two.clients] == [0, 0]
    await finish(group.submit(request("c"), dp_rank=1))
    # Each scheduler answers in the order of its messages: "b" has arrived by then.
    await group.states()
    assert two.received() == [["a", "b"], ["c"]]


async def test_one_stream_carries_the_samples_of_all_ranks(two: Two) -> None:
    stream = two.group().submit(request("a"), request("b"))
    finished = [output.rid async for output in stream if output.finish is not None]
    assert sorted(finished) == ["a", "b"]
    assert two.received() == [["a"], ["b"]]


async def test_on_prefill_the_room_says_which_rank(two: Two) -> None:
    group = two.group(is_prefill=True)
    await finish(group.submit(*(request(f"r{room}", room=room) for room in (1, 3, 4, 5))))
    assert two.received() == [["r4"], ["r1", "r3", "r5"]]


async def test_an_abort_reaches_the_rank_of_the_request(two: Two) -> None:
    for scheduler in two.schedulers:
        scheduler.hold_after = 0
    group = two.group()
    group.submit(request("a"))
    stream = group.submit(request("b"))
    group.abort("b")
    abort = await asyncio.wait_for(two.schedulers[1].aborts.get(), DEADLINE)
    assert abort.rid == "b"
    await finish(stream)
    assert two.schedulers[0].aborts.empty()


async def test_flushing_and_snapshots_concern_every_rank(two: Two) -> None:
    group = two.group()
    assert await group.flush_cache() == 2 * 7
    two.schedulers[1].hold_after = 0
    group.submit(request("a"), dp_rank=1)
    assert [state.num_running_reqs for state in await group.states()] == [0, 1]
    assert group.info is not None
    assert group.info.pages_total == 2 * READY.pages_total


async def test_a_rank_that_fails_makes_the_worker_unavailable(two: Two) -> None:
    group = two.group()
    two.clients[1].fail_all(EngineError("gone"))
    assert group.failure is not None
    assert group.info is None
    with pytest.raises(WorkerUnavailableError, match="gone"):
        group.submit(request("a"), request("b"))
    # What the other rank had got already is taken back.
    assert two.clients[0].num_tokens_outstanding == 0


async def test_kv_events_are_those_of_each_rank(two: Two) -> None:
    for rank, (client, scheduler) in enumerate(zip(two.clients, two.schedulers, strict=True)):
        assert client.info is not None
        client.info = msgspec.structs.replace(
            client.info, kv_events_endpoints=[f"tcp://*:{7000 + rank}"], kv_replay_endpoints=[""]
        )
        scheduler.kv_index = b"[%d]" % rank
    group = two.group()
    assert group.info is not None
    assert group.info.kv_events_endpoints == ["tcp://*:7000", "tcp://*:7001"]
    assert group.info.kv_replay_endpoints == ["", ""]
    assert [await group.kv_index(rank) for rank in (0, 1)] == [b"[0]", b"[1]"]


PREFILL, DECODE = DisaggregationMode.PREFILL, DisaggregationMode.DECODE


async def test_all_ranks_change_their_role_and_prefill_samples_go_where_their_rooms_say(two: Two) -> None:
    group = two.group()
    await group.prepare_role(PREFILL, "http://bootstrap", DEADLINE)
    await group.drain_role(DEADLINE)
    await group.commit_role(PREFILL)
    assert [s.role_steps for s in two.schedulers] == [[RoleStep.PREPARE, RoleStep.DRAIN, RoleStep.COMMIT]] * 2
    for rid in ("a", "b", "c"):
        await finish(group.submit(request(rid, room=7)))
    assert two.received() == [[], ["a", "b", "c"]]
    await group.prepare_role(DECODE, None, DEADLINE)
    await group.drain_role(DEADLINE)
    await group.commit_role(DECODE)
    await finish(group.submit(request("d", room=7)))
    assert two.received()[0] == ["d"]


async def test_an_update_of_weights_changes_the_model_of_all_ranks(two: Two) -> None:
    group = two.group()
    await group.use_weights(None)
    assert group.info is not None
    assert [client.info and client.info.model for client in two.clients] == ["after update"] * 2
    assert group.info.model == "after update"


@pytest.mark.parametrize(
    ("status", "error"), [(400, InvalidRequestError), (503, WorkerUnavailableError), (504, DeadlineExceededError)]
)
async def test_what_one_rank_refuses_is_refused(two: Two, status: int, error: type[Exception]) -> None:
    for step in (RoleStep.PREPARE, RoleStep.DRAIN):
        two.schedulers[1].role_errors[step] = ("it cannot", status)
    group = two.group()
    with pytest.raises(error, match="it cannot"):
        await group.prepare_role(PREFILL, "http://bootstrap", DEADLINE)
    with pytest.raises(error, match="it cannot"):
        await group.drain_role(DEADLINE)
    # All can go back.
    await group.cancel_role()
    assert [s.role_steps[-1] for s in two.schedulers] == [RoleStep.CANCEL] * 2


async def test_ranks_that_all_refuse_to_change_are_as_they_were_and_others_are_split(two: Two) -> None:
    group = two.group()
    for scheduler in two.schedulers:
        scheduler.role_errors[RoleStep.COMMIT] = ("no memory", 503)
    with pytest.raises(WorkerUnavailableError, match="no memory") as refused:
        await group.commit_role(PREFILL)
    assert not isinstance(refused.value, HalfSwitchedError)
    del two.schedulers[0].role_errors[RoleStep.COMMIT]
    with pytest.raises(HalfSwitchedError, match="no memory"):
        await group.commit_role(PREFILL)
    # One that does not answer may have changed or not.
    two.schedulers[0].answers_calls = two.schedulers[1].answers_calls = False
    change = asyncio.create_task(group.commit_role(PREFILL))
    while len(two.schedulers[0].role_steps) < 3:
        await two.schedulers[0].role_asked.wait()
        two.schedulers[0].role_asked.clear()
    two.clients[0].fail_all(EngineError("it died"))
    two.clients[1].fail_all(EngineError("it died, too"))
    with pytest.raises(HalfSwitchedError, match="it died; it died, too"):
        await change


async def test_what_is_broken_off_ends_behind_what_has_come_and_the_schedulers_serve_on(
    two: Two,
) -> None:
    for scheduler in two.schedulers:
        scheduler.hold_after = 1
    group = two.group()
    streams = [group.submit(request("a", 20)), group.submit(request("b", 20))]
    for stream in streams:
        assert len((await anext(stream)).token_ids) == 1
    group.break_off(WorkerUnavailableError("it changes its role"))
    for stream in streams:
        with pytest.raises(WorkerUnavailableError, match="changes its role"):
            await anext(stream)
        stream.close()
    for scheduler in two.schedulers:
        assert (await asyncio.wait_for(scheduler.aborts.get(), DEADLINE)).quiet
        assert scheduler.aborts.empty()
    assert [client.num_tokens_outstanding for client in two.clients] == [0, 0]
    for scheduler in two.schedulers:
        scheduler.hold_after = None
    await finish(group.submit(request("c")))
