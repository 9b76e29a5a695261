"""The logits and the KV of a token depend on its own sequence only, to the last bit, in each dtype of our kernels.

The reference computes each sequence alone, token by token, on one thread. Every other schedule must give the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from splitserve.core.batch import InputLogprobSpec, RequestStep, SampleSpec, StepPlan, TokenLogprob
from splitserve.core.config import CacheConfig, ModelConfig
from splitserve.core.sampling import ResolvedSampling
from splitserve.engine import whole_model
from splitserve.engine.build import build_engine
from splitserve.engine.kernels.library import find_library

pytestmark = pytest.mark.skipif(find_library() is None, reason="installed without a C compiler")

SHAPE: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "initializer_range": 0.2,
    "dtype": "bfloat16",
}
CONFIGS = {
    "llama": transformers.LlamaConfig(**SHAPE),
    # Its decoder layers are transformers' own, over our linear layers and our attention.
    "narrow": transformers.LlamaConfig(**{**SHAPE, "head_dim": 16}),
    "windows": transformers.Qwen3Config(
        **SHAPE,
        use_sliding_window=True,
        sliding_window=70,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "softcaps": transformers.Gemma2Config(
        **SHAPE, sliding_window=70, attn_logit_softcapping=5.0, final_logit_softcapping=4.0, query_pre_attn_scalar=16
    ),
}
# Model, quantization, and instructions of another CPU than this one.
CASES = [
    ("llama", None, None),
    ("llama", "int8", None),
    ("llama", "w8a8", None),
    ("narrow", None, None),
    ("windows", None, None),
    ("softcaps", None, None),
    ("llama", None, "tiles"),
    ("llama", "int8", "tiles"),
    ("llama", "w8a8", "tiles"),
]
PAGE_SIZE = 16
# More tokens than one part of the decode kernel has keys, and more than one block of the prompt kernel.
LENGTHS = (530, 75, 16)
TOKENS = [np.random.default_rng(i).integers(0, SHAPE["vocab_size"], n).tolist() for i, n in enumerate(LENGTHS)]
PAGES_EACH = -(-max(LENGTHS) // PAGE_SIZE)
GREEDY = ResolvedSampling(temperature=0.0)

# Tokens that each sequence computes in each step; 0: none.
Schedule = Sequence[Sequence[int]]


@dataclass
class Outcome:
    """Logits after each computed token, and the KV of all tokens, by sequence."""

    logits: list[list[torch.Tensor]] = field(default_factory=lambda: [[] for _ in LENGTHS])
    kv: list[list[torch.Tensor]] = field(default_factory=list)
    # Logprobs of the tokens behind the first, as for a prompt.
    scores: list[list[TokenLogprob]] = field(default_factory=lambda: [[] for _ in LENGTHS])


class ExactWorld:
    """One engine as a worker builds it, and the outcome of the reference schedule. Its pages remain for prefix hits."""

    def __init__(self, folder: Path, quantization: str | None) -> None:
        model = ModelConfig(model=str(folder), device="cpu", threads=1, quantization=quantization)
        num_pages = 2 * len(LENGTHS) * PAGES_EACH
        self.engine = build_engine(model, CacheConfig(page_size=PAGE_SIZE, max_total_tokens=num_pages * PAGE_SIZE))
        assert self.engine.loaded.dtype_name == "bfloat16"
        pages = np.random.default_rng(0).permutation(num_pages).astype(np.int32)
        self._rows = pages.reshape(-1, PAGES_EACH)
        self._table = self._rows.copy()
        self._runner = self.engine.runner(self._table)
        self._head, self._runner._head = self._runner._head, self._record
        self._recorded: list[torch.Tensor] = []
        steps = [[int(i == owner) for i in range(len(LENGTHS))] for owner, n in enumerate(LENGTHS) for _ in range(n)]
        self.reference = self.run(steps, first_row=0)

    def run(
        self, schedule: Schedule, *, hits: Sequence[int] = (0, 0, 0), threads: int = 1, first_row: int = len(LENGTHS)
    ) -> Outcome:
        """Run the steps of a schedule, and then all tokens that are left. `hits`: pages in the prefix cache."""
        torch.set_num_threads(threads)
        computed = [hit * PAGE_SIZE for hit in hits]
        for i, hit in enumerate(hits):
            self._table[first_row + i] = self._rows[first_row + i]
            self._table[first_row + i, :hit] = self._rows[i, :hit]
        outcome = Outcome()
        for step in chain(schedule, [LENGTHS]):
            counts = [min(n, LENGTHS[i] - computed[i]) for i, n in enumerate(step)]
            members = [i for i, n in enumerate(counts) if n]
            if not members:
                continue
            self._recorded.clear()
            plan = StepPlan(tuple(self._step_of(i, first_row + i, computed[i], counts[i]) for i in members))
            results = self._runner.execute(plan).requests
            logits = iter(torch.cat(self._recorded[-1:]))
            for i, result in zip(members, results, strict=True):
                assert not result.error
                outcome.logits[i] += [next(logits) for _ in range(counts[i])]
                outcome.scores[i] += result.input_logprobs
                computed[i] += counts[i]
        outcome.kv = [self._kv_of(first_row + i, n) for i, n in enumerate(LENGTHS)]
        return outcome

    def check(self, found: Outcome) -> None:
        for i, (expected, logits) in enumerate(zip(self.reference.logits, found.logits, strict=True)):
            first = len(expected) - len(logits)
            wrong = [first + j for j, row in enumerate(logits) if not torch.equal(row, expected[first + j])]
            assert not wrong, f"sequence {i}: logits differ after tokens {wrong[:5]}"
            assert found.scores[i] == self.reference.scores[i][-len(found.scores[i]) or LENGTHS[i] :]
            for expected_kv, kv in zip(self.reference.kv[i], found.kv[i], strict=True):
                assert torch.equal(kv, expected_kv), f"sequence {i}: the KV differs"

    def _record(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = self._head(hidden)
        self._recorded.append(logits.clone())
        return logits

    def _step_of(self, i: int, row: int, start: int, count: int) -> RequestStep:
        """Compute `count` tokens, with logits after each: all but the first are draft tokens."""
        tokens = TOKENS[i][start : start + count]
        spec = SampleSpec(
            GREEDY, start + 1, prompt_ids=TOKENS[i][: start + 1], output_ids=(), proposals=tuple(tokens[1:])
        )
        targets = TOKENS[i][start + 1 : start + count + 1]
        scored = InputLogprobSpec(0, targets, 3) if targets else None
        return RequestStep(f"r{i}", row, tokens, start, spec, scored)

    def _kv_of(self, row: int, num_tokens: int) -> list[torch.Tensor]:
        pages = torch.from_numpy(self._table[row].astype(np.int64))
        pool = self.engine.pool
        tensors = (*pool.keys.values(), *pool.values.values())
        return [tensor[pages].flatten(0, 1)[:num_tokens].clone() for tensor in tensors]


@pytest.fixture(scope="module", params=CASES, ids=lambda case: "-".join(filter(None, case)))
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ExactWorld:
    name, quantization, instructions = request.param
    folder = tmp_path_factory.mktemp("exact")
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(CONFIGS[name], dtype=torch.bfloat16).save_pretrained(folder)
    if instructions is None:
        return ExactWorld(folder, quantization)
    library = request.getfixturevalue("tiled_library")
    with patch.object(whole_model, "find_library", lambda *_, **__: library):
        tiled = ExactWorld(folder, quantization)
    assert tiled.engine.loaded.kernels is library
    return tiled


# Few runs use several threads, because these are slow on a busy machine.
@pytest.mark.parametrize(("chunk", "threads"), [(16, 1), (17, 1), (100, 2), (530, 1), (530, 4)])
def test_prompts_of_any_chunk_size_equal_tokens_one_by_one(world: ExactWorld, chunk: int, threads: int) -> None:
    world.check(world.run([[chunk] * len(LENGTHS)] * -(-max(LENGTHS) // chunk), threads=threads))


@pytest.mark.parametrize("threads", [2, 3])
def test_tokens_decoded_together_on_several_threads_equal_tokens_one_by_one(world: ExactWorld, threads: int) -> None:
    world.check(world.run([[1, 1, 1]] * 3, hits=(32, 3, 0), threads=threads))


@pytest.mark.parametrize("hits", [(1, 1, 0), (20, 4, 0), (33, 3, 0)])
@pytest.mark.parametrize("step", [(530, 75, 16), (1, 1, 1), (16, 5, 16)])
def test_a_prefix_hit_of_any_length_changes_no_bit(world: ExactWorld, hits: Sequence[int], step: Sequence[int]) -> None:
    world.check(world.run([step], hits=hits))


counts = st.one_of(st.sampled_from([0, 1]), st.integers(1, 20), st.integers(1, max(LENGTHS)))


@settings(max_examples=10)
@given(
    schedule=st.lists(st.tuples(counts, counts, counts), max_size=8),
    hits=st.tuples(*(st.integers(0, (n - 1) // PAGE_SIZE) for n in LENGTHS)),
    threads=st.sampled_from([1, 1, 2]),
)
def test_no_schedule_changes_a_bit(
    world: ExactWorld, schedule: list[tuple[int, ...]], hits: tuple[int, ...], threads: int
) -> None:
    world.check(world.run(schedule, hits=hits, threads=threads))


def test_the_worker_reports_that_its_bits_depend_on_the_sequence_only(world: ExactWorld) -> None:
    assert world.engine.batch_invariant
