"""Packed experts, their routers and gated MLPs: results of transformers' modules, and equal bits for equal tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE
from transformers.models.gemma3.modeling_gemma3 import Gemma3MLP
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from splitserve.engine.kernels.experts import PackedExperts, RouterWeight, are_known_experts, use_router
from splitserve.engine.kernels.gated import PackedGatedMLP, is_gated_mlp
from splitserve.engine.kernels.library import KernelLibrary, find_library
from splitserve.engine.kernels.weights import Kind, PackedScores, Scratch
from support.kernel_layers import use_kernels

pytestmark = pytest.mark.skipif(find_library() is None, reason="installed without a C compiler")

SIZE, NUM_EXPERTS = 72, 5
# Largest difference relative to the largest output.
TOLERANCES = {Kind.BF16: 0.02, Kind.INT8: 0.03, Kind.W8A8: 0.06}


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def filled(module: Any) -> Any:
    for i, parameter in enumerate(module.parameters()):
        parameter.data = random(*parameter.shape, seed=i) * 0.3
    return module.bfloat16().eval().requires_grad_(False)


def qwen3_block(**changes: Any) -> Any:
    sizes = {"num_experts": NUM_EXPERTS, "num_experts_per_tok": 2, "moe_intermediate_size": 40, "norm_topk_prob": True}
    config = transformers.Qwen3MoeConfig(hidden_size=SIZE, **sizes | changes)
    config._experts_implementation = "eager"
    return filled(Qwen3MoeSparseMoeBlock(config))


def deepseek_block() -> Any:
    config = transformers.DeepseekV3Config(
        hidden_size=SIZE,
        moe_intermediate_size=24,
        n_routed_experts=12,
        num_experts_per_tok=3,
        n_group=4,
        topk_group=2,
        n_shared_experts=1,
    )
    config._experts_implementation = "eager"
    return filled(DeepseekV3MoE(config))


def packed(experts: Any, library: KernelLibrary, kind: Kind = Kind.BF16) -> PackedExperts:
    return PackedExperts(experts, library, Scratch(), Scratch(), kind)


def choices(num_tokens: int, num_chosen: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    chosen = torch.stack([torch.randperm(NUM_EXPERTS, generator=generator)[:num_chosen] for _ in range(num_tokens)])
    return chosen, torch.rand(num_tokens, num_chosen, generator=generator)


def weighted_sum(experts: Any, states: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The experts' result in float32, by definition."""
    rows = []
    for x, own, by in zip(states.float(), chosen.tolist(), weights.tolist(), strict=True):
        row = torch.zeros(SIZE)
        for expert, weight in zip(own, by, strict=True):
            if 0 <= expert < NUM_EXPERTS:
                gate, up = (x @ experts.gate_up_proj[expert].float().T).chunk(2)
                row += weight * ((torch.nn.functional.silu(gate) * up) @ experts.down_proj[expert].float().T)
        rows.append(row)
    return torch.stack(rows)


def assert_alike(found: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    assert found.shape == expected.shape
    difference = float((found.float() - expected.float()).abs().max())
    assert difference <= tolerance * float(expected.float().abs().max())


@pytest.mark.parametrize("kind", TOLERANCES)
@pytest.mark.parametrize("num_tokens", [1, 7, 64])
def test_packed_experts_are_a_weighted_sum_of_mlps(library: KernelLibrary, kind: Kind, num_tokens: int) -> None:
    experts, states = qwen3_block().experts, random(num_tokens, SIZE)
    chosen, weights = choices(num_tokens)
    found = packed(experts, library, kind)(states, chosen, weights)
    assert_alike(found, weighted_sum(experts, states, chosen, weights), TOLERANCES[kind])


def test_numbers_of_no_expert_add_nothing(library: KernelLibrary) -> None:
    experts, states = qwen3_block().experts, random(3, SIZE)
    chosen = torch.tensor([[1, NUM_EXPERTS], [-1, 4], [NUM_EXPERTS, -1]])
    weights = torch.tensor([[0.5, torch.nan], [torch.nan, 2.0], [1.0, 1.0]])
    found = packed(experts, library)(states, chosen, weights)
    assert_alike(found, weighted_sum(experts, states, chosen, weights), 0.02)
    assert not found[2].any()


@pytest.mark.parametrize("kind", TOLERANCES)
def test_the_result_of_a_token_does_not_depend_on_other_tokens(library: KernelLibrary, kind: Kind) -> None:
    experts, states = packed(qwen3_block().experts, library, kind), random(64, SIZE)
    chosen, weights = choices(64)
    alone = torch.cat([experts(states[i : i + 1], chosen[i : i + 1], weights[i : i + 1]) for i in range(64)])
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        for rows in (2, 3, 13, 64):
            assert torch.equal(experts(states[:rows], chosen[:rows], weights[:rows]), alone[:rows])


@pytest.mark.parametrize("block", [qwen3_block, deepseek_block])
@pytest.mark.parametrize("kind", TOLERANCES)
def test_a_model_s_block_is_replaced_and_returns_the_same(block: Any, kind: Kind) -> None:
    model, states = torch.nn.ModuleDict({"mlp": block()}), random(1, 50, SIZE)
    expected = model["mlp"](states)
    found = find_library()
    assert found is not None
    use_kernels(model, [], found, kind)
    assert isinstance(model["mlp"].experts, PackedExperts)
    assert isinstance(model["mlp"].gate.weight, RouterWeight)
    assert_alike(model["mlp"](states), expected, 0.2 if kind is Kind.W8A8 else 0.05)


@pytest.mark.parametrize("block", [qwen3_block, deepseek_block])
def test_a_router_s_choice_does_not_depend_on_other_tokens(library: KernelLibrary, block: Any) -> None:
    router = block().gate
    states = random(3000, SIZE)
    logits, weights, chosen = router(states)
    assert use_router(router, library, Scratch())
    found = router(states)
    torch.testing.assert_close(found[0], logits, rtol=0.01, atol=0.01)
    assert [values.dtype for values in found] == [logits.dtype, weights.dtype, chosen.dtype]
    assert (found[2].sort().values == chosen.sort().values).float().mean() > 0.95
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        for rows in (1, 2, 7, 64, 65, 2049):
            for part, whole in zip(router(states[:rows]), found, strict=True):
                assert torch.equal(part, whole[:rows])


def test_a_router_in_float32_keeps_the_exactness_of_float32(library: KernelLibrary) -> None:
    weight, states = random(12, SIZE), random(9, SIZE)
    found = PackedScores(library, Scratch(), weight)(states.float())
    assert found.dtype is torch.float32
    torch.testing.assert_close(found, states.float() @ weight.float().T, rtol=1e-5, atol=1e-5)


def test_a_router_that_computes_something_else_stays(library: KernelLibrary, caplog: pytest.LogCaptureFixture) -> None:
    class BiasedTopKRouter(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(random(NUM_EXPERTS, SIZE), requires_grad=False)

        def forward(self, states: torch.Tensor) -> tuple[torch.Tensor]:
            return (torch.nn.functional.linear(states, self.weight, torch.ones(NUM_EXPERTS).bfloat16()),)

    router, states = BiasedTopKRouter(), random(3, SIZE)
    (expected,) = router(states)
    assert not use_router(router, library, Scratch())
    assert "BiasedTopKRouter stays torch's" in caplog.text
    assert torch.equal(router(states)[0], expected)
    assert list(router.state_dict()) == ["weight"]


def test_where_torch_is_faster_for_many_rows_it_computes_experts_in_bfloat16() -> None:
    class Matrices(KernelLibrary):
        def __init__(self) -> None:
            self.__dict__.update(vars(find_library()))
            self.max_bfloat16_rows = 12

    for kind, is_packed in ((Kind.BF16, False), (Kind.INT8, True)):
        model = torch.nn.ModuleDict({"mlp": qwen3_block()})
        use_kernels(model, [], Matrices(), kind)
        assert isinstance(model["mlp"].experts, PackedExperts) is is_packed


def test_experts_of_another_form_are_not_known(library: KernelLibrary) -> None:
    experts = qwen3_block().experts
    assert are_known_experts(experts, library)
    for name, value in (("is_transposed", True), ("has_bias", True), ("has_gate", False), ("is_concatenated", False)):
        changed = qwen3_block().experts
        setattr(changed, name, value)
        assert not are_known_experts(changed, library)
    assert not are_known_experts(qwen3_block(hidden_act="relu").experts, library)
    assert not are_known_experts(torch.nn.Linear(4, 4), library)


@pytest.mark.parametrize("rows", [1, 5, 40])
def test_a_gated_mlp_with_gelu_is_computed_in_c(library: KernelLibrary, rows: int) -> None:
    config = transformers.Gemma3TextConfig(hidden_size=SIZE, intermediate_size=100)
    mlp, states = filled(Gemma3MLP(config)), random(rows, SIZE) * 2
    assert is_gated_mlp(mlp)
    exact = filled(Gemma3MLP(config)).float()(states.float())
    assert_alike(PackedGatedMLP(mlp, library, Scratch(), Kind.BF16)(states), exact, 0.01)
