"""Models of transformers with our layers in them, and without: the same answers, and nothing unknown replaced."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from splitserve.core.config import ModelConfig
from splitserve.core.errors import ConfigError
from splitserve.core.machine import parse_cpus
from splitserve.engine import whole_model
from splitserve.engine.attention.base import ATTENTION_NAME, AttentionParams, register_attention
from splitserve.engine.kernels import library as kernel_library
from splitserve.engine.kernels.gated import PackedGatedMLP
from splitserve.engine.kernels.layers import computes_all
from splitserve.engine.kernels.library import KernelLibrary, find_library
from splitserve.engine.kernels.stack import DecoderStack, FusedLayer, Norm
from splitserve.engine.kernels.weights import Kind, PackedLinear
from splitserve.engine.loader import load_model
from splitserve.engine.probe import probe
from support.kernel_layers import use_kernels
from support.tiny_models import SMALL_SHAPE

pytestmark = pytest.mark.skipif(find_library() is None, reason="installed without a C compiler")

QWEN2 = {k: v for k, v in SMALL_SHAPE.items() if k != "head_dim"} | {"hidden_size": 128}
CONFIGS = {
    "llama": transformers.LlamaConfig(**SMALL_SHAPE),
    "llama, tied, with biases": transformers.LlamaConfig(**SMALL_SHAPE, attention_bias=True, tie_word_embeddings=True),
    "mistral": transformers.MistralConfig(**SMALL_SHAPE, sliding_window=16),
    "qwen2": transformers.Qwen2Config(**QWEN2),
    "qwen3": transformers.Qwen3Config(**SMALL_SHAPE),
}


class LocalAttention:
    """StepAttention over one request's own tokens, without a pool."""

    def forward(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, params: AttentionParams
    ) -> torch.Tensor:
        q, k, v = (x.transpose(0, 1).float() for x in (query, key, value))
        length = q.shape[1]
        distance = torch.arange(length)[:, None] - torch.arange(length)
        seen = (distance >= 0) if params.window is None else (distance >= 0) & (distance < params.window)
        out = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=seen, scale=params.scaling, enable_gqa=True
        )
        return out.transpose(0, 1).to(query.dtype).contiguous()


def library() -> KernelLibrary:
    found = find_library()
    assert found is not None
    return found


def model_of(config: Any) -> Any:
    torch.manual_seed(0)
    register_attention()
    model = transformers.AutoModelForCausalLM.from_config(
        config, dtype=torch.bfloat16, attn_implementation=ATTENTION_NAME
    ).eval()
    for name, parameter in model.named_parameters():
        # Weights as wide as a trained model's, and norms and biases that are not all alike.
        parameter.data.normal_(1.0 if "norm" in name else 0.0, 0.2)
    return model


def logprobs(model: Any) -> torch.Tensor:
    tokens = torch.arange(24)[None] * 3 % 101
    with torch.inference_mode():
        out = model(
            input_ids=tokens, position_ids=torch.arange(24)[None], use_cache=False, step_attention=LocalAttention()
        )
    return out.logits[0].float().log_softmax(-1)


@pytest.mark.parametrize("name", CONFIGS)
def test_fused_layers_compute_what_the_models_own_do(name: str) -> None:
    model = model_of(CONFIGS[name])
    expected = logprobs(model)
    shapes = probe(model, name)
    exact = logprobs(copy.deepcopy(model).float())
    replaced = use_kernels(model, shapes, library())
    (stack,) = model.base_model.layers
    assert isinstance(stack, DecoderStack)
    assert [type(layer) for layer in stack.layers] == [FusedLayer, FusedLayer]
    assert isinstance(model.lm_head, PackedLinear)
    assert isinstance(model.base_model.norm, Norm)
    assert replaced == 4
    # No farther from float32 than torch's bfloat16 is, but for luck.
    error, plain_error = (float((found - exact).abs().mean()) for found in (logprobs(model), expected))
    assert error < 1.5 * plain_error + 1e-3


def test_a_norm_of_ours_computes_what_that_of_a_model_does() -> None:
    model = model_of(CONFIGS["llama"])
    plain = model.base_model.norm
    norm = Norm(library(), plain)
    rows = torch.randn(1, 5, 2 * len(plain.weight), generator=torch.Generator().manual_seed(0)).bfloat16()
    for states in (rows[..., : len(plain.weight)], rows[0, 0, : len(plain.weight)]):
        with torch.inference_mode():
            torch.testing.assert_close(norm(states), plain(states), rtol=0.02, atol=0.01)


@pytest.mark.parametrize("kind", [Kind.INT8, Kind.W8A8])
def test_whole_numbers_of_8_bits_change_logprobs_a_little(kind: Kind) -> None:
    model = model_of(CONFIGS["llama"])
    expected = logprobs(model)
    assert use_kernels(model, probe(model, "llama"), library(), kind) == 4
    difference = (logprobs(model) - expected).abs()
    assert 0.0 < float(difference.mean()) < 0.3


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("kind", [Kind.BF16, Kind.INT8])
def test_a_model_is_known_to_be_computed_whole_only_if_no_matrix_is_left_to_torch(name: str, kind: Kind) -> None:
    model = model_of(CONFIGS[name])
    assert not computes_all(model)
    use_kernels(model, probe(model, name), library(), kind)
    assert computes_all(model)
    model.base_model.another = torch.nn.Linear(4, 4)
    assert not computes_all(model)


def test_of_other_architectures_linears_and_gated_mlps_are_replaced() -> None:
    gemma = transformers.Gemma2Config(**SMALL_SHAPE, query_pre_attn_scalar=32)
    model = model_of(gemma)
    expected = logprobs(model)
    use_kernels(model, probe(model, "gemma2"), library())
    layer = model.base_model.layers[0]
    assert type(layer).__name__ == "Gemma2DecoderLayer"
    assert isinstance(layer.mlp, PackedGatedMLP)
    assert isinstance(layer.self_attn.q_proj, PackedLinear)
    assert float((logprobs(model) - expected).abs().mean()) < 0.05


@pytest.mark.parametrize(
    "config",
    [
        transformers.LongcatFlashConfig(
            **{name: SMALL_SHAPE[name] for name in ("vocab_size", "hidden_size", "num_attention_heads")},
            num_layers=1,
            ffn_hidden_size=64,
            expert_ffn_hidden_size=32,
            n_routed_experts=4,
            zero_expert_num=1,
            moe_topk=2,
            q_lora_rank=24,
            kv_lora_rank=32,
            qk_nope_head_dim=16,
            qk_rope_head_dim=8,
            v_head_dim=16,
            head_dim=8,
        ),
        transformers.HunYuanMoEV1Config(**SMALL_SHAPE, num_experts=4, moe_topk=2),
    ],
    ids=["weight-read-by-the-router", "float32"],
)
def test_routers_with_linear_layers_of_another_use_or_dtype_stay(config: Any, tmp_path: Path) -> None:
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path)
    found, plain = (
        load_model(ModelConfig(model=str(tmp_path), device="cpu", dtype="bfloat16", threads=1, kernels=kernels)).model
        for kernels in ("auto", "torch")
    )
    assert isinstance(found.lm_head, PackedLinear)
    assert float((logprobs(found) - logprobs(plain)).abs().mean()) < 0.05


def test_layers_of_a_size_or_activation_that_is_not_known_keep_their_own_code() -> None:
    for change in ({"head_dim": 24}, {"hidden_act": "gelu"}, {"mlp_bias": True}):
        model = model_of(transformers.LlamaConfig(**SMALL_SHAPE | change))
        expected = logprobs(model)
        use_kernels(model, probe(model, "llama"), library())
        assert type(model.base_model.layers[0]).__name__ == "LlamaDecoderLayer"
        assert type(model.base_model.norm).__name__ == "LlamaRMSNorm"
        assert float((logprobs(model) - expected).abs().mean()) < 0.05


def test_a_kernel_that_computes_something_else_is_not_used(caplog: pytest.LogCaptureFixture) -> None:
    class Wrong(KernelLibrary):
        def __init__(self) -> None:
            self.__dict__.update(library().__dict__)
            self.rms_norm = lambda args: None

    model = model_of(CONFIGS["llama"])
    expected = logprobs(model)
    use_kernels(model, probe(model, "llama"), Wrong())
    assert type(model.base_model.layers[0]).__name__ == "LlamaDecoderLayer"
    assert "LlamaDecoderLayer stays torch's" in caplog.text
    assert float((logprobs(model) - expected).abs().mean()) < 0.05


def test_a_build_that_is_slower_for_many_rows_leaves_them_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    class Matrices(KernelLibrary):
        def __init__(self) -> None:
            self.__dict__.update(library().__dict__)
            self.max_bfloat16_rows = 12

    model = model_of(CONFIGS["qwen2"])
    exact, plain = logprobs(copy.deepcopy(model).float()), logprobs(model)
    use_kernels(model, probe(model, "qwen2"), Matrices())
    assert not computes_all(model)
    calls: list[int] = []
    linear = torch.nn.functional.linear
    monkeypatch.setattr(torch.nn.functional, "linear", lambda x, *rest: calls.append(len(x)) or linear(x, *rest))
    error, plain_error = (float((found - exact).abs().mean()) for found in (logprobs(model), plain))
    assert error < 1.5 * plain_error + 1e-3
    # Four linears a layer, and the head.
    assert calls == [24] * 9


def test_deterministic_computes_all_rows_if_the_build_lacks_bfloat16_instructions_of_the_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model_of(CONFIGS["llama"]).save_pretrained(tmp_path)
    monkeypatch.setattr(kernel_library, "_cpu_flags", lambda: frozenset(("amx_bf16",)))
    monkeypatch.setattr(kernel_library, "_builds", lambda: ("any",))
    monkeypatch.setattr(whole_model, "find_library", kernel_library.find_library.__wrapped__)
    for deterministic, most in ((False, 12), (True, None)):
        config = ModelConfig(
            model=str(tmp_path), device="cpu", threads=1, dtype="bfloat16", deterministic=deterministic
        )
        kernels = load_model(config).kernels
        assert kernels is not None
        assert kernels.max_bfloat16_rows == most


@pytest.mark.parametrize(
    ("settings", "remedy"),
    [
        ({"quantization": "int8", "dtype": "float32"}, "--dtype bfloat16"),
        ({"quantization": "int8", "dtype": "bfloat16", "kernels": "torch"}, "without --kernels torch"),
        ({"quantization": "int3", "dtype": "bfloat16"}, "int8 or w8a8"),
        ({"quantization": "w8a8", "dtype": "float16"}, "--dtype bfloat16"),
        ({"kernels": "fast"}, "auto or torch"),
        ({"cpu_affinity": "4096-4097"}, "core numbers"),
        ({"cpu_affinity": "two"}, "core numbers"),
    ],
)
def test_what_cannot_be_had_is_refused_with_a_remedy(settings: dict[str, Any], remedy: str, tmp_path: Path) -> None:
    model_of(CONFIGS["llama"]).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=remedy):
        load_model(ModelConfig(model=str(tmp_path), device="cpu", threads=1, **settings))


@pytest.mark.parametrize(
    ("text", "cpus"), [("0", {0}), ("0-3", {0, 1, 2, 3}), ("0-1,8,10-11", {0, 1, 8, 10, 11}), ("2,2", {2})]
)
def test_cores_are_named_as_linux_names_them(text: str, cpus: set[int]) -> None:
    assert parse_cpus(text) == cpus


@pytest.mark.parametrize("text", ["", "a", "1-", "3-1", "-1"])
def test_other_names_of_cores_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse_cpus(text)
