"""A whole engine with `--deterministic` on a GPU: the state of a request has the same bits in any batch."""

from __future__ import annotations

import importlib.util
import multiprocessing

import numpy as np
import pytest
import torch

from splitserve.core.batch import RequestStep, SampleSpec, StepPlan
from splitserve.core.config import CacheConfig, ModelConfig
from splitserve.core.sampling import ResolvedSampling
from splitserve.engine.build import engine_over
from splitserve.engine.runner import ModelRunner
from splitserve.tools.bench.gpu import random_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.skipif(
        importlib.util.find_spec("flashinfer") is None, reason="FlashInfer is missing: pip install 'splitserve[cuda]'"
    ),
]

SHAPE = {
    "vocab_size": 3000,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 8192,
    "initializer_range": 0.1,
    "tie_word_embeddings": False,
}
# More than one piece of keys, one, and parts of one: together more rows than a library's kernel for few has.
PROMPTS = (5000, 2047, *range(40, 170))


def step(row: int, start: int, num_tokens: int) -> RequestStep:
    ids = [(7 * i + row) % SHAPE["vocab_size"] for i in range(start, start + num_tokens)]
    end = start + num_tokens
    sample = SampleSpec(ResolvedSampling(temperature=0.0), end, ids, (), return_hidden_state=True)
    return RequestStep(str(row), row, ids, start, sample)


def states(runner: ModelRunner, *steps: RequestStep) -> list[bytes]:
    results = runner.execute(StepPlan(steps)).requests
    return [result.hidden_states[0] for result in results]


def count_changed_states(found: multiprocessing.Queue[int], is_deterministic: bool) -> None:
    """Report how many requests have other bits in a decode step of all than in one of their own."""
    torch.manual_seed(0)
    if is_deterministic:
        from splitserve.engine.fixed_order import use_fixed_order

        use_fixed_order()
    loaded = random_model("small", SHAPE, torch.device("cuda:0"), torch.bfloat16)
    pages_each = -(-(max(PROMPTS) + 1) // 16)
    built = engine_over(
        loaded,
        ModelConfig(attention_backend="flashinfer", cuda_graph_max_batch=0, deterministic=is_deterministic),
        CacheConfig(page_size=16, max_total_tokens=len(PROMPTS) * pages_each * 16),
    )
    runner = built.runner(np.arange(len(PROMPTS) * pages_each, dtype=np.int32).reshape(len(PROMPTS), pages_each))
    for row, length in enumerate(PROMPTS):
        states(runner, step(row, 0, length))
    decodes = [step(row, length, 1) for row, length in enumerate(PROMPTS)]
    alone = [states(runner, decode)[0] for decode in decodes]
    found.put(sum(a != b for a, b in zip(alone, states(runner, *decodes), strict=True)))


@pytest.mark.parametrize("is_deterministic", [True, False])
def test_the_state_of_a_decoding_request_has_the_same_bits_alone_and_in_a_batch(is_deterministic: bool) -> None:
    # In a process of its own: the operations of torch are replaced for good.
    context = multiprocessing.get_context("spawn")
    found = context.Queue()
    process = context.Process(target=count_changed_states, args=(found, is_deterministic), daemon=True)
    process.start()
    process.join(300)
    assert process.exitcode == 0
    # Without the option the libraries change kernels between the two: else this test proves nothing.
    assert (found.get(timeout=10) == 0) is is_deterministic
