"""Whatever a client sends: a 400 in OpenAI's shape that names the field, and a worker that serves on."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from splitserve.api.tokenizer import Tokenizer

from .conftest import StartWorker, Worker

HI = [{"role": "user", "content": "Hi"}]
IMAGE = [{"type": "image_url", "image_url": {"url": "http://x"}}]

NATIVE: list[tuple[dict[str, Any], str]] = [
    ({}, "neither text nor input_ids"),
    ({"text": "a", "input_ids": [1]}, "text and input_ids exclude each other"),
    ({"text": ""}, "text has no tokens"),
    ({"text": []}, "text is empty"),
    ({"input_ids": []}, "input_ids is empty"),
    ({"input_ids": [[1], []]}, "input_ids has no tokens"),
    ({"input_ids": [1, 258]}, "token id 258: ids must be in [0, 258)"),
    ({"input_ids": [-1]}, "token id -1"),
    ({"input_ids": [2**70]}, "token id"),
    ({"input_ids": ["a"]}, "input_ids"),
    ({"input_ids": [True]}, "input_ids"),
    ({"text": 5}, "text"),
    ({"text": "a", "sampling_params": "hot"}, "sampling_params has the type string: send an object"),
    ({"text": "a", "sampling_params": [5]}, "sampling_params[0] has the type number: send an object"),
    ({"text": "a", "sampling_params": [{}, {}]}, "list of 2 for 1 prompts"),
    ({"text": ["a", "b"], "sampling_params": [{"n": 1}, {"n": 2}]}, "n differs"),
    ({"text": "a", "rid": ["x", "y"]}, "rid is a list of 2"),
    ({"text": ["a", "b"], "rid": ["x", "x"]}, "two requests of the batch have the same id"),
    ({"text": "a", "stream": "yes"}, "stream"),
    ({"text": "a", "return_logprob": True, "logprob_start_len": 1}, "logprob_start_len is 1"),
    ({"text": "a", "return_hidden_states": True}, "--enable-return-hidden-states"),
    ({"text": "a", "return_hidden_states": "yes"}, "return_hidden_states"),
    ({"text": "a", "return_logprob": True, "logprob_start_len": -2}, "logprob_start_len is -2"),
    (
        {"text": "a", "return_logprob": True, "top_logprobs_num": 129},
        "top_logprobs_num is 129: it must be in [0, 128] (--max-top-logprobs)",
    ),
]
SAMPLING: list[tuple[dict[str, Any], str]] = [
    ({"max_new_tokens": 0}, "max_new_tokens is 0"),
    ({"max_new_tokens": -3}, "max_new_tokens is -3"),
    ({"max_new_tokens": "5"}, "max_new_tokens"),
    ({"max_new_tokens": 2.5}, "max_new_tokens"),
    ({"max_new_tokens": 2, "min_new_tokens": 3}, "min_new_tokens is 3"),
    ({"temperature": -0.1}, "temperature is -0.1"),
    ({"temperature": "hot"}, "temperature"),
    ({"top_p": 0}, "top_p is 0"),
    ({"top_k": -2}, "top_k is -2"),
    ({"top_k": 10**30}, "top_k is 1000000"),
    ({"min_p": 2}, "min_p is 2"),
    ({"repetition_penalty": 0}, "repetition_penalty is 0"),
    ({"repetition_penalty": 1e-40}, "it must be in [0.01, 10]"),
    ({"frequency_penalty": 3}, "frequency_penalty is 3"),
    ({"presence_penalty": -3}, "presence_penalty is -3"),
    ({"n": 0}, "n is 0"),
    ({"n": 129}, "n is 129"),
    ({"stop": [""]}, "empty string"),
    ({"stop": 5}, "stop"),
    ({"stop": [1]}, "sampling_params.stop[0] has the type number: send a string"),
    ({"stop_token_ids": [258]}, "stop_token_ids"),
    ({"logit_bias": {"x": 1}}, "keys must be token ids"),
    ({"logit_bias": {"258": 1}}, "logit_bias"),
    ({"logit_bias": {"1": 101}}, "logit_bias"),
]
COMPLETION: list[tuple[dict[str, Any], str]] = [
    ({}, "prompt is missing: send it"),
    ({"prompt": None}, "prompt"),
    ({"prompt": ""}, "prompt has no tokens"),
    ({"prompt": []}, "prompt is empty"),
    ({"prompt": ["a", 1]}, "prompt"),
    ({"prompt": [-1], "echo": True}, "token id -1"),
    ({"prompt": "a", "max_tokens": 0}, "max_tokens is 0"),
    ({"prompt": "a", "logprobs": -1}, "logprobs is -1"),
    ({"prompt": "a", "logprobs": 129}, "logprobs is 129"),
    ({"prompt": ["a"] * 40, "n": 128}, "5120 samples"),
]
CHAT: list[tuple[dict[str, Any], str]] = [
    ({}, "messages is missing: send it"),
    ({"messages": []}, "messages is empty"),
    ({"messages": "Hi"}, "messages"),
    ({"messages": [{"content": "Hi"}]}, "messages[0].role"),
    ({"messages": [{"role": "wizard", "content": "Hi"}]}, "messages[0].role is 'wizard': give one of system"),
    ({"messages": [*HI, {"role": "w" * 1000, "content": ""}]}, f"messages[1].role is '{'w' * 32}': give one of system"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"messages": [*HI, {"role": "user"}]}, "messages[1].content is missing: send a string or a list"),
    ({"messages": [{"role": "system", "content": None}, *HI]}, "messages[0].content is missing"),
    ({"messages": [{"role": "user", "content": IMAGE}]}, "of type 'image_url'"),
    ({"messages": HI, "top_logprobs": 2}, "needs logprobs"),
    ({"messages": HI, "logprobs": True, "top_logprobs": 129}, "top_logprobs is 129"),
    ({"messages": HI, "continue_final_message": True}, "message of the assistant"),
    ({"messages": HI, "max_completion_tokens": -1}, "max_completion_tokens is -1"),
]


async def refused(worker: Worker, path: str, body: Any, status: int = 400) -> dict[str, Any]:
    response = await worker.http.post(path, **({"content": body} if isinstance(body, bytes) else {"json": body}))
    assert response.status_code == status, response.text
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert (await worker.http.post("/generate", json={"text": "a"})).status_code == 200
    assert worker.front.requests.num_open_samples == 0
    return error


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        *(("/generate", body, message) for body, message in NATIVE),
        *(("/generate", {"text": "a", "sampling_params": params}, message) for params, message in SAMPLING),
        *(("/v1/completions", body, message) for body, message in COMPLETION),
        *(("/v1/chat/completions", body, message) for body, message in CHAT),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_that_makes_no_sense_is_a_400(
    worker: Worker, path: str, body: dict[str, Any], message: str, stream: bool
) -> None:
    error = await refused(worker, path, {"stream": stream} | body)
    assert message in error["message"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/generate", {"text": "a", "sampling_params": {"temperature": -3}}, "sampling_params.temperature"),
        ("/generate", {"text": ["a"], "sampling_params": [{"top_p": 3}]}, "sampling_params[0].top_p"),
        ("/generate", {"text": "a", "sampling_params": {"stop": ["a", ""]}}, "sampling_params.stop[1]"),
        ("/generate", {"text": "a", "sampling_params": {"logit_bias": {"x": 1}}}, "sampling_params.logit_bias"),
        ("/generate", {"text": "a", "sampling_params": {"n": 0}}, "sampling_params.n"),
        ("/generate", {"text": "a", "sampling_params": {"regex": ""}}, "sampling_params.regex"),
        ("/v1/completions", {"prompt": "a", "temperature": -3}, "temperature"),
        ("/v1/completions", {"prompt": "a", "stop": ["a", ""]}, "stop[1]"),
        ("/v1/completions", {"prompt": "a", "stop": ""}, "stop"),
        ("/v1/completions", {"prompt": "a", "n": 0}, "n"),
        ("/v1/chat/completions", {"messages": [*HI, {"role": "wizard"}]}, "messages[1].role"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ("/v1/chat/completions", {"messages": [{"role": "user"}]}, "messages[0].content"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": IMAGE}]}, "messages[0].content[0]"),
        ("/v1/chat/completions", {"messages": HI, "max_completion_tokens": -1}, "max_completion_tokens"),
        ("/generate", {"text": "a", "image_data": "http://x"}, "image_data"),
        ("/v1/completions", {"prompt": "a", "multi_modal_data": {"image": "http://x"}}, "multi_modal_data"),
        ("/v1/chat/completions", {"messages": HI, "modalities": ["text", "audio"]}, "modalities"),
    ],
)
async def test_param_is_the_path_of_the_field(worker: Worker, path: str, body: dict[str, Any], param: str) -> None:
    assert (await refused(worker, path, body))["param"] == param


async def test_a_message_of_the_assistant_needs_no_content(worker: Worker) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    chat = [*HI, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_call_id": "1", "content": "5"}]
    response = await worker.http.post("/v1/chat/completions", json={"messages": chat, "max_tokens": 2})
    assert response.status_code == 200, response.text


@pytest.mark.parametrize(
    ("body", "rid"),
    [
        ({"rid": "mine", "text": "a", "sampling_params": {"n": 1000}}, "mine"),
        ({"rid": "mine", "text": 5}, "mine"),
        ({"rid": ["a", "b"], "text": 5}, "a,b"),
        ({"rid": "x" * 5000, "text": "a"}, "x" * 256 + "..."),
        ({"rid": 7, "text": "a"}, "7"),
        (b"{", "from-header"),
    ],
)
async def test_an_error_begins_with_the_request_and_the_stage(worker: Worker, body: Any, rid: str) -> None:
    worker.http.headers["x-request-id"] = "from-header"
    error = await refused(worker, "/generate", body)
    assert error["message"].startswith(f"request {rid} (stage: validation): ")


@pytest.mark.parametrize("path", ["/generate", "/v1/completions", "/v1/chat/completions", "/abort_request"])
@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b" \n", "the body is empty: send a JSON object"),
        (b"{", "not valid JSON"),
        (b"\xff\xfe", "not valid JSON"),
        (b'{"text": "\xff"}', "not valid UTF-8"),
        (b'{"text": "a", "x": NaN}', "not valid JSON"),
        (b'{"text": "a", "sampling_params": {"temperature": 1e999}}', "not valid JSON"),
        (b'{"text": "\\ud800"}', "not valid JSON"),
        (b"[1]", "JSON array"),
        (b'"text"', "JSON string"),
        (b"null", "JSON null: send an object"),
        (b"[" * 100000, "deeper than 64 levels"),
    ],
)
async def test_a_body_that_is_no_json_object_is_a_400(worker: Worker, path: str, raw: bytes, message: str) -> None:
    assert message in (await refused(worker, path, raw))["message"]


@pytest.mark.parametrize(
    ("path", "message"),
    [
        *[
            (path, "the body is empty: send a JSON object")
            for path in ("/generate", "/v1/completions", "/v1/chat/completions")
        ],
        ("/abort_request", "send the rid of the request to abort"),
    ],
)
async def test_an_empty_body_is_a_400(worker: Worker, path: str, message: str) -> None:
    assert message in (await refused(worker, path, b""))["message"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        # Longer than the text of a prompt within the limit can be: it is not tokenized as a whole.
        ("/v1/completions", {"prompt": "x" * 100_000}),
        ("/generate", {"text": "x" * 100_000}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x" * 100_000}]}),
    ],
)
async def test_a_prompt_that_is_far_too_long_names_its_field(worker: Worker, path: str, body: dict[str, Any]) -> None:
    error = await refused(worker, path, body | {"rid": "long-1"})
    (field,) = body
    assert (error["code"], error["param"]) == ("prompt_too_long", field)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", {"input_ids": [1] * 256}),
        ("/generate", {"text": "x" * 300}),
        ("/v1/completions", {"prompt": "x" * 256}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x" * 256}]}),
    ],
)
async def test_a_prompt_that_leaves_no_room_names_both_numbers(worker: Worker, path: str, body: dict[str, Any]) -> None:
    error = await refused(worker, path, body | {"rid": "long-1"})
    assert (error["code"], error["param"]) == ("prompt_too_long", next(iter(body)))
    assert "request long-1 (stage: validation): the prompt has" in error["message"]
    assert "room for 256" in error["message"]


async def test_a_prompt_that_leaves_room_for_one_token_is_served(worker: Worker) -> None:
    answer = (await worker.http.post("/generate", json={"input_ids": [1] * 255})).json()
    assert answer["meta_info"]["completion_tokens"] == 1


async def test_unknown_keys_and_nulls_are_ignored(worker: Worker) -> None:
    body = {"text": "a", "log_metrics": True, "x": {"y": 1}, "rid": None, "stream": None, "bootstrap_room": "nonsense"}
    params = {"max_new_tokens": 1, "nope": 1, "stop": None, "temperature": None}
    response = await worker.http.post("/generate", json=body | {"sampling_params": params})
    assert response.status_code == 200


TYPOS: list[tuple[str, dict[str, Any], str]] = [
    (
        "/generate",
        {"text": "a", "sampling_params": {"max_tokens": 1}},
        "sampling_params.max_tokens (did you mean max_new_tokens?)",
    ),
    ("/v1/completions", {"prompt": "a", "temprature": 1}, "temprature (did you mean temperature?)"),
    ("/v1/chat/completions", {"messages": HI, "temprature": 1, "user": "me"}, "temprature (did you mean temperature?)"),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "body", "named"), TYPOS)
async def test_unknown_fields_give_a_warning(
    worker: Worker, path: str, body: dict[str, Any], named: str, stream: bool
) -> None:
    response = await worker.http.post(path, json=body | {"stream": stream})
    assert response.status_code == 200
    assert response.headers["x-splitserve-warning"] == f"unknown field {named} ignored"


@pytest.mark.parametrize(("path", "body", "named"), TYPOS)
async def test_unknown_fields_are_rejected_where_they_are_to_be(
    start_worker: StartWorker, path: str, body: dict[str, Any], named: str
) -> None:
    async with start_worker(strict_fields=True) as worker:
        response = await worker.http.post(path, json=body)
        assert response.status_code == 400
        assert f"unknown field {named}" in response.json()["error"]["message"]
        known = {"text": "a", "prompt": "a", "messages": HI}
        fine = {name: value for name, value in body.items() if name in known}
        response = await worker.http.post(path, json=fine)
        assert response.status_code == 200
        assert "x-splitserve-warning" not in response.headers


# Fields that SGLang's router 0.3.2 adds to each request.
OF_SGLANG_ROUTER: list[tuple[str, dict[str, Any]]] = [
    (
        "/generate",
        {"log_metrics": True, "background": False, "no_logs": False, "return_bytes": False, "return_entropy": False},
    ),
    ("/v1/chat/completions", {"separate_reasoning": True, "stream_reasoning": True}),
]


@pytest.mark.parametrize(("path", "added"), OF_SGLANG_ROUTER)
async def test_fields_of_sglangs_router_are_accepted_and_give_no_warning(
    start_worker: StartWorker, path: str, added: dict[str, Any]
) -> None:
    async with start_worker(strict_fields=True) as worker:
        body = {"text": "a"} if path == "/generate" else {"messages": HI}
        response = await worker.http.post(path, json=body | added)
        assert response.status_code == 200, response.text
        assert "x-splitserve-warning" not in response.headers


@pytest.mark.parametrize("name", ["background", "no_logs", "return_bytes", "return_entropy"])
async def test_what_sglangs_router_does_not_request_gives_a_warning(start_worker: StartWorker, name: str) -> None:
    async with start_worker() as worker:
        response = await worker.http.post("/generate", json={"text": "a", name: True})
        assert name in response.headers["x-splitserve-warning"]


LARGE: list[tuple[str, dict[str, Any], str]] = [
    ("/generate", {"input_ids": [1] * 100_000}, "prompt has 100000 tokens"),
    ("/generate", {"text": "hello " * 100_000}, "its first 32768"),
    ("/v1/completions", {"prompt": "hello " * 100_000}, "its first 32768"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hello " * 100_000}]}, "its first 32768"),
    ("/v1/chat/completions", {"messages": HI * 5_000}, "messages has 5000 entries"),
    ("/generate", {"text": "a", "sampling_params": {"stop_token_ids": ["x" * 100] * 5_000}}, "5000 entries"),
    ("/generate", {"text": "a", "sampling_params": {"logit_bias": {str(i): 0 for i in range(5_000)}}}, "5000 entries"),
    ("/generate", {"text": "a", "sampling_params": {"stop": [str(i) for i in range(5_000)]}}, "5000 entries"),
    ("/generate", {"text": "a", "rid": "r" * 100_000}, "rid has 100000 characters"),
    ("/v1/completions", {"prompt": "a", "response_format": {"type": "x" * 100_000}}, "response_format.type"),
    ("/generate", {"text": "a", "input_ids": ["x" * 100_000]}, "input_ids"),
]


@pytest.mark.parametrize(("path", "body", "named"), LARGE)
async def test_a_large_field_is_rejected_by_a_short_error(
    worker: Worker, path: str, body: dict[str, Any], named: str
) -> None:
    error = await refused(worker, path, body)
    assert named in error["message"]
    assert len(error["message"]) <= 1_500


async def test_a_defect_of_ours_is_a_500_that_says_that_its_connection_ends(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Tokenizer, "encode", lambda *_, **__: 1 / 0)
    response = await worker.http.post("/generate", json={"text": "a"})
    assert (response.status_code, response.json()["error"]["code"]) == (500, "internal_error")
    assert response.headers["connection"] == "close"


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_an_unknown_model_is_a_404(worker: Worker, path: str) -> None:
    error = await refused(worker, path, {"model": "gpt-5", "prompt": "a", "messages": HI}, status=404)
    assert (error["code"], error["param"]) == ("model_not_found", "model")


async def test_unknown_paths_and_methods_have_the_same_shape(worker: Worker) -> None:
    response = await worker.http.get("/v1/model")
    assert (response.status_code, response.json()["error"]["code"]) == (404, "not_found")
    assert "GET /v1/model: there is no such route; did you mean /v1/models?" in response.json()["error"]["message"]
    response = await worker.http.get("/v1/chat/completions")
    assert (response.status_code, response.json()["error"]["code"]) == (405, "method_not_supported")
    assert response.headers.get_list("allow") == ["POST"]
    assert "GET /v1/chat/completions: the route has no such method: use POST" in response.json()["error"]["message"]


@pytest.mark.parametrize("mode", ["prefill", "decode"])
async def test_a_pd_worker_refuses_a_request_without_a_room(start_worker: StartWorker, mode: str) -> None:
    async with start_worker(mode) as worker:
        response = await worker.http.post("/generate", json={"text": "a"})
        assert response.status_code == 400
        assert response.json()["error"]["code"] == "missing_bootstrap_room"


async def test_an_id_that_runs_already_is_refused(live_worker: Worker) -> None:
    live_worker.scheduler.hold_after = 1
    body = {"text": "abc", "rid": "same", "stream": True}
    async with live_worker.http.stream("POST", "/generate", json=body) as running:
        lines = running.aiter_lines()
        await anext(lines)
        response = await live_worker.http.post("/generate", json=body)
        assert response.status_code == 400
        assert "another rid" in response.json()["error"]["message"]


async def test_a_client_that_left_may_send_its_request_again_at_once(live_worker: Worker) -> None:
    live_worker.scheduler.hold_after = 1
    body = {"text": "abc", "rid": "same", "stream": True, "sampling_params": {"max_new_tokens": 9}}
    async with live_worker.http.stream("POST", "/generate", json=body) as running:
        lines = running.aiter_lines()
        await anext(lines)
        again = asyncio.create_task(
            live_worker.http.post("/generate", json=body | {"stream": False, "sampling_params": {"max_new_tokens": 1}})
        )
        # The worker answers a later request, so it has received this one.
        await live_worker.http.get("/health")
    assert (await again).status_code == 200


async def test_more_than_may_be_open_are_told_to_retry(start_worker: StartWorker) -> None:
    async with start_worker(max_open=2) as worker:
        response = await worker.http.post("/generate", json={"text": ["a", "b", "c"]})
        assert response.status_code == 503
        assert response.headers["retry-after"] == "1"
        assert response.json()["error"]["code"] == "over_capacity"
        assert (await worker.http.post("/generate", json={"text": ["a", "b"]})).status_code == 200
