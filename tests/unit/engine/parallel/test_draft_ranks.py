"""A draft model beside a model over several ranks: outputs of one rank without it, and no wrong proposal of its own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from msgspec.structs import replace
from transformers import AutoModelForCausalLM

from splitserve.core.layout import DRAFT_PREFIX
from support.rank_world import RANK_SHAPE, RankCase, RankOutcome, RankProcesses, RankWork, on_one_rank

NUM_RANKS = 4
COMMON: dict[str, Any] = {**RANK_SHAPE, "head_dim": 16}
CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaConfig(**COMMON),
    "small": lambda: transformers.Qwen3Config(**(COMMON | {"num_hidden_layers": 1})),
    # No two ranks can share these heads.
    "three-heads": lambda: transformers.LlamaConfig(
        **(COMMON | {"num_hidden_layers": 1, "num_attention_heads": 3, "num_key_value_heads": 3, "hidden_size": 48})
    ),
    "mixtral": lambda: transformers.MixtralConfig(
        **COMMON, num_local_experts=4, num_experts_per_tok=2, sliding_window=None
    ),
}
LENGTHS = (1, 5, 17, 40)


def work(temperature: float = 0.0, num_micro_batches: int = 1) -> RankWork:
    rng = np.random.default_rng(1)
    prompts = tuple(tuple(rng.integers(0, COMMON["vocab_size"], n).tolist()) for n in LENGTHS)
    return RankWork(prompts=prompts, temperature=temperature, num_micro_batches=num_micro_batches)


@pytest.fixture(scope="module")
def alone(folder: Callable[[str], Path]) -> Callable[[str, float], RankOutcome]:
    """Return the outcome of one rank without a draft model."""
    outcomes: dict[tuple[str, float], RankOutcome] = {}

    def run(name: str, temperature: float) -> RankOutcome:
        if (name, temperature) not in outcomes:
            outcomes[name, temperature] = on_one_rank(folder(name), work(temperature))
        return outcomes[name, temperature]

    return run


def draft_heads(outcome: RankOutcome) -> int:
    """Return how many KV heads of each of the draft's layers are in this rank's pages."""
    assert outcome.layout is not None
    return max((c.num_heads for c in outcome.layout.components if c.name.startswith(DRAFT_PREFIX)), default=0)


def check_equal(driver: RankOutcome, expected: RankOutcome) -> None:
    assert driver.tokens == expected.tokens
    for ours, theirs in zip(driver.logprobs, expected.logprobs, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=2e-4)


# Draft model, sizes, and the KV heads of the draft model on each rank.
SHAPES = [
    ("llama", 2, 1, [1, 1]),
    # Two ranks for each KV head.
    ("llama", 4, 1, [1, 1, 1, 1]),
    ("small", 2, 1, [1, 1]),
    ("three-heads", 2, 1, [3, 0]),
    # Micro-batches.
    ("llama", 1, 2, [0, 2]),
    ("llama", 2, 2, [0, 0, 2, 0]),
    ("small", 1, 2, [0, 2]),
]


# Every other shape samples, and the rest is greedy. `make soak` has the other half.
@pytest.mark.parametrize(
    ("draft", "tp_size", "pp_size", "held", "temperature"),
    [
        pytest.param(*shape, temperature, marks=() if (number % 2 == 1) == (temperature > 0) else pytest.mark.soak)
        for number, shape in enumerate(SHAPES)
        for temperature in (0.0, 1.0)
    ],
)
def test_ranks_with_a_draft_model_sample_what_one_rank_does_without(
    draft: str,
    tp_size: int,
    pp_size: int,
    held: list[int],
    temperature: float,
    processes: RankProcesses,
    folder: Callable[[str], Path],
    alone: Callable[[str, float], RankOutcome],
    tmp_path: Path,
) -> None:
    case = RankCase(
        folder=str(folder("llama")),
        draft_folder=str(folder(draft)),
        tp_size=tp_size,
        pp_size=pp_size,
        work=replace(work(temperature, pp_size), num_draft_tokens=3),
    )
    outcomes = processes.run(case, tmp_path / "ranks")
    assert [o.error for o in outcomes] == [""] * case.num_ranks
    driver = outcomes[(pp_size - 1) * tp_size]
    check_equal(driver, alone("llama", temperature))
    assert [draft_heads(o) for o in outcomes] == held
    assert driver.num_proposed > 0
    if draft == "llama":
        # Its own draft is wrong only if some of the draft's KV is.
        assert driver.num_accepted == driver.num_proposed


@pytest.mark.parametrize("draft", ["mixtral", "small"])
def test_each_rank_of_data_parallel_attention_has_the_draft_model(
    draft: str,
    processes: RankProcesses,
    folder: Callable[[str], Path],
    alone: Callable[[str, float], RankOutcome],
    tmp_path: Path,
) -> None:
    shares = ([0, 3], [], [1], [2])
    whole = replace(work(), num_draft_tokens=3)
    works = tuple(replace(whole, prompts=tuple(whole.prompts[i] for i in share)) for share in shares)
    case = RankCase(
        folder=str(folder("mixtral")), draft_folder=str(folder(draft)), tp_size=NUM_RANKS, work=whole, own_work=works
    )
    outcomes, expected = processes.run(case, tmp_path / "ranks"), alone("mixtral", 0.0)
    assert [o.error for o in outcomes] == [""] * NUM_RANKS
    for outcome, share in zip(outcomes, shares, strict=True):
        assert outcome.tokens == [expected.tokens[i] for i in share]
        assert (outcome.num_proposed > 0) == bool(share)
        if draft == "mixtral":
            assert outcome.num_accepted == outcome.num_proposed


def test_the_driver_of_each_group_has_the_draft_model(
    processes: RankProcesses,
    folder: Callable[[str], Path],
    alone: Callable[[str, float], RankOutcome],
    tmp_path: Path,
) -> None:
    """Two groups of two tensor parallel ranks share the experts."""
    shares = ([0, 3, 2], [1])
    whole = replace(work(), num_draft_tokens=3)
    works = tuple(replace(whole, prompts=tuple(whole.prompts[i] for i in share)) for share in shares)
    case = RankCase(
        folder=str(folder("mixtral")),
        draft_folder=str(folder("mixtral")),
        tp_size=NUM_RANKS,
        work=whole,
        own_work=works,
    )
    outcomes, expected = processes.run(case, tmp_path / "ranks"), alone("mixtral", 0.0)
    assert [o.error for o in outcomes] == [""] * NUM_RANKS
    assert [draft_heads(o) for o in outcomes] == [2, 0, 2, 0]
    for outcome, share in zip(outcomes[::2], shares, strict=True):
        assert outcome.tokens == [expected.tokens[i] for i in share]
        assert outcome.num_accepted == outcome.num_proposed > 0


def test_a_draft_model_that_does_not_fit_is_refused_with_its_reason(
    processes: RankProcesses, folder: Callable[[str], Path], tmp_path: Path
) -> None:
    config = transformers.LlamaConfig(**(COMMON | {"vocab_size": 132}))
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "other")
    case = RankCase(folder=str(folder("llama")), draft_folder=str(tmp_path / "other"), tp_size=2, work=work())
    outcomes = processes.run(case, tmp_path / "ranks")
    assert all("has a vocabulary of 132 tokens" in o.error for o in outcomes)
