"""The deployment under what users and networks do to it: bad input, duplicates, disconnects, storms of aborts."""

import asyncio
import json
import random
from collections.abc import Iterator

import httpx
import openai
import pytest

from support.deployment import Deployment, deploy

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def deployment() -> Iterator[Deployment]:
    yield from deploy(chunk=256, max_total_tokens=12_000)


@pytest.fixture(autouse=True)
def nothing_is_kept(deployment) -> Iterator[None]:
    yield
    deployment.check_nothing_is_held()


@pytest.fixture
def client(deployment) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{deployment.url('disaggregated')}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_a_chat_streams_through_the_openai_client(client):
    stream = client.chat.completions.create(
        model="smollm2",
        messages=[{"role": "user", "content": "What is the capital of France? Answer in one sentence."}],
        temperature=0.0,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "The capital of France is Paris."
    assert chunks[-1].usage.completion_tokens == 8
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"


def test_samples_and_batches_are_handed_over_each_in_a_room_of_its_own(client, deployment):
    chat = client.chat.completions.create(
        model="smollm2",
        messages=[{"role": "user", "content": "Name a colour."}],
        n=3,
        seed=5,
        temperature=0.8,
        max_tokens=8,
    )
    assert [c.index for c in chat.choices] == [0, 1, 2]
    assert len({c.message.content for c in chat.choices}) > 1
    completion = client.completions.create(model="smollm2", prompt=["One, two,", "A, B,"], max_tokens=4, temperature=0)
    assert [c.index for c in completion.choices] == [0, 1]
    assert completion.usage.completion_tokens == 8


def test_input_logprobs_of_prefill_and_output_logprobs_of_decode_come_in_one_answer(deployment, prompts):
    ask = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 2}
    answers = [
        deployment.generate(mode, prompts[5], sampling_params={"max_new_tokens": 6}, **ask)["meta_info"]
        for mode in ("colocated", "disaggregated")
    ]
    for key in ("input_token_logprobs", "output_token_logprobs", "input_top_logprobs", "output_top_logprobs"):
        assert len(answers[0][key]) == len(answers[1][key]) > 0
    for one, other in zip(*(a["input_token_logprobs"] + a["output_token_logprobs"] for a in answers), strict=True):
        assert one[1:] == other[1:]
        assert one[0] == other[0] is None or abs(one[0] - other[0]) < 1e-3


BAD = [
    ("/generate", {"input_ids": [1] * 9000}, 400, "9000"),
    ("/generate", {"input_ids": []}, 400, "empty"),
    ("/generate", {"text": ""}, 400, "no tokens"),
    ("/generate", {"input_ids": [999_999]}, 400, "999999"),
    ("/generate", {"input_ids": "abc"}, 400, "input_ids"),
    ("/generate", {"text": "a", "sampling_params": {"max_new_tokens": 0}}, 400, "max_new_tokens"),
    ("/generate", {"text": "a", "sampling_params": {"temperature": -1}}, 400, "temperature"),
    ("/v1/completions", {"model": "smollm2", "prompt": "a", "max_tokens": -3}, 400, "max_tokens"),
    ("/v1/completions", {"model": "gpt-7", "prompt": "a"}, 404, "gpt-7"),
    ("/v1/chat/completions", {"model": "smollm2", "messages": []}, 400, "messages"),
    ("/v1/chat/completions", {"model": "smollm2", "messages": "hello"}, 400, "messages"),
    ("/v1/chat/completions", [1, 2], 400, "object"),
]


@pytest.mark.parametrize("mode", ["colocated", "disaggregated"])
@pytest.mark.parametrize(("path", "body", "status", "named"), BAD)
def test_bad_input_gets_a_clear_error(deployment, mode, path, body, status, named):
    response = deployment.client.post(deployment.url(mode) + path, json=body)
    error = response.json()["error"]
    assert response.status_code == status, response.text
    assert named in error["message"]
    assert set(error) >= {"message", "type", "param", "code"}


@pytest.mark.parametrize("mode", ["colocated", "disaggregated"])
def test_invalid_json_and_unknown_keys(deployment, mode):
    url = deployment.url(mode)
    broken = deployment.client.post(f"{url}/generate", content=b'{"text": ')
    assert broken.status_code == 400
    assert "JSON" in broken.json()["error"]["message"]
    body = {
        "text": "Hello",
        "sampling_params": {"max_new_tokens": 2, "mystery": 1},
        "log_metrics": True,
        "x": {"y": []},
    }
    assert deployment.client.post(f"{url}/generate", json=body).status_code == 200


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_pd_worker_without_a_room_answers_400(deployment, role):
    response = deployment.client.post(f"{deployment.worker(role)}/generate", json={"text": "a"})
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "missing_bootstrap_room"


def test_a_room_used_twice_is_a_conflict(deployment, prompts):
    bootstrap = deployment.client.get(f"{deployment.worker('prefill')}/server_info").json()
    body = {
        "input_ids": prompts[-3],
        "sampling_params": {"max_new_tokens": 4},
        "bootstrap_host": "127.0.0.1",
        "bootstrap_port": bootstrap["disaggregation_bootstrap_port"],
        "bootstrap_room": 4711,
    }

    async def ask(role: str, client: httpx.AsyncClient) -> httpx.Response:
        return await client.post(f"{deployment.worker(role)}/generate", json=body)

    async def both_twice() -> list[httpx.Response]:
        async with httpx.AsyncClient(timeout=120) as client:
            return list(
                await asyncio.gather(*(ask(role, client) for role in ["prefill", "prefill", "decode", "decode"]))
            )

    answers = asyncio.run(both_twice())
    assert sorted(r.status_code for r in answers[:2]) == [200, 409]
    assert sorted(r.status_code for r in answers[2:]) == [200, 409]


def test_a_stop_string_ends_the_stream_and_never_shows(deployment):
    body = {
        "text": "One, two, three, four, five, six,",
        "sampling_params": {"temperature": 0, "max_new_tokens": 40, "stop": ["nine"]},
    }
    answers = [
        deployment.client.post(f"{deployment.url(m)}/generate", json=body).json()
        for m in ("colocated", "disaggregated")
    ]
    assert answers[0]["text"] == answers[1]["text"]
    assert answers[1]["meta_info"]["finish_reason"] == {"type": "stop", "matched": "nine"}
    assert "nine" not in answers[1]["text"]


def test_every_route_of_a_worker_and_of_the_router_answers(deployment):
    gets = (
        "/health",
        "/live",
        "/health_generate",
        "/server_info",
        "/get_server_info",
        "/model_info",
        "/get_model_info",
        "/v1/models",
    )
    worker_only = ("/get_load", "/v1/loads", "/metrics")
    for base, paths in [(url, gets + worker_only) for url in deployment.workers()] + [
        (deployment.url("disaggregated"), gets)
    ]:
        for path in paths:
            response = deployment.client.get(base + path)
            assert response.status_code == 200, (base, path, response.text)
    base = deployment.url("disaggregated")
    tokens = deployment.client.post(f"{base}/tokenize", json={"model": "smollm2", "prompt": "Grüße 👋"}).json()[
        "tokens"
    ]
    assert deployment.client.post(f"{base}/detokenize", json={"model": "smollm2", "tokens": tokens}).status_code == 200


def test_the_transfer_shows_on_the_metrics(deployment, prompts):
    deployment.generate("disaggregated", prompts[10], sampling_params={"max_new_tokens": 2})
    text = deployment.client.get(f"{deployment.worker('prefill')}/metrics").text
    values = {line.split("{")[0].split(" ")[0]: line.rsplit(" ", 1)[1] for line in text.splitlines() if line[:1] != "#"}
    assert float(values["splitserve:kv_transfer_bytes_sum"]) > 0
    assert float(values["splitserve:kv_transfer_latency_seconds_count"]) >= 1
    assert float(values["splitserve:num_transfer_failed_reqs_total"]) >= 0


def test_a_storm_of_requests_a_third_of_them_given_up_leaves_nothing(deployment, prompts):
    rng = random.Random(11)

    async def one(client: httpx.AsyncClient, number: int) -> str:
        prompt = rng.choice(prompts[:17])[: rng.randrange(1, 700)]
        body = {"input_ids": prompt, "stream": True, "rid": f"storm-{number}"}
        body["sampling_params"] = {"max_new_tokens": rng.randrange(1, 24), "ignore_eos": True}
        patience = rng.uniform(0.0, 3.0) if number % 3 == 0 else None
        try:
            return await asyncio.wait_for(stream(client, body), patience)
        except TimeoutError:
            return "left"

    async def stream(client: httpx.AsyncClient, body) -> str:
        if int(body["rid"].split("-")[1]) % 9 == 0:
            await client.post(f"{deployment.url('disaggregated')}/abort_request", json={"rid": body["rid"]})
        last = ""
        async with client.stream("POST", f"{deployment.url('disaggregated')}/generate", json=body) as response:
            if response.status_code != 200:
                return f"status {response.status_code}: {(await response.aread()).decode()}"
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    last = line
        answer = json.loads(last.removeprefix("data: "))
        assert len(answer["output_ids"]) == body["sampling_params"]["max_new_tokens"]
        return "done"

    async def storm() -> list[str]:
        async with httpx.AsyncClient(timeout=240, limits=httpx.Limits(max_connections=None)) as client:
            return list(await asyncio.gather(*(one(client, i) for i in range(100))))

    ends = asyncio.run(storm())
    assert all(end == "done" for i, end in enumerate(ends) if i % 3), [e for e in ends if e != "done"]
    assert ends.count("left") > 5
