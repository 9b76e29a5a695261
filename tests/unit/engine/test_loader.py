"""Properties of a loaded model, and models that are rejected with a remedy."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from splitserve.core.config import ModelConfig
from splitserve.core.errors import USAGE_EXIT_CODE, ConfigError, ModelLoadError
from splitserve.engine import loader, whole_model
from splitserve.engine.loader import LoadedModel, load_model
from support.multimodal import SMALL_VISION
from support.tiny_models import TinyKind

SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}


LATENTS: dict[str, Any] = {
    "kv_lora_rank": 16,
    "q_lora_rank": 12,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "num_experts_per_tok": 1,
}
WITHOUT_KV_HEADS = {
    name: size for name, size in SMALL.items() if name not in ("num_key_value_heads", "intermediate_size")
}
GEMMA: dict[str, Any] = {
    "head_dim": 8,
    "layer_types": ["sliding_attention", "full_attention"],
    "num_kv_shared_layers": 0,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 64,
}
NO_INTERFACE = "none of its layers computes attention by transformers' interface"
# Two layers of its 20 share one attention module.
ZAMBA: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 20,
    "num_attention_heads": 4,
    "mamba_d_state": 4,
}


def saved(config: Any, folder: Path) -> str:
    """A random model of this config, in a folder."""
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return str(folder)


def load(model: str | Path, **settings: Any) -> LoadedModel:
    return load_model(ModelConfig(model=str(model), device="cpu", threads=1, **settings))


def test_a_loaded_model_describes_itself(tiny_model: Callable[[TinyKind], LoadedModel]) -> None:
    loaded = tiny_model("llama")
    assert (loaded.dtype_name, loaded.dtype, loaded.device.type) == ("float32", torch.float32, "cpu")
    assert (loaded.context_length, loaded.vocab_size, loaded.eos_token_ids) == (4096, 261, frozenset({258}))
    assert [(s.layer, s.num_kv_heads, s.k_dim, s.v_dim, s.window) for s in loaded.layers] == [
        (layer, 2, 16, 16, None) for layer in range(3)
    ]
    assert loaded.num_parameters == sum(p.numel() for p in loaded.model.parameters())
    assert not loaded.model.training


def test_windows_are_those_of_each_layer(tiny_model: Callable[[TinyKind], LoadedModel]) -> None:
    assert [s.window for s in tiny_model("gemma3").layers] == [32, 32, None, 32]


@pytest.mark.parametrize(
    ("config", "windows"),
    [
        (transformers.MistralConfig(**SMALL, sliding_window=16), [16, 16]),
        (transformers.MistralConfig(**SMALL, sliding_window=None), [None, None]),
        (transformers.Qwen2Config(**SMALL, use_sliding_window=False, sliding_window=16), [None, None]),
        (
            transformers.Qwen2Config(**SMALL, use_sliding_window=True, sliding_window=16, max_window_layers=1),
            [None, 16],
        ),
        (transformers.Qwen3Config(**SMALL, use_sliding_window=True, sliding_window=8, max_window_layers=0), [8, 8]),
    ],
    ids=["mistral", "mistral-full", "qwen2-off", "qwen2-upper-layers", "qwen3"],
)
def test_windows_of_other_families(config: Any, windows: list[int | None], tmp_path: Path) -> None:
    assert [s.window for s in load(saved(config, tmp_path)).layers] == windows


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_dtype_is_the_one_asked_for(dtype: str, tiny_folder: Callable[[TinyKind], Path]) -> None:
    loaded = load(tiny_folder("llama"), dtype=dtype)
    assert loaded.dtype_name == dtype
    assert {p.dtype for p in loaded.model.parameters()} == {getattr(torch, dtype)}


@pytest.mark.parametrize(
    ("checkpoint", "settings", "dtype"),
    [
        ("bfloat16", {}, "bfloat16"),
        ("bfloat16", {"kernels": "torch"}, "float32"),
        ("float16", {}, "float16"),
        ("float16", {"kernels": "torch"}, "float32"),
        ("float32", {}, "float32"),
        ("float32", {"quantization": "int8"}, "bfloat16"),
        ("bfloat16", {"quantization": "w8a8"}, "bfloat16"),
    ],
)
def test_auto_dtype_on_a_cpu_is_the_checkpoints_if_our_kernels_compute_it(
    checkpoint: str, settings: dict[str, str], dtype: str, tmp_path: Path
) -> None:
    loaded = load(saved(transformers.LlamaConfig(**SMALL, dtype=checkpoint), tmp_path), **settings)
    assert loaded.dtype_name == dtype
    assert (loaded.kernels is not None) == (dtype != "float32")


def test_auto_dtype_without_our_kernels_is_float32(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = saved(transformers.LlamaConfig(**SMALL, dtype="bfloat16"), tmp_path)
    monkeypatch.setattr(loader, "find_library", lambda dtype: None)
    assert load(folder).dtype_name == "float32"


@pytest.mark.parametrize(
    ("checkpoint", "is_fast", "dtype"),
    [("bfloat16", True, "bfloat16"), ("bfloat16", False, "float32"), ("float16", True, "float32")],
)
def test_auto_dtype_of_experts_depends_on_the_cpu(
    checkpoint: str, is_fast: bool, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = transformers.MixtralConfig(**SMALL, num_local_experts=2, num_experts_per_tok=1, dtype=checkpoint)
    folder = saved(config, tmp_path)
    monkeypatch.setattr(loader, "has_fast_bfloat16", lambda: is_fast)
    assert load(folder).dtype_name == dtype


def test_several_eos_tokens_come_from_the_generation_config(tmp_path: Path) -> None:
    folder = saved(transformers.LlamaConfig(**SMALL, eos_token_id=2), tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [4, 5]}))
    assert load(folder).eos_token_ids == {4, 5}


def test_the_context_may_be_shortened_but_not_stretched(tiny_folder: Callable[[TinyKind], Path]) -> None:
    assert load(tiny_folder("llama"), context_length=100).context_length == 100
    with pytest.raises(ConfigError, match=r"context_length is 5000.*\[1, 4096\]"):
        load(tiny_folder("llama"), context_length=5000)


def test_rope_that_depends_on_the_longest_sequence_is_refused_beyond_its_start(tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0, "original_max_position_embeddings": 64}
    folder = saved(transformers.LlamaConfig(**SMALL, rope_parameters=rope), tmp_path)
    with pytest.raises(ConfigError, match="Set context_length to 64 or less"):
        load(folder)
    assert load(folder, context_length=64).context_length == 64


def test_scales_that_depend_on_the_longest_sequence_are_refused_beyond_their_start(tmp_path: Path) -> None:
    sizes = {name: size for name, size in SMALL.items() if name != "head_dim"}
    factors = {"short_factor": [1.0] * 4, "long_factor": [1.0] * 4, "short_mscale": 1.0, "long_mscale": 1.5}
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 64, **factors}
    folder = saved(transformers.PhimoeConfig(**sizes, num_local_experts=2, rope_parameters=rope), tmp_path)
    with pytest.raises(ConfigError, match="Set context_length to 64 or less"):
        load(folder)
    assert load(folder, context_length=64).context_length == 64


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (
            transformers.GptOssConfig(**SMALL, num_local_experts=2, num_experts_per_tok=1, head_dim=8),
            r"GptOssAttention has attention sinks \(s_aux\), which are not supported",
        ),
        (transformers.BloomConfig(vocab_size=64, hidden_size=32, n_layer=2, n_head=4), NO_INTERFACE),
        (
            transformers.MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2),
            "layers of type linear_attention",
        ),
        (transformers.Gemma3TextConfig(**SMALL, head_dim=8, use_bidirectional_attention=True), "both directions"),
        (
            transformers.DeepseekV32Config(**SMALL, **LATENTS, n_routed_experts=2, n_group=1, topk_group=1),
            "it has layers of type indexed_attention",
        ),
        (transformers.FalconConfig(**SMALL), "its class has attention of its own"),
        (transformers.GPTJConfig(vocab_size=64, n_embd=32, n_layer=2, n_head=4, rotary_dim=4), "attention of its own"),
        (transformers.ZambaConfig(**ZAMBA), "it has layers of type hybrid, linear_attention"),
        (transformers.DiffLlamaConfig(**SMALL), "its 2 layers compute attention 4 times per step"),
        (
            transformers.Gemma4TextConfig(**SMALL, **GEMMA),
            "Gemma4ForCausalLM computes logits from more than the last hidden state",
        ),
        (
            transformers.GotOcr2Config(text_config={**SMALL, "model_type": "qwen2"}, vision_config=SMALL_VISION),
            r"GotOcr2ForConditionalGeneration is multimodal \(vision_config in its config\)",
        ),
        (
            transformers.Llama4TextConfig(**SMALL, intermediate_size_mlp=48, num_local_experts=2),
            "it has layers of type chunked_attention",
        ),
        (
            transformers.OPTConfig(**WITHOUT_KV_HEADS, ffn_dim=48, word_embed_proj_dim=32),
            "a step of OPTForCausalLM does not run OPTModel exactly once",
        ),
        (transformers.NemotronConfig(**SMALL, head_dim=8), "NemotronAttention gets no paged KV"),
        (transformers.StableLmConfig(**SMALL), "StableLmAttention gets no paged KV"),
        (transformers.XLNetConfig(vocab_size=64, d_model=32, n_layer=2, n_head=4, d_inner=48), NO_INTERFACE),
    ],
    ids=[
        *("sinks", "alibi", "no-attention", "bidirectional", "sparse-latents", "falcon", "gptj", "shared-layers"),
        *("two-per-layer", "gemma4", "multimodal", "llama4", "opt", "nemotron", "stablelm", "xlnet"),
    ],
)
def test_models_that_would_be_computed_wrongly_are_refused(config: Any, says: str, tmp_path: Path) -> None:
    folder = saved(config, tmp_path)
    with pytest.raises(
        ModelLoadError, match=f"cannot be served: .*{says}.*Choose a decoder-only text model"
    ) as refused:
        load(folder, context_length=64)
    assert refused.value.exit_code == USAGE_EXIT_CODE


@pytest.mark.parametrize(
    "kind",
    ["camembert", "data2vec-text", "roberta", "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl", "xmod"],
)
def test_positions_that_do_not_start_at_zero_are_refused(kind: str, tmp_path: Path) -> None:
    sizes = {name: size for name, size in SMALL.items() if name not in ("num_key_value_heads", "head_dim")}
    config = transformers.AutoConfig.for_model(kind, **sizes, is_decoder=True)
    with pytest.raises(ModelLoadError, match=r"cannot be served: the positions of .* start behind") as refused:
        load(saved(config, tmp_path))
    assert refused.value.exit_code == USAGE_EXIT_CODE


def test_an_encoder_decoder_is_refused(tmp_path: Path) -> None:
    transformers.T5Config().save_pretrained(tmp_path)
    save_file({}, tmp_path / "model.safetensors")
    with pytest.raises(ModelLoadError, match="encoder-decoder"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("settings", "says"),
    [({"dtype": "int3"}, "dtype 'int3'"), ({"device": "abacus"}, "Device 'abacus'"), ({"threads": 0}, "threads is 0")],
)
def test_wrong_settings_name_the_right_ones(
    settings: dict[str, Any], says: str, tiny_folder: Callable[[TinyKind], Path]
) -> None:
    config = ModelConfig(**{"model": str(tiny_folder("llama")), "device": "cpu", **settings})
    with pytest.raises(ConfigError, match=says):
        load_model(config)


def test_a_model_that_does_not_say_its_context_must_be_told(tmp_path: Path) -> None:
    folder = saved(transformers.BloomConfig(vocab_size=64, hidden_size=32, n_layer=2, n_head=4), tmp_path)
    with pytest.raises(ConfigError, match="set context_length"):
        load(folder)


def test_a_model_without_a_class_for_text_generation_is_refused_for_good(tmp_path: Path) -> None:
    transformers.ViTConfig(hidden_size=16).save_pretrained(tmp_path)
    save_file({}, tmp_path / "model.safetensors")
    with pytest.raises(ModelLoadError, match=r"has no class for text generation \(vit\)") as refused:
        load(tmp_path)
    assert refused.value.exit_code == USAGE_EXIT_CODE


def without(folder: Path, *names: str) -> None:
    """Remove tensors from a checkpoint."""
    tensors = load_file(folder / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if name not in names}
    assert len(kept) == len(tensors) - len(names)
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("names", "says"),
    [
        (["model.norm.weight"], r"model\.norm\.weight\. "),
        (["lm_head.weight"], r"lm_head\.weight\. "),
        ([f"model.layers.1.mlp.{name}_proj.weight" for name in ("gate", "up")], "gate_proj.*, model.*up_proj"),
        ([f"model.layers.0.self_attn.{name}_proj.weight" for name in "qkvo"], "and 1 more"),
    ],
)
def test_a_checkpoint_without_some_weights_is_refused(names: list[str], says: str, tmp_path: Path) -> None:
    saved(transformers.LlamaConfig(**SMALL), tmp_path)
    without(tmp_path, *names)
    with pytest.raises(ModelLoadError, match=rf"(?s)lack .*{says}.*fetch") as refused:
        load(tmp_path)
    assert refused.value.exit_code == USAGE_EXIT_CODE


def test_weights_that_are_not_numbers_are_named_as_the_cause(tmp_path: Path) -> None:
    saved(transformers.LlamaConfig(**SMALL), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"].fill_(float("nan"))
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelLoadError, match=r"served: its weights give NaN: .*\. Copy it again") as refused:
        load(tmp_path)
    assert refused.value.exit_code == USAGE_EXIT_CODE


@pytest.mark.parametrize("kind", ["Llama", "Gemma3Text", "Qwen3"])
def test_weights_that_follow_from_others_may_be_missing(kind: str, tmp_path: Path) -> None:
    sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = getattr(transformers, f"{kind}Config")(**sizes, tie_word_embeddings=True)
    saved(config, tmp_path)
    names = set(load_file(tmp_path / "model.safetensors"))
    assert "lm_head.weight" not in names
    model = load(tmp_path, context_length=64).model
    assert torch.equal(model.lm_head.weight, model.get_input_embeddings().weight)


@pytest.mark.parametrize(
    ("quantization", "pairs", "warns"), [("w8a8", True, True), ("w8a8", False, False), ("int8", True, False)]
)
def test_w8a8_is_advised_against_on_cpus_with_bfloat16_instructions(
    quantization: str, pairs: bool, warns: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    library = SimpleNamespace(multiplies_pairs=pairs)
    monkeypatch.setattr(whole_model, "find_library", lambda *_, **__: library)
    config = ModelConfig(model="m", quantization=quantization)
    assert whole_model.find_kernels(config, torch.device("cpu"), "bfloat16", is_quantized=False) is library
    assert ("int8 is more accurate" in caplog.text) == warns
