"""The promise: output of prefill and decode apart equals transformers' own `generate`, and colocated serving.

float32, greedy, 64 tokens for each of 20 prompts of 1 to 3,000 tokens. Sixteen at a time with every chunk size, cold
and warm; alone with the small chunks. `make soak` runs the rest of the cross.
"""

from collections.abc import Iterator

import pytest
import torch
import transformers

from splitserve.engine.sources import resolve_model
from splitserve.testing.deployment import MODEL, Deployment, deploy
from splitserve.testing.reference import NUM_OUTPUT_TOKENS, Reference, greedy_reference

pytestmark = pytest.mark.process

MODES = ("colocated", "disaggregated")
EXACT = {"max_new_tokens": NUM_OUTPUT_TOKENS, "min_new_tokens": NUM_OUTPUT_TOKENS}


@pytest.fixture(scope="module", params=[64, 2048], ids=["chunk64", "chunk2048"])
def deployment(request) -> Iterator[Deployment]:
    yield from deploy(chunk=request.param)


@pytest.fixture(scope="module")
def reference() -> Reference:
    torch.set_num_threads(2)
    model = transformers.AutoModelForCausalLM.from_pretrained(resolve_model(MODEL), dtype=torch.float32).eval()
    return greedy_reference(model)


def check_greedy(deployment: Deployment, mode: str, prompts, reference: Reference, at_a_time: int) -> None:
    deployment.flush()
    for temperature in ("cold", "warm"):
        answers = deployment.generate_all(mode, prompts, at_a_time, sampling_params=EXACT)
        for prompt, answer in zip(prompts, answers, strict=True):
            assert answer["output_ids"] == reference(prompt), (temperature, len(prompt))
    longest = answers[-1]["meta_info"]
    assert longest["cached_tokens"] == (longest["prompt_tokens"] - 1) // 16 * 16
    deployment.check_nothing_is_held()


@pytest.mark.parametrize("mode", MODES)
def test_sixteen_at_a_time_equal_generate(deployment, prompts, reference, mode):
    check_greedy(deployment, mode, prompts, reference, at_a_time=16)


@pytest.mark.soak
@pytest.mark.parametrize("mode", MODES)
def test_alone_equal_generate(deployment, prompts, reference, mode):
    check_greedy(deployment, mode, prompts, reference, at_a_time=1)


@pytest.mark.parametrize("mode", MODES)
def test_some_alone_equal_generate(deployment, prompts, reference, mode):
    check_greedy(deployment, mode, prompts[::4] + prompts[-1:], reference, at_a_time=1)


def test_seeded_sampling_is_the_same_in_any_mode_and_any_company(deployment, prompts):
    asked = [(prompt, {"temperature": 0.8, "seed": i, "max_new_tokens": 32}) for i, prompt in enumerate(prompts[:12])]
    alone = [deployment.generate("colocated", p, sampling_params=own)["output_ids"] for p, own in asked]
    apart = [deployment.generate("disaggregated", p, sampling_params=own)["output_ids"] for p, own in asked]
    batch = deployment.client.post(
        f"{deployment.url('disaggregated')}/generate",
        json={"input_ids": [p for p, _ in asked], "sampling_params": [own for _, own in asked]},
    ).json()
    assert alone == apart == [answer["output_ids"] for answer in batch]
    deployment.check_nothing_is_held()
