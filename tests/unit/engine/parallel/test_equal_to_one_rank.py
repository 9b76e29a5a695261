"""A model over several ranks, each a process: tokens, logprobs and each rank's part of the KV are those of one rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from splitserve.core.layout import KVComponent
from splitserve.core.parallel import stage_layers
from support.rank_world import PAGE_SIZE, RANK_SHAPE, RankCase, RankOutcome, RankProcesses, RankWork, on_one_rank

COMMON: dict[str, Any] = {
    **RANK_SHAPE,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
TIED = {**COMMON, "tie_word_embeddings": True}
# Latent attention, a dense layer and then mixtures of experts.
DEEPSEEK: dict[str, Any] = {
    **COMMON,
    "num_key_value_heads": 8,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "moe_intermediate_size": 20,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 3,
    "topk_group": 2,
}
CONFIGS: dict[str, Callable[[], Any]] = {
    # With a bias wherever there can be one.
    "llama": lambda: transformers.LlamaConfig(**COMMON, head_dim=16, attention_bias=True, mlp_bias=True),
    "llama-tied": lambda: transformers.LlamaConfig(**TIED),
    "qwen3": lambda: transformers.Qwen3Config(**COMMON, head_dim=16),
    "mistral": lambda: transformers.MistralConfig(**COMMON, sliding_window=20),
    "gemma3": lambda: transformers.Gemma3TextConfig(
        **TIED,
        head_dim=16,
        query_pre_attn_scalar=16,
        sliding_window=20,
        layer_types=["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"],
        final_logit_softcapping=9.0,
    ),
    "mixtral": lambda: transformers.MixtralConfig(
        **COMMON, num_local_experts=4, num_experts_per_tok=2, sliding_window=None
    ),
    "qwen3-moe": lambda: transformers.Qwen3MoeConfig(
        **COMMON, head_dim=16, num_experts=6, num_experts_per_tok=3, moe_intermediate_size=20
    ),
    "deepseek-v2": lambda: transformers.DeepseekV2Config(
        **DEEPSEEK, q_lora_rank=20, topk_method="group_limited_greedy", attention_bias=True
    ),
    "deepseek-v2-lite": lambda: transformers.DeepseekV2Config(**DEEPSEEK, q_lora_rank=None),
    # Without a word on attention in its plan.
    "deepseek-v3": lambda: transformers.DeepseekV3Config(**DEEPSEEK, q_lora_rank=20, num_nextn_predict_layers=0),
    # Scales its embeddings in its own forward.
    "granite": lambda: transformers.GraniteConfig(**COMMON, embedding_multiplier=3.0, logits_scaling=2.0),
    # One matrix for queries, keys and values, so that every rank has all heads.
    "phi3": lambda: transformers.Phi3Config(**COMMON),
    "olmo2": lambda: transformers.Olmo2Config(**COMMON),
}
# In `make soak`: shapes with a model and a division that other shapes have.
SHAPES = [
    ("llama", 2, 1, ()),
    # Two ranks for each KV head.
    ("llama", 4, 1, ()),
    ("llama", 1, 2, (1, 3)),
    ("llama", 1, 4, ()),
    ("llama", 2, 2, (3, 1)),
    pytest.param("llama-tied", 2, 1, (), marks=pytest.mark.soak),
    ("llama-tied", 2, 2, ()),
    ("qwen3", 2, 1, ()),
    ("mistral", 1, 2, ()),
    ("gemma3", 2, 2, (1, 3)),
    pytest.param("gemma3", 1, 4, (), marks=pytest.mark.soak),
    ("mixtral", 2, 2, ()),
    ("qwen3-moe", 2, 1, ()),
    ("deepseek-v2", 2, 2, (1, 3)),
    ("deepseek-v2-lite", 2, 1, ()),
    pytest.param("deepseek-v3", 2, 1, (), marks=pytest.mark.soak),
    ("deepseek-v3", 4, 1, ()),
    ("granite", 1, 2, ()),
    ("phi3", 2, 1, ()),
    ("olmo2", 2, 1, ()),
]
LENGTHS = (1, 5, 16, 17, 40)


@pytest.fixture(scope="module")
def alone(folder: Callable[[str], Path]) -> Callable[[str], RankOutcome]:
    outcomes: dict[str, RankOutcome] = {}

    def run(name: str) -> RankOutcome:
        if name not in outcomes:
            outcomes[name] = on_one_rank(folder(name), WORK)
        return outcomes[name]

    return run


def _prompts() -> tuple[tuple[int, ...], ...]:
    rng = np.random.default_rng(1)
    return tuple(tuple(rng.integers(0, COMMON["vocab_size"], n).tolist()) for n in LENGTHS)


WORK = RankWork(prompts=_prompts())


def heads_of(outcome: RankOutcome, i: int) -> np.ndarray:
    """Component i: [pages, page_size, heads, head_dim]."""
    assert outcome.layout is not None
    component = outcome.layout.components[i]
    shape = (-1, PAGE_SIZE, component.num_heads, component.head_dim)
    return np.frombuffer(outcome.kv[i], np.float32).reshape(shape)


@pytest.mark.parametrize(("name", "tp_size", "pp_size", "pp_layers"), SHAPES)
def test_ranks_compute_what_one_rank_computes(
    name: str,
    tp_size: int,
    pp_size: int,
    pp_layers: tuple[int, ...],
    processes: RankProcesses,
    folder: Callable[[str], Path],
    alone: Callable[[str], RankOutcome],
    tmp_path: Path,
) -> None:
    case = RankCase(
        folder=str(folder(name)), tp_size=tp_size, pp_size=pp_size, pp_layers=pp_layers, work=in_micro_batches(pp_size)
    )
    check_equal(processes.run(case, tmp_path / "ranks"), alone(name), case)


@pytest.mark.parametrize(
    ("name", "tp_size", "pp_size"),
    [("llama", 4, 1), ("llama", 2, 2), ("gemma3", 1, 4), ("deepseek-v3", 2, 1)],
)
def test_requests_move_through_host_memory_on_all_ranks(
    name: str, tp_size: int, pp_size: int, processes: RankProcesses, folder: Callable[[str], Path], tmp_path: Path
) -> None:
    work = msgspec.structs.replace(WORK, moves=True)
    case = RankCase(folder=str(folder(name)), tp_size=tp_size, pp_size=pp_size, work=work)
    outcomes = processes.run(case, tmp_path / "ranks")
    check_equal(outcomes, on_one_rank(folder(name), work), case)
    sizes = [outcome.layout.bytes_per_page for outcome in outcomes if outcome.layout]
    assert [outcome.copied_bytes_per_page for outcome in outcomes] == [sum(sizes)] * case.num_ranks


# Six experts over four ranks: some have one more than others.
@pytest.mark.parametrize(
    ("name", "tp_size", "pp_size"),
    [("mixtral", 2, 1), ("qwen3-moe", 4, 1), ("deepseek-v2", 2, 1), ("deepseek-v3", 2, 2)],
)
def test_ranks_with_whole_experts_compute_what_one_rank_computes(
    name: str,
    tp_size: int,
    pp_size: int,
    processes: RankProcesses,
    folder: Callable[[str], Path],
    alone: Callable[[str], RankOutcome],
    tmp_path: Path,
) -> None:
    case = RankCase(
        folder=str(folder(name)),
        tp_size=tp_size,
        pp_size=pp_size,
        expert_parallel=True,
        work=in_micro_batches(pp_size),
    )
    outcomes = processes.run(case, tmp_path / "ranks")
    check_equal(outcomes, alone(name), case)
    cut = processes.run(msgspec.structs.replace(case, expert_parallel=False), tmp_path / "others")
    # Nothing is on two ranks that was on one before, and nothing is read that is not held.
    assert sum(o.num_parameters for o in outcomes) == sum(o.num_parameters for o in cut)
    assert sum(o.bytes_read for o in outcomes) == sum(o.bytes_read for o in cut)


@pytest.mark.parametrize("name", ["mixtral", "qwen3-moe", "deepseek-v2", "deepseek-v3"])
def test_ranks_that_meet_for_the_experts_alone_each_compute_their_own_requests(
    name: str,
    processes: RankProcesses,
    folder: Callable[[str], Path],
    alone: Callable[[str], RankOutcome],
    tmp_path: Path,
) -> None:
    # Of five prompts one rank has three, one none, and they take different numbers of steps.
    shares = ([0, 3, 4], [], [1], [2])
    works = tuple(msgspec.structs.replace(WORK, prompts=tuple(WORK.prompts[i] for i in share)) for share in shares)
    case = RankCase(folder=str(folder(name)), tp_size=4, work=WORK, own_work=works)
    outcomes, expected = processes.run(case, tmp_path / "ranks"), alone(name)
    assert [o.error for o in outcomes] == [""] * 4
    for outcome, share in zip(outcomes, shares, strict=True):
        assert outcome.tokens == [expected.tokens[i] for i in share]
        for ours, i in zip(outcome.logprobs, share, strict=True):
            np.testing.assert_allclose(ours, expected.logprobs[i], rtol=1e-4, atol=2e-4)
        for states, i in zip(outcome.hidden_states, share, strict=True):
            np.testing.assert_allclose(states, expected.hidden_states[i], rtol=1e-3, atol=1e-3)
        # All that a token leaves is where its request is served, and nothing of any other's.
        assert outcome.layout == expected.layout
        assert any(np.frombuffer(kv, np.float32).any() for kv in outcome.kv) == bool(share)
    # Experts are nowhere twice.
    experts = sum(o.num_parameters for o in outcomes) - 4 * (expected.num_parameters - num_in_experts(name))
    assert experts == num_in_experts(name)


# Two groups of two ranks. A group without requests takes part in the steps of the other.
@pytest.mark.parametrize(
    ("name", "shares"),
    [
        ("mixtral", ([0, 3, 4], [1, 2])),
        ("qwen3-moe", ([], [0, 1, 2, 3, 4])),
        ("deepseek-v2", ([0, 3, 4], [])),
        ("deepseek-v3", ([1, 2], [0, 3, 4])),
    ],
)
def test_groups_of_ranks_that_share_the_experts_each_compute_their_own_requests(
    name: str,
    shares: tuple[list[int], ...],
    processes: RankProcesses,
    folder: Callable[[str], Path],
    alone: Callable[[str], RankOutcome],
    tmp_path: Path,
) -> None:
    works = tuple(msgspec.structs.replace(WORK, prompts=tuple(WORK.prompts[i] for i in share)) for share in shares)
    case = RankCase(folder=str(folder(name)), tp_size=4, work=WORK, own_work=works)
    outcomes, expected = processes.run(case, tmp_path / "ranks"), alone(name)
    assert [o.error for o in outcomes] == [""] * 4
    for group, share in enumerate(shares):
        driver, follower = outcomes[2 * group : 2 * group + 2]
        assert driver.tokens == [expected.tokens[i] for i in share]
        for found, wanted in ((driver.logprobs, expected.logprobs), (driver.input_logprobs, expected.input_logprobs)):
            for ours, i in zip(found, share, strict=True):
                np.testing.assert_allclose(ours, wanted[i], rtol=1e-4, atol=2e-4)
        for outcome in (driver, follower):
            assert any(np.frombuffer(kv, np.float32).any() for kv in outcome.kv) == bool(share)
    check_heads_are_split(outcomes, expected)
    # Each group has all other weights, some of them on both of its ranks. Experts are nowhere twice.
    dense = expected.num_parameters - num_in_experts(name)
    held = sum(o.num_parameters for o in outcomes) - num_in_experts(name)
    assert 2 * dense <= held < 4 * dense


def check_heads_are_split(outcomes: Sequence[RankOutcome], expected: RankOutcome) -> None:
    """Each rank of a group of two has half of the KV heads, or all latents."""
    assert expected.layout is not None
    for index, outcome in enumerate(outcomes):
        assert outcome.layout is not None
        for ours, whole in zip(outcome.layout.components, expected.layout.components, strict=True):
            half = max(1, whole.num_heads // 2)
            first = (index % 2) * half if whole.num_heads > 1 else 0
            assert list(ours.heads) == list(range(first, first + half))


def num_in_experts(name: str) -> int:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(CONFIGS[name]())
    return sum(p.numel() for path, p in model.named_parameters() if ".experts." in path and "shared" not in path)


def test_experts_that_no_plan_distributes_are_refused(
    processes: RankProcesses, folder: Callable[[str], Path], tmp_path: Path
) -> None:
    case = RankCase(folder=str(folder("llama")), tp_size=2, expert_parallel=True, work=WORK)
    for outcome in processes.run(case, tmp_path / "ranks"):
        assert "no ep_plan that distributes its experts" in outcome.error


def check_equal(outcomes: Sequence[RankOutcome], expected: RankOutcome, case: RankCase) -> None:
    """Tokens, logprobs, hidden states, and each rank's KV."""
    tp_size, pp_size, pp_layers = case.tp_size, case.pp_size, case.pp_layers
    assert [o.error for o in outcomes] == [""] * case.num_ranks
    driver = outcomes[(pp_size - 1) * tp_size]
    assert driver.tokens == expected.tokens
    for found, wanted in ((driver.logprobs, expected.logprobs), (driver.input_logprobs, expected.input_logprobs)):
        for ours, theirs in zip(found, wanted, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=2e-4)
    for ours, theirs in zip(driver.hidden_states, expected.hidden_states, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-3)
    whole = _by_name(expected)
    for index, outcome in enumerate(outcomes):
        assert outcome.layout is not None
        stage = stage_layers(COMMON["num_hidden_layers"], pp_size, pp_layers)[index // tp_size]
        assert {c.layer for c in outcome.layout.components} == set(stage)
        for i, component in enumerate(outcome.layout.components):
            wanted = whole[component.name, component.layer]
            assert (component.total_heads, component.window) == (wanted[0].num_heads, wanted[0].window)
            np.testing.assert_allclose(
                heads_of(outcome, i), wanted[1][:, :, list(component.heads)], rtol=1e-3, atol=1e-3
            )


def test_each_rank_reads_its_own_weights_and_no_others(
    processes: RankProcesses, folder: Callable[[str], Path], alone: Callable[[str], RankOutcome], tmp_path: Path
) -> None:
    """The file has 4 bytes a parameter."""
    for number, (name, tp_size, pp_size) in enumerate([("llama", 2, 2), ("mixtral", 2, 1), ("llama-tied", 2, 2)]):
        case = RankCase(folder=str(folder(name)), tp_size=tp_size, pp_size=pp_size, work=RankWork(prompts=((5, 6, 7),)))
        outcomes = processes.run(case, tmp_path / f"ranks{number}")
        assert [o.bytes_read for o in outcomes] == [4 * o.num_parameters for o in outcomes]
        share = alone(name).num_parameters / case.num_ranks
        # All ranks have norms and biases. Only the first stage has the embedding, and only the last one the head.
        assert max(o.num_parameters for o in outcomes) < 1.25 * share


@pytest.mark.parametrize(("tp_size", "pp_size", "dying_rank"), [(2, 1, 1), (1, 2, 0)])
def test_the_end_of_a_rank_ends_the_steps_of_all(
    tp_size: int, pp_size: int, dying_rank: int, folder: Callable[[str], Path], tmp_path: Path
) -> None:
    case = RankCase(
        folder=str(folder("llama")), tp_size=tp_size, pp_size=pp_size, work=in_micro_batches(2), dying_rank=dying_rank
    )
    with RankProcesses(case.num_ranks) as started:
        outcomes = started.run(case, tmp_path / "ranks")
    assert outcomes[dying_rank].error == "dead"
    assert outcomes[1 - dying_rank].error.startswith("RanksLostError: ")


def test_the_end_of_a_follower_ends_the_steps_of_all_groups(folder: Callable[[str], Path], tmp_path: Path) -> None:
    case = RankCase(folder=str(folder("mixtral")), tp_size=4, work=WORK, own_work=(WORK, WORK), dying_rank=3)
    with RankProcesses(case.num_ranks) as started:
        outcomes = started.run(case, tmp_path / "ranks")
    assert outcomes[3].error == "dead"
    # Drivers cannot continue. The other follower fails in its step, or its driver ends it.
    assert [o.error.partition(":")[0] for o in outcomes[:3:2]] == ["RanksLostError"] * 2
    assert outcomes[1].error.partition(":")[0] in ("", "EngineError", "RanksLostError")


def test_the_end_of_a_rank_ends_a_copy_on_all(folder: Callable[[str], Path], tmp_path: Path) -> None:
    work = msgspec.structs.replace(WORK, moves=True)
    # It dies in place of its vote about the copy that follows the first step.
    case = RankCase(folder=str(folder("llama")), tp_size=2, work=work, dying_rank=1, num_orders_before_death=1)
    with RankProcesses(case.num_ranks) as started:
        outcomes = started.run(case, tmp_path / "ranks")
    assert [outcome.error.split(":")[0] for outcome in outcomes] == ["RanksLostError", "dead"]


def test_heads_that_do_not_divide_are_refused_on_every_rank(
    processes: RankProcesses, folder: Callable[[str], Path], tmp_path: Path
) -> None:
    outcomes = processes.run(RankCase(folder=str(folder("llama")), tp_size=3, work=WORK), tmp_path / "ranks")
    assert len(outcomes) == 3
    assert all("8 query heads and 2 KV heads" in o.error and "1, 2, 4, 8." in o.error for o in outcomes)


def in_micro_batches(number: int) -> RankWork:
    return RankWork(prompts=WORK.prompts, num_micro_batches=number)


def _by_name(outcome: RankOutcome) -> dict[tuple[str, int], tuple[KVComponent, np.ndarray]]:
    assert outcome.layout is not None
    return {(c.name, c.layer): (c, heads_of(outcome, i)) for i, c in enumerate(outcome.layout.components)}
