"""A draft head beside a model over several ranks: outputs without it, and the acceptance of one rank."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from msgspec.structs import replace

from splitserve.core.layout import DRAFT_PREFIX
from splitserve.core.memory import MemoryTag
from splitserve.engine.parallel.load import load_ends
from splitserve.engine.probe import LanguageHead
from support.draft_heads import TaughtModel
from support.rank_world import (
    RankCase,
    RankChange,
    RankOutcome,
    RankProcesses,
    RankWork,
    on_one_rank,
    save_random_model,
)
from support.tiny_models import SMALL_SHAPE

NUM_RANKS = 4
LENGTHS = (1, 5, 17, 40)
NUM_DRAFT_TOKENS = 3
# By chance, one proposal of 261 is right.
FAR_ABOVE_CHANCE = 0.15


def work_of(temperature: float, num_micro_batches: int = 1) -> RankWork:
    rng = np.random.default_rng(1)
    prompts = tuple(tuple(rng.integers(0, 250, n).tolist()) for n in LENGTHS)
    return RankWork(prompts=prompts, num_new=24, temperature=temperature, num_micro_batches=num_micro_batches)


@pytest.fixture(scope="module", params=["taught_with_eagle3", "taught_with_mtp"])
def taught(request: pytest.FixtureRequest) -> TaughtModel:
    found: TaughtModel = request.getfixturevalue(request.param)
    return found


@pytest.fixture(scope="module")
def alone(taught: TaughtModel) -> Callable[[float, int], RankOutcome]:
    """Return the outcome of one rank with this number of draft tokens. 0: it has no head."""
    outcomes: dict[tuple[float, int], RankOutcome] = {}

    def run(temperature: float, num_draft_tokens: int) -> RankOutcome:
        key = temperature, num_draft_tokens
        if key not in outcomes:
            work = replace(work_of(temperature), num_draft_tokens=num_draft_tokens)
            head = {"draft_folder": taught.head, "draft_head": taught.algorithm} if num_draft_tokens else {}
            outcomes[key] = on_one_rank(taught.model, work, **head)
        return outcomes[key]

    return run


@pytest.mark.parametrize(
    "config",
    [
        transformers.LlamaConfig(**SMALL_SHAPE, tie_word_embeddings=True),
        transformers.Gemma3TextConfig(**SMALL_SHAPE, query_pre_attn_scalar=16, final_logit_softcapping=5.0),
        transformers.GraniteConfig(**SMALL_SHAPE, embedding_multiplier=3.0, logits_scaling=2.0),
    ],
    ids=lambda config: config.model_type,
)
def test_whole_ends_of_a_model_compute_what_the_model_does(
    config: transformers.PreTrainedConfig, tmp_path: Path
) -> None:
    save_random_model(config, tmp_path)
    whole = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    token_ids, hidden = torch.arange(50), torch.randn(5, config.hidden_size)
    expected = whole.get_input_embeddings()(token_ids), LanguageHead(whole)(hidden)
    for has_head in (True, False):
        ends = load_ends(tmp_path, whole, torch.float32, torch.device("cpu"), has_head=has_head)
        assert torch.equal(ends.get_input_embeddings()(token_ids), expected[0])
        num_parameters = sum(p.numel() for p in ends.parameters())
        assert num_parameters <= (1 + has_head) * config.vocab_size * config.hidden_size + config.hidden_size
    assert torch.equal(
        LanguageHead(load_ends(tmp_path, whole, torch.float32, hidden.device, has_head=True))(hidden), expected[1]
    )


def case_of(taught: TaughtModel, work: RankWork, tp_size: int, pp_size: int) -> RankCase:
    return RankCase(
        folder=str(taught.model),
        draft_folder=None if taught.head is None else str(taught.head),
        draft_head=taught.algorithm,
        tp_size=tp_size,
        pp_size=pp_size,
        work=replace(work, num_draft_tokens=NUM_DRAFT_TOKENS),
    )


def has_head(outcome: RankOutcome) -> bool:
    assert outcome.layout is not None
    return any(c.name.startswith(DRAFT_PREFIX) for c in outcome.layout.components)


# With three stages an EAGLE-3 head reads a layer of each.
@pytest.mark.parametrize(
    ("tp_size", "pp_size", "temperature"),
    [
        (2, 1, 0.0),
        (1, 2, 0.7),
        (1, 3, 0.0),
        (2, 2, 0.7),
        # Only the last stage samples, and in the same way with any number of stages.
        *(pytest.param(*case, marks=pytest.mark.soak) for case in ((2, 1, 0.7), (1, 2, 0.0), (1, 3, 0.7), (2, 2, 0.0))),
    ],
)
def test_ranks_sample_what_one_rank_does_and_accept_as_many_proposals(
    tp_size: int,
    pp_size: int,
    temperature: float,
    taught: TaughtModel,
    alone: Callable[[float, int], RankOutcome],
    processes: RankProcesses,
    tmp_path: Path,
) -> None:
    case = case_of(taught, work_of(temperature, pp_size), tp_size, pp_size)
    outcomes = processes.run(case, tmp_path / "ranks")
    assert [o.error for o in outcomes] == [""] * case.num_ranks
    index = (pp_size - 1) * tp_size
    assert [has_head(o) for o in outcomes] == [i == index for i in range(case.num_ranks)]
    driver, with_head = outcomes[index], alone(temperature, NUM_DRAFT_TOKENS)
    assert driver.tokens == alone(temperature, 0).tokens == with_head.tokens
    assert (driver.num_accepted, driver.num_proposed) == (with_head.num_accepted, with_head.num_proposed)
    assert driver.num_accepted > FAR_ABOVE_CHANCE * driver.num_proposed


@pytest.mark.parametrize(("tp_size", "pp_size"), [(2, 1), (1, 2)])
def test_a_head_reads_the_states_of_weights_that_replace_others(
    tp_size: int,
    pp_size: int,
    taught: TaughtModel,
    alone: Callable[[float, int], RankOutcome],
    processes: RankProcesses,
    tmp_path: Path,
) -> None:
    changes = (
        RankChange(tags=frozenset(MemoryTag)),
        RankChange(model=str(taught.model)),
        RankChange(tags=frozenset({MemoryTag.WEIGHTS})),
    )
    case = replace(case_of(taught, work_of(0.0), tp_size, pp_size), changes=changes)
    outcomes = processes.run(case, tmp_path / "ranks")
    assert [o.error for o in outcomes] == [""] * case.num_ranks
    driver, expected = outcomes[(pp_size - 1) * tp_size], alone(0.0, NUM_DRAFT_TOKENS)
    assert driver.refusals == [""] * len(changes)
    assert driver.tokens == expected.tokens
    assert (driver.num_accepted, driver.num_proposed) == (expected.num_accepted, expected.num_proposed)


@pytest.mark.parametrize("shares", [([0, 3], [], [1], [2]), ([0, 3, 2], [1])], ids=["one-rank-each", "two-ranks-each"])
def test_the_driver_of_each_group_of_data_parallel_attention_has_the_head(
    shares: tuple[list[int], ...],
    taught_with_mtp: TaughtModel,
    processes: RankProcesses,
    tmp_path: Path,
) -> None:
    work = replace(work_of(0.0), num_draft_tokens=NUM_DRAFT_TOKENS)
    works = tuple(replace(work, prompts=tuple(work.prompts[i] for i in share)) for share in shares)
    case = replace(case_of(taught_with_mtp, work, NUM_RANKS, 1), own_work=works)
    outcomes = processes.run(case, tmp_path / "ranks")
    assert [o.error for o in outcomes] == [""] * NUM_RANKS
    size = NUM_RANKS // len(shares)
    assert [has_head(o) for o in outcomes] == [i % size == 0 for i in range(NUM_RANKS)]
    for outcome, own in zip(outcomes[::size], works, strict=True):
        expected = on_one_rank(taught_with_mtp.model, own, draft_head=taught_with_mtp.algorithm)
        assert outcome.tokens == expected.tokens
        assert (outcome.num_accepted, outcome.num_proposed) == (expected.num_accepted, expected.num_proposed)
        assert outcome.num_accepted >= FAR_ABOVE_CHANCE * outcome.num_proposed
