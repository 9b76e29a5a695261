"""SGLang's own routers before our workers: their answers equal those through ours.

Each request goes through our router and then through SGLang's Rust router and its `mini_lb`, in front of the
same two workers. Features that one of those lacks (docs/routing.md) are not tested through it.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from splitserve.deploy.deployment import LocalDeployment
from splitserve.deploy.local import LocalCluster
from splitserve.process.child import POLL_INTERVAL
from support.deployment import Deployment
from support.sglang_router import SglangRouter, sglang_router
from support.tiny_models import make_tiny_model

pytestmark = pytest.mark.process

KINDS: tuple[SglangRouter, ...] = ("router", "mini_lb")
# Seconds for anything.
DEADLINE = 60.0
# Tokens of a request that is given up, many more than are made until then. Decode computes all but the first.
LONG = 4000

GREEDY = {"temperature": 0.0, "max_new_tokens": 8}
DRAWN = {"temperature": 0.8, "sampling_seed": 3, "max_new_tokens": 8}
TEXT = "The capital of France is"
IDS = [[(i * 37 + j * 11) % 250 for j in range(20 + 9 * i)] for i in range(3)]
COMPLETION = {"prompt": TEXT, "max_tokens": 8, "temperature": 0}
DRAWN_COMPLETION = {"max_tokens": 8, "temperature": 0.8, "seed": 3, "n": 2}
CHAT = {"messages": [{"role": "user", "content": "Name a colour."}], "max_tokens": 8, "temperature": 0}
USAGE = {"stream": True, "stream_options": {"include_usage": True}}
SCORED = {"return_logprob": True, "logprob_start_len": 0}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "generate": ("/generate", {"text": TEXT, "sampling_params": GREEDY}),
    "generate-batch": ("/generate", {"input_ids": IDS, "sampling_params": GREEDY}),
    "generate-n": ("/generate", {"text": TEXT, "sampling_params": DRAWN | {"n": 3}}),
    "generate-batch-n": ("/generate", {"input_ids": IDS, "sampling_params": DRAWN | {"n": 2}}),
    "generate-input-logprobs": ("/generate", {"text": TEXT, "sampling_params": GREEDY, **SCORED}),
    "generate-batch-logprobs": (
        "/generate",
        {"input_ids": IDS, "sampling_params": GREEDY, "return_logprob": True, "top_logprobs_num": 2},
    ),
    "generate-regex": ("/generate", {"text": TEXT, "sampling_params": GREEDY | {"regex": "[0-9]{5}"}}),
    "generate-stream": ("/generate", {"text": TEXT, "sampling_params": GREEDY, "stream": True}),
    "generate-stream-logprobs": (
        "/generate",
        {"text": TEXT, "sampling_params": GREEDY, "stream": True, "return_logprob": True},
    ),
    "generate-stream-batch-n": ("/generate", {"input_ids": IDS, "sampling_params": DRAWN | {"n": 2}, "stream": True}),
    "completion": ("/v1/completions", COMPLETION),
    "completion-list": ("/v1/completions", COMPLETION | {"prompt": [TEXT, "One, two,"]}),
    "completion-list-n": ("/v1/completions", {"prompt": [TEXT, "One, two,"], **DRAWN_COMPLETION}),
    "completion-logprobs": ("/v1/completions", COMPLETION | {"logprobs": 2}),
    "completion-stream": ("/v1/completions", COMPLETION | USAGE),
    "completion-stream-list-logprobs": (
        "/v1/completions",
        COMPLETION | {"prompt": [TEXT, "One, two,"], "logprobs": 2, "stream": True},
    ),
    "chat": ("/v1/chat/completions", CHAT),
    "chat-n": ("/v1/chat/completions", CHAT | DRAWN_COMPLETION),
    "chat-logprobs": ("/v1/chat/completions", CHAT | {"logprobs": True, "top_logprobs": 2}),
    "chat-stream": ("/v1/chat/completions", CHAT | USAGE),
    "chat-stream-n-logprobs": ("/v1/chat/completions", CHAT | DRAWN_COMPLETION | {"stream": True, "logprobs": True}),
}
# The Rust router supports no lists of texts, no token ids on the OpenAI routes, and no prompt logprobs in streams.
MINI_LB_CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "generate-texts-n": ("/generate", {"text": [TEXT, "One, two,"], "sampling_params": DRAWN | {"n": 2}}),
    "generate-stream-input-logprobs": (
        "/generate",
        {"text": TEXT, "sampling_params": GREEDY, "stream": True, **SCORED},
    ),
    "completion-ids": ("/v1/completions", COMPLETION | {"prompt": IDS}),
}


@pytest.fixture(scope="module")
def deployment(tmp_path_factory) -> Iterator[Deployment]:
    model = str(make_tiny_model("llama", tmp_path_factory.mktemp("model") / "llama"))
    args = ["--max-total-tokens", "8000", "--served-model-name", "tiny"]
    with LocalCluster(LocalDeployment(model=model, dtype="float32", threads=1, worker_args=args)) as cluster:
        cluster.wait_ready(timeout=180)
        with httpx.Client(timeout=DEADLINE) as client:
            yield Deployment(cluster, client)


@pytest.fixture(scope="module")
def routers(deployment, tmp_path_factory) -> Iterator[dict[str, str]]:
    """URLs by kind."""
    prefill, decode = deployment.worker("prefill"), deployment.worker("decode")
    port = deployment.client.get(f"{prefill}/server_info").json()["disaggregation_bootstrap_port"]
    folder = tmp_path_factory.mktemp("logs")
    with (
        sglang_router("router", prefill, port, decode, folder) as router,
        sglang_router("mini_lb", prefill, port, decode, folder) as mini_lb,
    ):
        yield {"router": router, "mini_lb": mini_lb}


@pytest.fixture(autouse=True)
def nothing_is_kept(deployment) -> Iterator[None]:
    yield
    deployment.check_nothing_is_held()


@pytest.fixture(params=KINDS)
def url(request, routers) -> str:
    return routers[request.param]


async def ask(client: httpx.AsyncClient, url: str, path: str, body: dict[str, Any]) -> Any:
    """What a client gets of interest, in one form for whole answers and streams."""
    async with client.stream(
        "POST", url + path, json={"model": "tiny", **body} if "/v1/" in path else body
    ) as response:
        content = await response.aread()
    assert response.status_code == 200, content
    if not body.get("stream"):
        return matter_of(json.loads(content))
    assert response.headers["content-type"].startswith("text/event-stream")
    *events, done = [line[6:] for line in content.decode().splitlines() if line.startswith("data: ")]
    assert done == "[DONE]"
    return folded([json.loads(event) for event in events])


# What differs between two runs of one request.
VOLATILE = {"id", "created", "e2e_latency", "timeline", "kv_transfer", "cached_tokens", "prompt_tokens_details"}


def matter_of(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: matter_of(v) for key, v in value.items() if key not in VOLATILE}
    if isinstance(value, list):
        return [matter_of(v) for v in value]
    return value


def folded(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Of each choice all of its text and logprobs, however many tokens came together."""
    result: dict[str, Any] = {}
    for event in events:
        assert "error" not in event, event
        if "meta_info" in event:
            result[f"sample {event.get('index', 0)}"] = matter_of(event)
            continue
        for choice in event["choices"]:
            whole = result.setdefault(f"choice {choice['index']}", {"text": "", "logprobs": []})
            whole["text"] += choice["text"] if "text" in choice else choice["delta"].get("content") or ""
            whole["finish_reason"] = choice["finish_reason"]
            logprobs = choice.get("logprobs") or {}
            whole["logprobs"] += logprobs.get("token_logprobs") or [t["logprob"] for t in logprobs.get("content") or ()]
        if event.get("usage"):
            result["usage"] = matter_of(event["usage"])
    return result


def check_same(found: Any, expected: Any, where: str = "answer") -> None:
    """Floats but for noise: a prompt that is cached is computed in other shapes."""
    assert type(found) is type(expected), where
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), where
        for key in expected:
            check_same(found[key], expected[key], f"{where}.{key}")
    elif isinstance(expected, list):
        assert len(found) == len(expected), where
        for i, (one, other) in enumerate(zip(found, expected, strict=True)):
            check_same(one, other, f"{where}[{i}]")
    elif isinstance(expected, float):
        assert found == pytest.approx(expected, abs=1e-3), where
    else:
        assert found == expected, where


async def check_case(deployment: Deployment, url: str, path: str, body: dict[str, Any]) -> None:
    async with httpx.AsyncClient(timeout=DEADLINE) as client:
        expected = await ask(client, deployment.url("disaggregated"), path, body)
        check_same(await ask(client, url, path, body), expected)


@pytest.mark.parametrize("case", CASES)
async def test_an_answer_is_that_of_our_router(deployment, url, case):
    await check_case(deployment, url, *CASES[case])


@pytest.mark.parametrize("case", MINI_LB_CASES)
async def test_an_answer_through_mini_lb_is_that_of_our_router(deployment, routers, case):
    await check_case(deployment, routers["mini_lb"], *MINI_LB_CASES[case])


def long_request(rid: str, *, stream: bool) -> dict[str, Any]:
    params = {"temperature": 0.0, "max_new_tokens": LONG, "ignore_eos": True}
    return {"text": TEXT, "rid": rid, "stream": stream, "sampling_params": params}


async def until_decode_runs(deployment: Deployment) -> None:
    deadline = time.monotonic() + DEADLINE
    while not deployment.state(deployment.worker("decode"))["num_running_reqs"]:
        assert time.monotonic() < deadline
        await asyncio.sleep(POLL_INTERVAL)


def num_computed(deployment: Deployment) -> int:
    return deployment.state(deployment.worker("decode"))["num_computed_tokens_total"]


# mini_lb does not look whether the client of a whole answer is still there.
@pytest.mark.parametrize(("kind", "stream"), [("router", True), ("router", False), ("mini_lb", True)])
async def test_a_client_that_leaves_ends_its_request_on_both_workers(deployment, routers, kind, stream):
    before = num_computed(deployment)
    async with httpx.AsyncClient(timeout=DEADLINE) as client:
        call = asyncio.create_task(ask(client, routers[kind], "/generate", long_request(f"left-{kind}", stream=stream)))
        await until_decode_runs(deployment)
        assert not call.done()
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
    await asyncio.to_thread(deployment.check_nothing_is_held, DEADLINE)
    assert num_computed(deployment) - before < LONG - 1


@pytest.mark.parametrize("stream", [False, True])
async def test_an_abort_request_ends_it_for_good(deployment, url, stream):
    """And no router tries again for it."""
    before = num_computed(deployment)
    async with httpx.AsyncClient(timeout=DEADLINE) as client:
        call = asyncio.create_task(ask(client, url, "/generate", long_request("told", stream=stream)))
        await until_decode_runs(deployment)
        for worker in deployment.workers():
            response = await client.post(f"{worker}/abort_request", json={"rid": "told"})
            assert response.status_code == 200
        answer = await call
    meta = (answer["sample 0"] if stream else answer)["meta_info"]
    assert meta["finish_reason"]["type"] == "abort"
    assert meta["completion_tokens"] < LONG
    assert num_computed(deployment) - before < LONG - 1


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/generate", {"input_ids": [1] * 9000}, 400),
        ("/v1/completions", {"model": "tiny", "prompt": TEXT, "temperature": -1}, 400),
        ("/v1/chat/completions", {"model": "gpt-7", "messages": CHAT["messages"]}, 404),
    ],
)
def test_a_request_at_fault_gets_its_status(deployment, url, path, body, status):
    assert deployment.client.post(url + path, json=body).status_code == status


def test_what_routers_ask_of_workers_is_answered(deployment, routers):
    """Requests of a router at its startup, and of operators."""
    client, url = deployment.client, routers["router"]
    workers = client.get(f"{url}/workers").json()["workers"]
    assert {w["metadata"]["disaggregation_mode"] for w in workers} == {"prefill", "decode"}
    assert all(w["is_healthy"] for w in workers)
    for path in ("/get_model_info", "/v1/models", "/health", "/engine_metrics"):
        assert client.get(url + path).status_code == 200, path
    assert client.post(f"{url}/flush_cache").json()["workers_flushed"] == 2
    url = routers["mini_lb"]
    for path in ("/get_server_info", "/model_info", "/v1/models", "/health_generate"):
        assert client.get(url + path).status_code == 200, path
    assert client.post(f"{url}/flush_cache").status_code == 200


@pytest.mark.soak
async def test_a_storm_of_all_forms_a_third_of_them_given_up(deployment, url):
    """Those who stay get what they get from our router, however busy the workers are."""
    rng = random.Random(5)
    forms = [CASES[case] for case in CASES]

    async def one(client: httpx.AsyncClient, number: int, expected: list[Any]) -> str:
        path, body = forms[number % len(forms)]
        if number % 3 == 0:
            call = ask(client, url, "/generate", long_request(f"storm-{number}", stream=True))
            try:
                await asyncio.wait_for(call, rng.uniform(0.0, 3.0))
            except TimeoutError:
                return "left"
        check_same(await ask(client, url, path, body), expected[number % len(forms)])
        return "same"

    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=4 * DEADLINE, limits=limits) as client:
        expected = [await ask(client, deployment.url("disaggregated"), path, body) for path, body in forms]
        ends = await asyncio.gather(*(one(client, number, expected) for number in range(300)))
    assert ends.count("same") == 200
    await asyncio.to_thread(deployment.check_nothing_is_held, DEADLINE)
