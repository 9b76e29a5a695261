"""Who holds what of a tensor, of the heads, of the layers: arithmetic, and models without weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from accelerate import init_empty_weights
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from splitserve.core.errors import ConfigError
from splitserve.core.parallel import ParallelRank
from splitserve.engine.fit import Heads
from splitserve.engine.parallel.plan import cut_weights
from splitserve.engine.parallel.shards import STYLES, WeightShard, cut_of, even_range, even_sizes
from splitserve.engine.parallel.stages import cut_stage

SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 72,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 8,
}


def empty(config: Any) -> Any:
    with init_empty_weights(include_buffers=False):
        return AutoModelForCausalLM.from_config(config)


@given(st.integers(1, 300), st.integers(1, 16))
def test_even_shares_cover_everything_and_differ_by_one_at_most(size: int, num_ranks: int) -> None:
    shares = [even_range(size, rank, num_ranks) for rank in range(num_ranks)]
    assert [i for share in shares for i in share] == list(range(size))
    assert even_sizes(size, num_ranks) == [len(share) for share in shares]
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


@given(st.integers(1, 48), st.integers(1, 48), st.integers(1, 64))
def test_heads_that_fit_are_all_held_and_each_rank_has_those_its_queries_read(
    num_kv: int, group: int, tp_size: int
) -> None:
    heads = Heads(num_kv * group, num_kv)
    if not heads.fits(tp_size):
        return
    queries = [heads.query(rank, tp_size) for rank in range(tp_size)]
    assert [q for held in queries for q in held] == list(range(heads.num_query))
    for rank, held in enumerate(queries):
        kv = heads.kv(rank, tp_size)
        assert {q // group for q in held} == set(kv)
        # The attention's own rule, over what is here, finds the same head.
        assert [kv.start + i // (len(held) // len(kv)) for i in range(len(held))] == [q // group for q in held]


@pytest.mark.parametrize(("tp_size", "fits"), [(1, True), (2, False), (3, True), (6, False), (9, True), (18, False)])
def test_smollm2_has_nine_query_heads_and_three_kv_heads(tp_size: int, fits: bool) -> None:
    assert Heads(9, 3).fits(tp_size) is fits


def test_a_refusal_of_heads_names_the_numbers_and_the_sizes_that_would_do() -> None:
    with pytest.raises(ConfigError, match=r"9 query heads and 3 KV heads.*each of 2 ranks.*would do: 1, 3, 9\."):
        cut_weights(empty(transformers.LlamaConfig(**SMALL)), ParallelRank(tp_size=2), "m")


def test_more_ranks_than_kv_heads_hold_the_same_ones() -> None:
    held = [
        cut_weights(empty(transformers.LlamaConfig(**SMALL)), ParallelRank(tp_rank=rank, tp_size=9), "m").kv_heads[0]
        for rank in range(9)
    ]
    assert [list(heads.held) for heads in held] == [[0], [0], [0], [1], [1], [1], [2], [2], [2]]
    assert {heads.total for heads in held} == {3}


@pytest.mark.parametrize("style", ["colwise", "rowwise", "packed_colwise"])
@given(num_ranks=st.integers(1, 5), half=st.integers(5, 20))
def test_the_parts_of_all_ranks_are_the_whole(style: str, num_ranks: int, half: int) -> None:
    whole = torch.randn(3, 2 * half, 2 * half, generator=torch.Generator().manual_seed(0))
    cuts = [cut_of(STYLES[style], whole, rank, num_ranks) for rank in range(num_ranks)]
    parts = [cut.of(whole, whole.ndim) for cut in cuts if cut]
    assert [part.shape for part in parts] == [cut.shape(whole.shape) for cut in cuts if cut]
    if style == "packed_colwise":
        parts = [part for side in range(2) for part in (p.chunk(2, dim=-2)[side] for p in parts)]
    assert torch.equal(torch.cat(parts, dim=-1 if style == "rowwise" else -2), whole)


@given(num_ranks=st.integers(1, 5), size=st.integers(5, 20))
def test_a_cut_of_joined_tensors_is_the_join_of_their_cuts(num_ranks: int, size: int) -> None:
    gate, up = torch.randn(2, size, 4, generator=torch.Generator().manual_seed(0))
    packed = torch.cat([gate, up])
    for rank in range(num_ranks):
        cut = cut_of(STYLES["packed_colwise"], packed, rank, num_ranks)
        assert cut is not None
        pieces = [cut.of_source(i, size).of(source, 2) for i, source in enumerate((gate, up))]
        assert torch.equal(torch.cat(pieces), cut.of(packed, 2))


def test_a_bias_that_is_added_to_a_sum_is_the_first_ranks() -> None:
    config = transformers.LlamaConfig(**SMALL, attention_bias=True)
    models = [empty(config) for _ in range(3)]
    shards = [cut_weights(m, ParallelRank(tp_rank=i, tp_size=3), "m") for i, m in enumerate(models)]
    layers = [m.model.layers[0].self_attn for m in models]
    assert [layer.o_proj.bias is not None for layer in layers] == [True, False, False]
    assert [layer.q_proj.bias.shape for layer in layers] == [(24,), (24,), (24,)]
    assert shards[1].cuts["model.layers.0.self_attn.q_proj.bias"] == WeightShard(-1, (range(24, 48),))


def test_a_stage_has_its_layers_alone() -> None:
    model = empty(transformers.LlamaConfig(**SMALL))
    cut_stage(model, range(1, 3), ParallelRank(pp_rank=1, pp_size=3), "m")
    assert {name.split(".")[2] for name, _ in model.named_parameters()} == {"1", "2"}
    assert {name.split(".")[1] for name, _ in model.named_parameters()} == {"layers"}


@pytest.mark.parametrize(("pp_rank", "layers", "ends"), [(0, range(2), {"embed_tokens"}), (1, range(2, 4), {"norm"})])
def test_the_first_stage_embeds_and_the_last_has_norm_and_head(pp_rank: int, layers: range, ends: set[str]) -> None:
    model = empty(transformers.LlamaConfig(**SMALL))
    cut_stage(model, layers, ParallelRank(pp_rank=pp_rank, pp_size=2), "m")
    names = [name for name, _ in model.named_parameters()]
    assert {n.split(".")[1] for n in names if n.startswith("model.")} == {"layers", *ends}
    assert ("lm_head.weight" in names) == (pp_rank == 1)


def test_a_model_without_a_plan_is_refused() -> None:
    config = transformers.GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4)
    with pytest.raises(ConfigError, match="no tp_plan"):
        cut_weights(empty(config), ParallelRank(tp_size=2), "m")
    with pytest.raises(ConfigError, match="no pp_plan"):
        cut_stage(empty(config), range(1), ParallelRank(pp_size=2), "m")


def test_a_plan_with_an_unknown_word_is_refused() -> None:
    model = empty(transformers.LlamaConfig(**SMALL))
    model._tp_plan["model.layers.*.mlp.up_proj"] = "diagonal"
    with pytest.raises(ConfigError, match=r"'diagonal' for model\.layers\.0\.mlp\.up_proj"):
        cut_weights(model, ParallelRank(tp_size=3), "m")


def test_attention_whose_heads_are_not_known_is_refused() -> None:
    config = transformers.GPTNeoXConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4
    )
    with pytest.raises(ConfigError, match="GPTNeoXAttention has heads that are not known"):
        cut_weights(empty(config), ParallelRank(tp_size=2), "m")


@pytest.mark.parametrize("rank", [0, 7])
def test_what_is_narrower_than_there_are_ranks_is_refused(rank: int) -> None:
    config = transformers.LlamaConfig(**{**SMALL, "num_attention_heads": 8, "num_key_value_heads": 1, "vocab_size": 6})
    with pytest.raises(ConfigError, match=r"is only 6 wide, and there are 8"):
        cut_weights(empty(config), ParallelRank(tp_rank=rank, tp_size=8), "m")
