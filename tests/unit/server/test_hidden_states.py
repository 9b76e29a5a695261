"""Hidden states in the answers of each route: one per output token, streamed or not."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from splitserve.core.config import WorkerConfig
from splitserve.core.limits import LimitsConfig
from splitserve.offline.backends import SchedulerBackend

from .conftest import StartWorker, Worker

CHAT = [{"role": "user", "content": "Hi"}]


@pytest.fixture
async def serving(start_worker: StartWorker) -> AsyncIterator[Worker]:
    async with start_worker(hidden_states=True) as worker:
        yield worker


async def post(worker: Worker, path: str, body: dict[str, Any]) -> Any:
    response = await worker.http.post(path, json={"return_hidden_states": True, **body})
    assert response.status_code == 200, response.text
    return response.json()


async def events(worker: Worker, path: str, body: dict[str, Any]) -> list[Any]:
    response = await worker.http.post(path, json={"return_hidden_states": True, "stream": True, **body})
    assert response.status_code == 200, response.text
    return [json.loads(e.removeprefix("data: ")) for e in response.text.split("\n\n")[:-2]]


def echoed(tokens: list[int]) -> list[list[float]]:
    """Return the states that the scheduler makes up for these tokens."""
    return [[float(token), float(i)] for i, token in enumerate(tokens, start=1)]


async def test_an_answer_has_one_state_per_output_token(serving: Worker) -> None:
    body = {"input_ids": [65, 66], "sampling_params": {"max_new_tokens": 3}}
    answer = await post(serving, "/generate", body)
    assert answer["meta_info"]["hidden_states"] == echoed([65, 66, 65])
    answers = await post(serving, "/generate", {**body, "sampling_params": {"max_new_tokens": 2, "n": 2}})
    assert [a["meta_info"]["hidden_states"] for a in answers] == [echoed([65, 66])] * 2


async def test_frames_have_the_states_of_their_new_tokens(serving: Worker) -> None:
    frames = await events(serving, "/generate", {"text": "a\u20acb", "sampling_params": {"max_new_tokens": 5}})
    states = [frame["meta_info"]["hidden_states"] for frame in frames]
    assert [state for new in states for state in new] == echoed(frames[-1]["output_ids"])
    seen = 0
    for frame, new in zip(frames, states, strict=True):
        assert len(new) == len(frame["output_ids"]) - seen
        seen = len(frame["output_ids"])


async def test_choices_of_the_openai_routes_have_states(serving: Worker) -> None:
    completion = {"prompt": [65, 66], "max_tokens": 3, "return_token_ids": True}
    [choice] = (await post(serving, "/v1/completions", completion))["choices"]
    assert choice["hidden_states"] == echoed([65, 66, 65])
    [choice] = (await post(serving, "/v1/completions", completion | {"max_tokens": 0, "echo": True}))["choices"]
    assert choice["hidden_states"] == choice["token_ids"] == []
    chat = {"messages": CHAT, "max_tokens": 3, "return_token_ids": True}
    [choice] = (await post(serving, "/v1/chat/completions", chat))["choices"]
    assert choice["hidden_states"] == echoed(choice["token_ids"])


@pytest.mark.parametrize(
    ("path", "body"),
    [
        # The first bytes of a character have no text.
        ("/v1/completions", {"prompt": "\u20ac", "max_tokens": 3}),
        ("/v1/chat/completions", {"messages": CHAT, "max_tokens": 3}),
    ],
)
async def test_chunks_have_states_of_tokens_without_text(path: str, body: dict[str, Any], serving: Worker) -> None:
    whole = (await post(serving, path, body))["choices"][0]["hidden_states"]
    chunks = [chunk["choices"][0] for chunk in await events(serving, path, body)]
    assert [state for chunk in chunks for state in chunk.get("hidden_states", [])] == whole
    assert len(whole) == 3


async def test_tokens_behind_a_stop_string_have_no_state(serving: Worker) -> None:
    body = {"text": "say END now", "sampling_params": {"stop": [" E"]}}
    answer = await post(serving, "/generate", body)
    assert len(answer["meta_info"]["hidden_states"]) == answer["meta_info"]["completion_tokens"] == 5


async def test_prompts_of_a_batch_may_differ(serving: Worker) -> None:
    body = {"text": ["ab", "cd"], "sampling_params": {"max_new_tokens": 1}, "return_hidden_states": [True, False]}
    first, second = await post(serving, "/generate", body)
    assert len(first["meta_info"]["hidden_states"]) == 1
    assert "hidden_states" not in second["meta_info"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", {"text": "a"}),
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/chat/completions", {"messages": CHAT}),
    ],
)
async def test_a_worker_without_the_option_rejects_them(path: str, body: dict[str, Any], worker: Worker) -> None:
    response = await worker.http.post(path, json={**body, "return_hidden_states": True})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "return_hidden_states")
    assert "--enable-return-hidden-states" in error["message"]
    assert not worker.scheduler.received
    response = await worker.http.post(path, json={**body, "return_hidden_states": False})
    assert response.status_code == 200


async def test_alternatives_per_token_are_bounded_by_the_option(start_worker: StartWorker) -> None:
    async with start_worker(limits=LimitsConfig(max_top_logprobs=7)) as worker:
        body = {"text": "a", "return_logprob": True, "sampling_params": {"max_new_tokens": 1}}
        good = await worker.http.post("/generate", json=body | {"top_logprobs_num": 7})
        assert len(good.json()["meta_info"]["output_top_logprobs"][0]) == 7
        for wrong in (8, [8], -1):
            response = await worker.http.post("/generate", json=body | {"top_logprobs_num": wrong})
            assert response.status_code == 400
            assert "must be in [0, 7] (--max-top-logprobs)" in response.json()["error"]["message"]


async def test_states_of_whole_answers_count_as_memory_of_requests(serving: Worker) -> None:
    memory = serving.front.request_memory
    # Of 78 states with two numbers.
    memory.max_bytes = 10_000
    body = {"input_ids": [65, 66], "sampling_params": {"max_new_tokens": 70}, "return_hidden_states": True}
    assert (await serving.http.post("/generate", json=body)).status_code == 200
    body["sampling_params"] = {"max_new_tokens": 100}
    response = await serving.http.post("/generate", json=body)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "return_hidden_states")
    assert "hidden states need" in error["message"]
    assert memory.reserved == 0


async def test_output_logprobs_of_one_request_have_a_bound_although_it_is_alone(serving: Worker) -> None:
    serving.front.request_memory.max_bytes = 4_000
    body = {"input_ids": [65, 66], "sampling_params": {"max_new_tokens": 60}, "return_logprob": True}
    response = await serving.http.post("/generate", json=body)
    assert response.status_code == 400
    assert "logprobs need" in response.json()["error"]["message"]


async def test_a_call_of_the_offline_engine_releases_the_memory_of_its_answers(serving: Worker, tmp_path: Path) -> None:
    backend = SchedulerBackend(WorkerConfig(), tmp_path, None, load_timeout=1.0)
    backend._front = serving.front
    body = {"rid": "r", "input_ids": [65, 66], "sampling_params": {"max_new_tokens": 9}, "return_logprob": True}
    answers = [answer async for answer in backend.answers({**body, "return_hidden_states": True})]
    assert len(answers[-1]["meta_info"]["hidden_states"]) == 9
    assert serving.front.request_memory.reserved == 0
