"""Runs over a backend of coroutines: order, chunks, failures, deadlines, places, aborts."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from splitserve.core.errors import DeadlineExceededError, InvalidRequestError, WorkerUnavailableError
from splitserve.offline.calls import BatchError, requests_for
from splitserve.offline.runs import OfflineRun
from support.loop_clock import advance

HANG, FAIL, BREAK_OFF, CRASH = 1, 2, 3, 4
# Seconds, on the clock of the loop.
DEADLINE = 60.0


def answer(ids: list[int], *, ended: bool, num_new: int = 1) -> dict[str, Any]:
    finish = {"type": "length", "length": len(ids)} if ended else None
    return {
        "text": "".join(f"<{i}>" for i in ids),
        "output_ids": ids,
        "meta_info": {"finish_reason": finish, "prompt_tokens": 1, "cached_tokens": 0}
        # As in a stream: those of new tokens.
        | {"hidden_states": [[float(i)] for i in ids[len(ids) - num_new :]]},
    }


class FakeBackend:
    """Answers a prompt with its own tokens, one after the other. The first token may select an error instead."""

    tokenizer: Any = None

    def __init__(self) -> None:
        self.num_open = self.most_open = self.num_asked = 0
        self.started, self.ended = asyncio.Event(), asyncio.Event()

    async def open(self) -> None: ...

    async def close(self) -> None: ...

    async def answers(self, body: dict[str, Any]) -> Any:
        self.num_open += 1
        self.num_asked += 1
        self.most_open = max(self.most_open, self.num_open)
        self.started.set()
        try:
            ids = body["input_ids"]
            if ids[0] == FAIL:
                raise InvalidRequestError("too bad")
            if ids[0] == CRASH:
                raise ZeroDivisionError("oops")
            for n in range(1, len(ids)):
                yield answer(ids[:n], ended=False)
                await asyncio.sleep(0)
            if ids[0] == HANG:
                await asyncio.Event().wait()
            if ids[0] != BREAK_OFF:
                yield answer(ids, ended=True)
        finally:
            self.num_open -= 1
            self.ended.set()


@pytest.fixture
async def backend() -> FakeBackend:
    return FakeBackend()


def make_run(backend: FakeBackend, prompts: list[list[int]], *, places: int = 8, **more: Any) -> OfflineRun:
    return OfflineRun(requests_for(prompts, None, None), backend, asyncio.Semaphore(places), num_runners=places, **more)


async def test_answers_come_in_the_order_of_the_prompts_whoever_ends_first(backend):
    prompts = [[10] * 9, [11], [12] * 5]
    outputs = await make_run(backend, prompts).finish()
    assert [list(o.token_ids) for o in outputs] == prompts
    assert [o.finish_reason for o in outputs] == ["length"] * 3


async def test_no_prompts_have_no_answers(backend):
    assert await make_run(backend, []).finish() == []


async def test_chunks_of_a_prompt_make_its_answer_and_only_the_last_carries_it(backend):
    run = make_run(backend, [[10, 11, 12], [20, 21]], stream=True)
    texts, ids, outputs = {0: "", 1: ""}, {0: [], 1: []}, {}
    while (chunk := await run.next()) is not None:
        assert chunk.index not in outputs
        texts[chunk.index] += chunk.text
        ids[chunk.index] += chunk.token_ids
        if chunk.output is not None:
            outputs[chunk.index] = chunk.output
    assert ids == {0: [10, 11, 12], 1: [20, 21]}
    assert {i: o.text for i, o in outputs.items()} == texts == {0: "<10><11><12>", 1: "<20><21>"}


async def test_chunks_have_the_hidden_states_of_their_tokens_also_if_the_caller_lags_behind(backend):
    requests = requests_for([[10, 11, 12, 13]], None, None, hidden_states=True)
    assert requests[0].body(None, stream=True)["return_hidden_states"]
    run = OfflineRun(requests, backend, asyncio.Semaphore(1), stream=True)
    first = await run.next()
    await backend.ended.wait()
    rest = await run.next()
    assert (first.hidden_states, rest.hidden_states) == (((10.0,),), ((11.0,), (12.0,), (13.0,)))
    assert rest.output.hidden_states == ((10.0,), (11.0,), (12.0,), (13.0,))


async def test_a_caller_that_lags_behind_finds_what_came_as_one_chunk(backend):
    run = make_run(backend, [[10, 11, 12, 13]], stream=True)
    first = await run.next()
    await backend.ended.wait()
    rest = await run.next()
    assert (first.token_ids, rest.token_ids) == ((10,), (11, 12, 13))
    assert rest.output is not None
    assert await run.next() is None


async def test_failures_are_told_when_all_have_ended_and_lose_no_answer(backend):
    ends = []
    run = make_run(backend, [[10], [FAIL], [12], [BREAK_OFF], [CRASH]], on_end=ends.append)
    with pytest.raises(BatchError, match=r"3 of 5 prompts failed \(prompt 1: too bad; prompt 3: ") as caught:
        await run.finish()
    assert [o and o.token_ids for o in caught.value.outputs] == [(10,), None, (12,), None, None]
    kinds = {i: type(e) for i, e in caught.value.errors.items()}
    assert kinds[1] is InvalidRequestError
    assert kinds[3] is WorkerUnavailableError
    assert "ZeroDivisionError: oops" in caught.value.errors[4].message
    assert len(ends) == 5


async def test_one_prompt_s_failure_is_raised_as_it_is(backend):
    with pytest.raises(InvalidRequestError, match="too bad"):
        await make_run(backend, [[FAIL]], is_single=True).finish()


async def test_what_is_not_done_by_the_deadline_fails_alone_and_is_aborted(backend):
    finishing = asyncio.create_task(make_run(backend, [[10], [HANG]], deadline=DEADLINE).finish())
    # The other one does not end by itself.
    await backend.ended.wait()
    advance(DEADLINE)
    with pytest.raises(BatchError) as caught:
        await finishing
    assert caught.value.outputs[0].token_ids == (10,)
    assert isinstance(caught.value.errors[1], DeadlineExceededError)
    assert backend.num_open == 0


async def test_the_wait_for_a_place_counts_against_the_deadline(backend):
    finishing = asyncio.create_task(make_run(backend, [[HANG], [11]], places=1, deadline=DEADLINE).finish())
    await backend.started.wait()
    advance(DEADLINE)
    with pytest.raises(BatchError) as caught:
        await finishing
    assert [type(e) for e in caught.value.errors.values()] == [DeadlineExceededError] * 2
    assert backend.num_asked == 1


async def test_no_more_are_under_way_than_there_are_places_over_all_runs(backend):
    places = asyncio.Semaphore(3)
    runs = [
        OfflineRun(requests_for([[10, 11]] * 20, None, None), backend, places, stream=True, num_runners=8)
        for _ in range(2)
    ]
    await asyncio.gather(*(run.finish() for run in runs))
    assert backend.most_open == 3


async def test_closing_aborts_what_runs(backend):
    run = make_run(backend, [[HANG], [HANG]])
    waiting = asyncio.create_task(run.finish())
    await backend.started.wait()
    waiting.cancel()
    await run.close()
    assert backend.num_open == 0


async def test_stopping_tells_whoever_waits(backend):
    run = make_run(backend, [[HANG]])
    waiting = asyncio.create_task(run.finish())
    await backend.started.wait()
    await run.stop(WorkerUnavailableError("closed"))
    with pytest.raises(WorkerUnavailableError, match="closed"):
        await waiting
    assert backend.num_open == 0
