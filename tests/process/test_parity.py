"""The promise: output of prefill and decode apart equals transformers' own `generate`, and colocated serving.

float32, greedy, 20 tokens for each of five prompts of 1 to 257 tokens, all at once, cold and warm, in chunks of 64.
tests/parity has other lengths and kinds with tiny models. `make soak` runs the whole cross: 20 prompts of up to 3,000
tokens with 64 tokens each, in chunks of 64 and 2,048.
"""

import asyncio
from collections.abc import Iterator

import httpx
import pytest
import torch
import transformers

from splitserve.engine.sources import resolve_model
from splitserve.router.args import PrefillConfig
from support.deployment import MODEL, Deployment, deploy
from support.reference import NUM_OUTPUT_TOKENS, NUM_SOAK_TOKENS, Reference, greedy_reference
from support.router_world import start_router

pytestmark = pytest.mark.process

MODES = ("colocated", "disaggregated")
# One token, a page with and without one more, a chunk and one more, and many chunks.
SOME_LENGTHS = (1, 16, 17, 65, 257)
# Prompts of at most so many tokens are computed on decode.
SHORT = 17


@pytest.fixture(scope="module")
def deployment(request) -> Iterator[Deployment]:
    """Its parameter: tokens of prompt that a step computes at most."""
    yield from deploy(chunk=getattr(request, "param", 64), dtype="float32")


@pytest.fixture(scope="module")
def reference() -> Reference:
    torch.set_num_threads(1)
    model = transformers.AutoModelForCausalLM.from_pretrained(resolve_model(MODEL), dtype=torch.float32).eval()
    return greedy_reference(model)


def check_greedy(
    deployment: Deployment,
    mode: str,
    prompts,
    reference: Reference,
    at_a_time: int,
    num_tokens: int = NUM_OUTPUT_TOKENS,
) -> None:
    exact = {"max_new_tokens": num_tokens, "min_new_tokens": num_tokens}
    deployment.flush()
    for temperature in ("cold", "warm"):
        answers = deployment.generate_all(mode, prompts, at_a_time, sampling_params=exact)
        for prompt, answer in zip(prompts, answers, strict=True):
            assert answer["output_ids"] == reference(prompt, num_tokens), (temperature, len(prompt))
    for meta in (answer["meta_info"] for answer in answers):
        assert meta["cached_tokens"] == (meta["prompt_tokens"] - 1) // 16 * 16
    deployment.check_nothing_is_held()


@pytest.mark.parametrize("mode", MODES)
def test_all_at_once_equal_generate(deployment, prompts, reference, mode):
    chosen = [p for p in prompts if len(p) in SOME_LENGTHS]
    assert len(chosen) == len(SOME_LENGTHS)
    check_greedy(deployment, mode, chosen, reference, at_a_time=len(chosen))


@pytest.mark.soak
@pytest.mark.parametrize("mode", MODES)
def test_some_alone_equal_generate(deployment, prompts, reference, mode):
    check_greedy(deployment, mode, prompts[4:-2:13], reference, at_a_time=1)


async def test_short_prompts_computed_on_decode_equal_generate_and_prefill_sees_the_long_ones_only(
    deployment, prompts, reference
):
    chosen = [p for p in prompts if len(p) in SOME_LENGTHS]
    params = {"temperature": 0.0, "max_new_tokens": NUM_OUTPUT_TOKENS, "min_new_tokens": NUM_OUTPUT_TOKENS}
    deployment.flush()
    workers = deployment.client.get(f"{deployment.url('disaggregated')}/workers").json()["workers"]
    ports = {w["url"]: w["bootstrap_port"] for w in workers}
    prefill, decode = deployment.worker("prefill"), deployment.worker("decode")
    before = deployment.state(prefill)["num_finished_reqs_total"], deployment.state(decode)["num_computed_tokens_total"]

    async def ask(client: httpx.AsyncClient, router: str, prompt: list[int]) -> list[int]:
        body = {"input_ids": prompt, "sampling_params": params}
        answer = await client.post(f"{router}/generate", json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()["output_ids"]

    configs = (PrefillConfig(prefill, ports[prefill]),)
    async with (
        start_router(prefill=configs, decode=(decode,), disaggregate_above=SHORT) as router,
        httpx.AsyncClient(timeout=300) as client,
    ):
        outputs = await asyncio.gather(*(ask(client, router, prompt) for prompt in chosen))
        routed = (await client.get(f"{router}/metrics")).text
    assert outputs == [reference(prompt, NUM_OUTPUT_TOKENS) for prompt in chosen]
    num_short = sum(len(prompt) <= SHORT for prompt in chosen)
    assert f"splitserve_router:local_prefills_total {num_short:.1f}" in routed
    after = deployment.state(prefill)["num_finished_reqs_total"], deployment.state(decode)["num_computed_tokens_total"]
    assert after[0] - before[0] == len(chosen) - num_short == 2
    # Decode computes no part of a prompt that prefill has transferred.
    num_local = sum(len(prompt) for prompt in chosen if len(prompt) <= SHORT)
    assert after[1] - before[1] == num_local + len(chosen) * (NUM_OUTPUT_TOKENS - 1)
    deployment.check_nothing_is_held()


@pytest.mark.soak
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("at_a_time", [1, 16])
@pytest.mark.parametrize("deployment", [64, 2048], indirect=True)
def test_the_whole_cross_equals_generate(deployment, prompts, reference, mode, at_a_time):
    check_greedy(deployment, mode, prompts, reference, at_a_time, NUM_SOAK_TOKENS)


def test_seeded_sampling_is_the_same_in_any_mode_and_any_company(deployment, prompts):
    asked = [(prompt, {"temperature": 0.8, "seed": i, "max_new_tokens": 8}) for i, prompt in enumerate(prompts[3:9:2])]
    alone = [deployment.generate("colocated", p, sampling_params=own)["output_ids"] for p, own in asked]
    apart = [deployment.generate("disaggregated", p, sampling_params=own)["output_ids"] for p, own in asked]
    batch = deployment.client.post(
        f"{deployment.url('disaggregated')}/generate",
        json={"input_ids": [p for p, _ in asked], "sampling_params": [own for _, own in asked]},
    ).json()
    assert alone == apart == [answer["output_ids"] for answer in batch]
    deployment.check_nothing_is_held()
