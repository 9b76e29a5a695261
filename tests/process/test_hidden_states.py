"""Hidden states of real workers: those of transformers, from a pair of sharded workers and from an engine."""

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch
import transformers

from splitserve import Engine
from splitserve.core.parallel import WorkerShape
from splitserve.deploy.deployment import LocalDeployment
from splitserve.deploy.local import LocalCluster
from support.tiny_models import make_tiny_model

pytestmark = pytest.mark.process

NUM_NEW = 8
PROMPTS = [[(i * 37 + j * j * 11) % 250 for j in range(length)] for i, length in enumerate((1, 16, 70))]
PARAMS = {"max_new_tokens": NUM_NEW, "min_new_tokens": NUM_NEW, "temperature": 0.0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return make_tiny_model("llama", tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture(scope="module")
def model(folder):
    torch.set_num_threads(1)
    return transformers.AutoModelForCausalLM.from_pretrained(folder).eval()


def check(model, prompt, output_ids, hidden_states) -> None:
    """Compare with a forward over prompt and output."""
    with torch.inference_mode():
        out = model(torch.tensor([[*prompt, *output_ids[:-1]]]), output_hidden_states=True)
    expected = out.hidden_states[-1][0, len(prompt) - 1 :]
    assert len(hidden_states) == len(output_ids) == NUM_NEW
    np.testing.assert_allclose(np.array(hidden_states), expected.numpy(), rtol=1e-3, atol=1e-3)


def check_top(model, prompt, top) -> None:
    """Compare the alternatives of the first token, which travel in the metadata row."""
    with torch.inference_mode():
        logprobs = model(torch.tensor([prompt])).logits[0, -1].log_softmax(-1)
    assert len({token_id for _, token_id, _ in top}) == 128
    found = torch.tensor([logprob for logprob, _, _ in top])
    torch.testing.assert_close(found, logprobs.topk(128).values, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(found, logprobs[[token_id for _, token_id, _ in top]], rtol=1e-3, atol=1e-3)


def events(response: httpx.Response) -> Iterator[dict]:
    lines = (line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: {"))
    yield from map(json.loads, lines)


def test_a_pair_of_sharded_workers_returns_them(folder, model):
    options = {
        "worker_args": ["--max-total-tokens", "2000", "--chunked-prefill-size", "32", "--enable-return-hidden-states"],
        "prefill_shape": WorkerShape(tp_size=2),
        "decode_shape": WorkerShape(pp_size=2),
    }
    deployment = LocalDeployment(model=str(folder), dtype="float32", threads=1, **options)
    with LocalCluster(deployment) as cluster, httpx.Client(base_url=cluster.router_url, timeout=120) as client:
        cluster.wait_ready(timeout=180)
        for prompt in PROMPTS:
            body = {"input_ids": prompt, "sampling_params": PARAMS, "return_hidden_states": True}
            # With logprobs the router merges the answers of both workers.
            for more in ({}, {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 128}):
                answer = client.post("/generate", json=body | more).json()
                check(model, prompt, answer["output_ids"], answer["meta_info"]["hidden_states"])
            check_top(model, prompt, answer["meta_info"]["output_top_logprobs"][0])
            with client.stream("POST", "/generate", json=body | {"stream": True}) as response:
                frames = list(events(response))
            states = [state for frame in frames for state in frame["meta_info"]["hidden_states"]]
            check(model, prompt, frames[-1]["output_ids"], states)
            body = {"prompt": prompt, "max_tokens": NUM_NEW, "min_tokens": NUM_NEW, "temperature": 0.0}
            body |= {"return_hidden_states": True, "return_token_ids": True}
            choice = client.post("/v1/completions", json=body).json()["choices"][0]
            check(model, prompt, choice["token_ids"], choice["hidden_states"])


def test_an_engine_returns_them(folder, model):
    with Engine(str(folder), dtype="float32", threads=1, enable_return_hidden_states=True, progress=False) as engine:
        outputs = engine.generate(PROMPTS, PARAMS, hidden_states=True)
        for prompt, output in zip(PROMPTS, outputs, strict=True):
            check(model, prompt, output.token_ids, output.hidden_states)
        chunks = list(engine.stream(PROMPTS[2], PARAMS, hidden_states=True))
        states = [state for chunk in chunks for state in chunk.hidden_states]
        check(model, PROMPTS[2], outputs[2].token_ids, states)
        assert chunks[-1].output.hidden_states == tuple(states)
        assert engine.generate(PROMPTS[0], PARAMS).hidden_states == ()
