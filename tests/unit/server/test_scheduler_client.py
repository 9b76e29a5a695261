from __future__ import annotations

import asyncio

import pytest
from msgspec.structs import replace

from splitserve.core.errors import DeadlineExceededError, EngineError, ModelLoadError, WorkerUnavailableError
from splitserve.core.messages import (
    FlushCacheReply,
    FlushCacheRequest,
    GenerateRequest,
    SchedulerFailed,
    StateReply,
    StateRequest,
    StepOutputs,
    TokenOutput,
)
from splitserve.core.request import FinishReason, FinishType
from splitserve.core.sampling import ResolvedSampling
from splitserve.server.scheduler_client import OutputStream, SchedulerClient
from splitserve.server.scheduler_group import SchedulerGroup

from .server_fakes import READY, EchoScheduler

DEADLINE = 60.0


def request(rid: str, num_tokens: int = 3) -> GenerateRequest:
    return GenerateRequest(rid=rid, prompt_ids=[1, 2, 3], params=ResolvedSampling(max_new_tokens=num_tokens))


def submit(client: SchedulerClient, *requests: GenerateRequest, output_timeout: float = DEADLINE) -> OutputStream:
    return SchedulerGroup([client], output_timeout=output_timeout).submit(*requests)


async def tokens_of(stream: OutputStream) -> list[int]:
    return [t async for output in stream for t in output.token_ids]


@pytest.fixture
async def ready(client: SchedulerClient, scheduler: EchoScheduler) -> SchedulerClient:
    await scheduler.start()
    assert await client.ready(DEADLINE) == READY
    return client


async def test_a_stream_hands_out_all_tokens_and_ends_after_the_final_message(ready: SchedulerClient) -> None:
    outputs = [output async for output in submit(ready, request("a"))]
    assert [t for o in outputs for t in o.token_ids] == [1, 2, 3]
    assert [o.finish is not None for o in outputs][-1]


async def test_a_scheduler_is_ready_only_after_it_takes_messages(
    client: SchedulerClient, scheduler: EchoScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    connecting = asyncio.Event()
    wait_for_pipe = client._connected

    async def connected() -> None:
        connecting.set()
        await wait_for_pipe()

    monkeypatch.setattr(client, "_connected", connected)
    await scheduler.send(READY)
    waiting = asyncio.create_task(client.ready(DEADLINE))
    async with asyncio.timeout(DEADLINE):
        # The message has arrived: the client reads it and then waits for the other pipe.
        await connecting.wait()
    assert not waiting.done()
    with pytest.raises(WorkerUnavailableError, match="still loading"):
        submit(client, request("a"))
    await scheduler.start(ready=False)
    assert await waiting == READY
    assert await tokens_of(submit(client, request("a"))) == [1, 2, 3]


async def test_streams_of_several_requests_do_not_mix(ready: SchedulerClient) -> None:
    streams = [submit(ready, request(f"r{i}", num_tokens=i + 1)) for i in range(8)]
    results = await asyncio.gather(*map(tokens_of, streams))
    assert [len(tokens) for tokens in results] == list(range(1, 9))


async def test_one_stream_carries_all_samples_of_a_request(ready: SchedulerClient) -> None:
    finished = [o.rid async for o in submit(ready, request("a", 1), request("b", 4)) if o.finish is not None]
    assert sorted(finished) == ["a", "b"]


async def test_closing_a_stream_early_aborts_quietly_and_forgets_the_request(
    ready: SchedulerClient, scheduler: EchoScheduler
) -> None:
    scheduler.hold_after = 1
    stream = submit(ready, request("a"))
    assert (await anext(stream)).token_ids == [1]
    stream.close()
    abort = await asyncio.wait_for(scheduler.aborts.get(), DEADLINE)
    assert (abort.rid, abort.quiet) == ("a", True)
    assert await tokens_of(stream) == []
    scheduler.hold_after = None
    assert await tokens_of(submit(ready, request("a"))) == [1, 2, 3]


async def test_late_outputs_of_a_closed_stream_do_not_reach_the_next_with_its_rid(
    ready: SchedulerClient, scheduler: EchoScheduler
) -> None:
    scheduler.hold_after = 1
    stream = submit(ready, request("a"))
    output = await anext(stream)
    stream.close()
    second = submit(ready, request("a"))
    for late in (output, replace(output, token_ids=[9], finish=FinishReason(FinishType.LENGTH))):
        await scheduler.send(StepOutputs(outputs=[late]))
    assert (await anext(second)).token_ids == [1]
    scheduler.hold_after = None
    await ready.call(StateRequest, StateReply, DEADLINE)
    assert await tokens_of(second) == [2, 3]


async def test_a_finished_stream_closes_without_a_word(ready: SchedulerClient, scheduler: EchoScheduler) -> None:
    stream = submit(ready, request("a"))
    await tokens_of(stream)
    stream.close()
    await ready.call(StateRequest, StateReply, DEADLINE)
    assert scheduler.aborts.empty()


async def test_an_abort_ends_the_stream_with_the_schedulers_final_message(
    ready: SchedulerClient, scheduler: EchoScheduler
) -> None:
    scheduler.hold_after = 1
    stream = submit(ready, request("a"))
    await anext(stream)
    ready.abort("a", "enough")
    output = await anext(stream)
    assert output.finish == FinishReason(FinishType.ABORT, message="enough", status_code=499, reason="aborted")
    with pytest.raises(StopAsyncIteration):
        await anext(stream)


async def test_a_reader_that_lags_finds_one_merged_message(ready: SchedulerClient) -> None:
    lagging = submit(ready, request("slow", 50))
    await tokens_of(submit(ready, request("fast", 60)))
    outputs = [output async for output in lagging]
    assert len(outputs) == 1
    assert len(outputs[0].token_ids) == 50


async def test_flush_and_state_are_answered(ready: SchedulerClient) -> None:
    assert (await ready.call(FlushCacheRequest, FlushCacheReply, DEADLINE)).num_pages_freed == 7
    assert (await ready.call(StateRequest, StateReply, DEADLINE)).state.num_tokens_held == 99


async def test_a_call_without_an_answer_ends_at_its_deadline(ready: SchedulerClient, scheduler: EchoScheduler) -> None:
    scheduler.answers_calls = False
    with pytest.raises(DeadlineExceededError, match="did not answer StateRequest within"):
        await ready.call(StateRequest, StateReply, 0.01)


async def test_a_stream_without_output_ends_at_its_deadline_and_aborts(scheduler: EchoScheduler) -> None:
    impatient = SchedulerClient("tcp://127.0.0.1:*", "tcp://127.0.0.1:*")
    await impatient.start()
    slow = EchoScheduler(impatient.to_scheduler, impatient.from_scheduler)
    slow.hold_after = 0
    try:
        await slow.start()
        await impatient.ready(DEADLINE)
        stream = submit(impatient, request("a"), output_timeout=0.01)
        with pytest.raises(DeadlineExceededError, match="request a: no output"):
            await anext(stream)
        stream.close()
        assert (await asyncio.wait_for(slow.aborts.get(), DEADLINE)).quiet
    finally:
        await slow.close()
        await impatient.close()


async def test_a_scheduler_that_cannot_start_fails_ready_with_its_message(
    client: SchedulerClient, scheduler: EchoScheduler
) -> None:
    await scheduler.send(SchedulerFailed(message="no such model: 'x'", exit_code=2))
    with pytest.raises(ModelLoadError, match="no such model") as failed:
        await client.ready(DEADLINE)
    assert failed.value.exit_code == 2


async def test_a_rank_that_cannot_go_on_ends_what_is_open_as_a_worker_that_is_gone(
    client: SchedulerClient, scheduler: EchoScheduler
) -> None:
    scheduler.connect()
    await scheduler.send(READY)
    await client.ready(DEADLINE)
    stream = submit(client, request("a"))
    await scheduler.send(SchedulerFailed(message="rank tp 1 of 2: out of memory"))
    # A router continues it on another worker.
    with pytest.raises(WorkerUnavailableError, match="out of memory"):
        async for _ in stream:
            pass


async def test_ready_has_a_deadline(client: SchedulerClient) -> None:
    with pytest.raises(DeadlineExceededError, match="was not ready after"):
        await client.ready(0.01)


async def test_nothing_is_submitted_before_the_scheduler_is_ready(client: SchedulerClient) -> None:
    with pytest.raises(WorkerUnavailableError, match="still loading"):
        submit(client, request("a"))


async def test_the_schedulers_death_ends_streams_calls_and_later_submits(
    ready: SchedulerClient, scheduler: EchoScheduler
) -> None:
    scheduler.hold_after, scheduler.answers_calls = 1, False
    stream = submit(ready, request("a"))
    await anext(stream)
    call = asyncio.create_task(ready.call(StateRequest, StateReply, DEADLINE))
    await asyncio.sleep(0)  # the call is under way
    error = EngineError("the scheduler process ended with code -9")
    ready.fail_all(error)
    with pytest.raises(EngineError, match="code -9"):
        await anext(stream)
    with pytest.raises((EngineError, WorkerUnavailableError), match="code -9"):
        await call
    with pytest.raises(WorkerUnavailableError, match="code -9"):
        submit(ready, request("b"))


async def test_a_message_that_is_none_of_ours_fails_everything(
    ready: SchedulerClient, scheduler: EchoScheduler
) -> None:
    scheduler.hold_after = 0
    stream = submit(ready, request("a"))
    await scheduler._push.send(b"\x81\xa4type\xa5Other")
    with pytest.raises(WorkerUnavailableError, match="another version"):
        await anext(stream)


async def test_outputs_of_unknown_requests_are_dropped(ready: SchedulerClient, scheduler: EchoScheduler) -> None:
    await scheduler.send(StepOutputs(outputs=[TokenOutput(rid="unknown", token_ids=[1])]))
    assert await tokens_of(submit(ready, request("a"))) == [1, 2, 3]
