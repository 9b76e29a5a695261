"""A request ended by /abort_request is answered with its output so far. Other aborts are errors."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import openai
import pytest

from splitserve.core.messages import StepOutputs, TokenOutput
from splitserve.core.request import FinishReason, FinishType

from .conftest import DEADLINE, StartWorker, Worker

HI = [{"role": "user", "content": "Hi"}]
ROOM = {"bootstrap_host": "1.1.1.1", "bootstrap_port": 9, "bootstrap_room": 5}
FORMS: list[tuple[str, dict[str, Any]]] = [
    ("/generate", {"text": "abc"}),
    ("/v1/completions", {"prompt": "abc", "max_tokens": 100}),
    ("/v1/chat/completions", {"messages": HI}),
]


async def running(worker: Worker, path: str, body: dict[str, Any], count: int = 1) -> asyncio.Task[httpx.Response]:
    """A call with `count` samples, all held by the scheduler."""
    worker.scheduler.hold_after = 1
    call = asyncio.create_task(worker.http.post(path, json=body))
    async with asyncio.timeout(DEADLINE):
        while len(worker.scheduler.received) < count:
            await worker.front.scheduler.states()
    return call


def finish_of(answer: dict[str, Any]) -> Any:
    if "meta_info" in answer:
        return answer["meta_info"]["finish_reason"]["type"]
    (choice,) = answer["choices"]
    return choice["finish_reason"]


@pytest.mark.parametrize("abort", [{"rid": "r"}, {"abort_all": True}])
async def test_an_abort_ends_all_samples_of_a_request(live_worker: Worker, abort: dict[str, object]) -> None:
    call = await running(live_worker, "/generate", {"text": "ab", "rid": "r", "sampling_params": {"n": 2}}, 2)
    reply = await live_worker.http.post("/abort_request", json=abort)
    assert reply.json() == {"success": True, "num_aborted": 2}
    response = await asyncio.wait_for(call, DEADLINE)
    assert response.status_code == 200
    reasons = [answer["meta_info"]["finish_reason"] for answer in response.json()]
    assert [reason["type"] for reason in reasons] == ["abort", "abort"]
    assert "/abort_request" in reasons[0]["message"]


async def test_the_other_samples_of_a_request_go_on(live_worker: Worker) -> None:
    body = {"text": ["ab", "cd"], "rid": ["r", "s"], "sampling_params": {"max_new_tokens": 3}}
    call = await running(live_worker, "/generate", body, 2)
    assert (await live_worker.http.post("/abort_request", json={"rid": "r"})).json()["num_aborted"] == 1
    live_worker.scheduler.hold_after = None
    # It checks only when a message arrives.
    await live_worker.front.scheduler.states()
    answers = (await asyncio.wait_for(call, DEADLINE)).json()
    assert [finish_of(answer) for answer in answers] == ["abort", "length"]


@pytest.mark.parametrize("mode", ["null", "prefill", "decode"])
@pytest.mark.parametrize(("path", "body"), FORMS)
async def test_an_aborted_answer_has_the_form_of_every_answer(
    start_worker: StartWorker, mode: str, path: str, body: dict[str, Any]
) -> None:
    async with start_worker(mode, live=True) as worker:
        call = await running(worker, path, body | ROOM | {"rid": "r"})
        await worker.http.post("/abort_request", json={"rid": "r"})
        response = await asyncio.wait_for(call, DEADLINE)
        assert (response.status_code, finish_of(response.json())) == (200, "abort")
        assert worker.front.requests.num_open_samples == 0


@pytest.mark.parametrize(("path", "body"), FORMS)
async def test_a_stream_ends_with_the_abort(live_worker: Worker, path: str, body: dict[str, Any]) -> None:
    live_worker.scheduler.hold_after = 2
    async with live_worker.http.stream("POST", path, json=body | {"stream": True, "rid": "r"}) as response:
        lines = response.aiter_lines()
        await anext(lines)
        await live_worker.http.post("/abort_request", json={"rid": "r"})
        *_, last, done = [line async for line in lines if line]
    assert done == "data: [DONE]"
    assert finish_of(json.loads(last.removeprefix("data: "))) == "abort"


async def test_the_openai_client_reads_an_aborted_answer(live_worker: Worker) -> None:
    live_worker.scheduler.hold_after = 1
    base = str(live_worker.http.base_url).rstrip("/") + "/v1"
    async with openai.AsyncOpenAI(base_url=base, api_key="none", max_retries=0, timeout=DEADLINE) as api:
        stream = await api.chat.completions.create(
            model="tiny", messages=HI, stream=True, logprobs=True, extra_body={"rid": "r"}
        )
        chunks = aiter(stream)
        await anext(chunks)
        await live_worker.http.post("/abort_request", json={"rid": "r"})
        assert [c.choices[0].finish_reason async for c in chunks][-1] == "abort"


async def test_aborting_what_does_not_run_is_no_error(worker: Worker) -> None:
    reply = await worker.http.post("/abort_request", json={"rid": "gone"})
    assert reply.json() == {"success": True, "num_aborted": 0}
    assert (await worker.http.post("/abort_request", json={})).status_code == 400


@pytest.mark.parametrize(
    ("mode", "status", "expected"),
    [("null", 499, 499), ("decode", 499, 499), ("prefill", 499, 200), ("prefill", 504, 504), ("decode", 504, 504)],
)
async def test_an_abort_that_nobody_asked_for_here_is_an_error(
    start_worker: StartWorker, mode: str, status: int, expected: int
) -> None:
    """A prefill worker has done its part if its decode worker was ordered to end: the router must not retry."""
    async with start_worker(mode, live=True) as worker:
        call = await running(worker, "/generate", {"text": "abc", "rid": "r"} | ROOM)
        finish = FinishReason(FinishType.ABORT, message="the other side ended it", status_code=status, reason="aborted")
        await worker.scheduler.send(StepOutputs(outputs=[TokenOutput(rid="r", submission=1, finish=finish)]))
        assert (await asyncio.wait_for(call, DEADLINE)).status_code == expected


async def test_a_deadline_that_was_faster_than_the_abort_is_an_error(live_worker: Worker) -> None:
    call = await running(live_worker, "/generate", {"text": "abc", "rid": "r"})
    live_worker.front.requests.ordered_to_end.add("r")
    finish = FinishReason(FinishType.ABORT, message="late", status_code=504, reason="deadline_exceeded")
    await live_worker.scheduler.send(StepOutputs(outputs=[TokenOutput(rid="r", submission=1, finish=finish)]))
    assert (await asyncio.wait_for(call, DEADLINE)).status_code == 504
