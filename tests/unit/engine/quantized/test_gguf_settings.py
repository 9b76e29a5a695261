"""GGUF files by their settings: scaled positions, head sizes and biases are those of the model, or rejected."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import transformers

from splitserve.core.errors import UnsupportedModelError
from splitserve.engine.kernels.decoder import PlainDecoder
from splitserve.engine.kernels.layers import computes_all
from splitserve.engine.kernels.library import find_library
from splitserve.engine.loader import LoadedModel
from splitserve.engine.quantized import gguf_convert
from support.quantized import SHAPE, make_gguf, reference_model
from support.served_logits import assert_same_logprobs, assert_served_as, load

needs_kernels = pytest.mark.skipif(find_library() is None, reason="installed without a C compiler")
# Types of matrices in turn: all stay in blocks, all become floats, or some stay in blocks.
KINDS = [pytest.param(["Q8_0"], marks=needs_kernels), ["F32"], pytest.param(["Q8_0", "F32"], marks=needs_kernels)]
CONFIGS = {
    "llama": transformers.LlamaConfig,
    "qwen2": transformers.Qwen2Config,
    "qwen3": transformers.Qwen3Config,
    "gemma2": transformers.Gemma2Config,
    "gemma3": transformers.Gemma3TextConfig,
}
Add = Callable[[gguf.GGUFWriter], object]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPLITSERVE_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "model.gguf"


def model_of(architecture: str, **settings: Any) -> Any:
    return reference_model(config=CONFIGS[architecture](**{**SHAPE, "initializer_range": 0.1, **settings}))


def assert_served(kinds: list[str], loaded: LoadedModel, reference: Any) -> None:
    if kinds == ["F32"]:
        assert_same_logprobs(loaded, reference)
    else:
        assert kinds != ["Q8_0"] or computes_all(loaded.model)
        assert_served_as(loaded, reference)


def llama3_factors(rope: dict[str, Any]) -> np.ndarray:
    """Return the divisors of the frequencies, as llama.cpp's converter writes them for Llama 3.1."""
    length, low, high = rope["original_max_position_embeddings"], rope["low_freq_factor"], rope["high_freq_factor"]
    waves = 2 * np.pi * rope["rope_theta"] ** (np.arange(0, SHAPE["head_dim"], 2) / SHAPE["head_dim"])
    smooth = ((length / waves - low) / (high - low)).clip(0, 1)
    divisors: np.ndarray = (1 / ((1 - smooth) / rope["factor"] + smooth)).astype(np.float32)
    return divisors


def scale(kind: str, **values: float) -> Add:
    """Return a function that adds a type of scaling, and settings of it by their names in the file."""

    def add(writer: gguf.GGUFWriter) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
        for name, value in values.items():
            put = writer.add_uint32 if isinstance(value, int) else writer.add_float32
            put(f"{writer.arch}.rope.scaling.{name}", value)

    return add


ROPE: dict[str, Any] = {"rope_theta": 10000.0, "factor": 8.0}
LLAMA3 = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
LLAMA3 |= ROPE
LINEAR = {"rope_type": "linear", **ROPE}
YARN = {"rope_type": "yarn", **ROPE, "original_max_position_embeddings": 16}
TUNED = {"attention_factor": 1.5, "beta_fast": 4.0, "beta_slow": 0.5}
SCALED: dict[str, tuple[dict[str, Any], Add]] = {
    "llama3": (LLAMA3, lambda w: w.add_tensor("rope_freqs.weight", llama3_factors(LLAMA3))),
    "linear": (LINEAR, scale("linear", factor=8.0)),
    "factor without a type": (LINEAR, lambda w: w.add_rope_scaling_factor(8.0)),
    "none": ({"rope_type": "default", **ROPE}, scale("none", factor=8.0)),
    "yarn": (YARN, scale("yarn", factor=8.0, original_context_length=16)),
    "yarn of the whole context": (
        YARN | {"original_max_position_embeddings": SHAPE["max_position_embeddings"]},
        scale("yarn", factor=8.0, attn_factor=1.0, yarn_ext_factor=1.0, yarn_log_multiplier=0.0),
    ),
    "yarn with all settings": (
        YARN | TUNED,
        scale(
            "yarn", factor=8.0, original_context_length=16, yarn_attn_factor=1.5, yarn_beta_fast=4.0, yarn_beta_slow=0.5
        ),
    ),
}


@pytest.mark.parametrize("kinds", KINDS[:2])
@pytest.mark.parametrize(
    ("architecture", "name"), [*(("llama", name) for name in SCALED), ("qwen2", "yarn"), ("qwen3", "yarn")]
)
def test_a_gguf_has_its_scaled_positions(architecture: str, name: str, kinds: list[str], file: Path) -> None:
    rope, add = SCALED[name]
    model = model_of(architecture, rope_parameters=dict(rope))
    reference = make_gguf(kinds, file, model=model, add=add)
    loaded = load(file)
    assert_served(kinds, loaded, reference)
    assert (PlainDecoder.of(loaded.model) is None) == (kinds == ["F32"])


def gemma_of(architecture: str, **settings: Any) -> Any:
    sizes = {"hidden_size": 96, "intermediate_size": 64, "num_attention_heads": 4, "head_dim": 16}
    more = {"num_hidden_layers": 6, "query_pre_attn_scalar": 16, "tie_word_embeddings": True, "sliding_window": 64}
    return model_of(architecture, **sizes, **more, **settings)


@pytest.mark.parametrize("local_base", [None, 500.0])
def test_only_full_attention_of_gemma_3_is_scaled(local_base: float | None, file: Path) -> None:
    rope = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 20000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": local_base or 10000.0},
    }

    def add(writer: gguf.GGUFWriter) -> None:
        scale("linear", factor=8.0)(writer)
        if local_base is not None:
            writer.add_rope_freq_base_swa(local_base)

    reference = make_gguf(["F32"], file, model=gemma_of("gemma3", rope_parameters=rope), tied=True, add=add)
    assert_same_logprobs(load(file), reference)


@pytest.mark.parametrize(("architecture", "layers"), [("gemma2", 46), ("gemma3", 62)])
def test_scores_of_the_gemma_models_of_27b_have_another_divisor(
    architecture: str, layers: int, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is the width of hidden states per head, and in other models the head size."""
    monkeypatch.setattr(gguf_convert, "_check_tensors", lambda *_: None)
    for count, divisor in ((6, 16), (layers, 24)):
        make_gguf(["F32"], file, model=gemma_of(architecture), tied=True, add=lambda w, n=count: w.add_block_count(n))
        source = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
        config = gguf_convert._config_of(source, file, gguf.GGUFReader(file))
        assert (config.num_hidden_layers, config.query_pre_attn_scalar) == (count, divisor)


@pytest.mark.parametrize("kinds", KINDS)
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_heads_have_the_size_in_the_file(architecture: str, kinds: list[str], file: Path) -> None:
    """Their width is not that of the hidden states."""
    reference = make_gguf(kinds, file, model=model_of(architecture, head_dim=64))
    loaded = load(file)
    assert loaded.layers[0].k_dim == 64
    assert_served(kinds, loaded, reference)


BIASES: dict[str, tuple[list[str], str]] = {
    "attention": (["attention_bias"], ""),
    "attention without its output": (["attention_bias"], "o_proj.bias"),
    "mlp": (["mlp_bias"], ""),
    "both, without one projection": (["attention_bias", "mlp_bias"], "down_proj.bias"),
}


@pytest.mark.parametrize("kinds", KINDS)
@pytest.mark.parametrize("name", BIASES)
def test_a_llama_gguf_keeps_its_biases(name: str, kinds: list[str], file: Path) -> None:
    settings, absent = BIASES[name]
    model = model_of("llama", **dict.fromkeys(settings, True))
    reference = make_gguf(kinds, file, model=model, absent=absent)
    assert_served(kinds, load(file), reference)


@pytest.mark.parametrize("kinds", KINDS)
def test_a_projection_with_a_bias_in_some_layers_only_is_rejected(kinds: list[str], file: Path) -> None:
    absent = "model.layers.1.self_attn.q_proj.bias"
    make_gguf(kinds, file, model=model_of("llama", attention_bias=True), absent=absent)
    with pytest.raises(UnsupportedModelError, match=re.escape(f"The weights in {file} lack {absent}. Copy the file")):
        load(file)


def without_sizes(writer: gguf.GGUFWriter) -> None:
    for name in ("attention.key_length", "attention.value_length", "rope.dimension_count"):
        del writer.kv_data[0][f"{writer.arch}.{name}"]


REJECTED: dict[str, tuple[str, dict[str, Any], Add, str]] = {
    "tensor": (
        "llama",
        {},
        lambda w: w.add_tensor("blk.1.attn_sinks.weight", np.ones(8, np.float32)),
        r"has tensors that LlamaForCausalLM does not use: blk\.1\.attn_sinks\.weight\. Without",
    ),
    "biases of Qwen 3": (
        "qwen3",
        {"attention_bias": True},
        lambda _: None,
        r"does not use: blk\.0\.attn_q\.bias, .* and 5 more\. Without",
    ),
    "type": ("llama", {}, scale("longrope"), r"llama\.rope\.scaling \(longrope\), which is not supported for llama"),
    "yarn with another mixture": (
        "llama",
        {},
        scale("yarn", factor=8.0, yarn_ext_factor=0.5),
        r"llama\.rope\.scaling\.yarn_ext_factor and llama\.rope\.scaling \(yarn\), ",
    ),
    "factor of scores": ("llama", {}, scale("linear", attn_factor=1.2), r"by llama\.rope\.scaling\.attn_factor, "),
    "yarn and factors": (
        "llama",
        {},
        lambda w: (scale("yarn", factor=8.0)(w), w.add_tensor("rope_freqs.weight", llama3_factors(LLAMA3))),
        r"llama\.rope\.scaling \(yarn\) and rope_freqs\.weight, ",
    ),
    "yarn in Gemma 3": (
        "gemma3",
        {},
        scale("yarn", factor=8.0),
        r"gemma3\.rope\.scaling \(yarn\), which is not supported for gemma3_text",
    ),
    "values": (
        "llama",
        {},
        lambda w: w.add_value_length(16),
        r"has attention\.value_length 16, and llama with heads of 32 has 32\.",
    ),
    "part of a head": (
        "llama",
        {},
        lambda w: w.add_rope_dimension_count(16),
        r"has rope\.dimension_count 16, and llama with heads of 32 has 32\.",
    ),
    "no head size": (
        "qwen3",
        {},
        without_sizes,
        r"has blk\.0\.attn_q\.weight of shape \[256, 256\], and its settings make it \[1024, 256\]\.",
    ),
    "rows beyond the vocabulary": (
        "llama",
        {},
        lambda w: w.add_vocab_size(250),
        r"has token_embd\.weight of shape \[261, 256\], and its settings make it \[250, 256\]\.",
    ),
}


@pytest.mark.parametrize("kinds", KINDS[:2])
@pytest.mark.parametrize("name", REJECTED)
def test_a_gguf_with_more_than_its_model_uses_is_rejected(name: str, kinds: list[str], file: Path) -> None:
    architecture, settings, add, message = REJECTED[name]
    make_gguf(kinds, file, model=model_of(architecture, **settings), add=add)
    with pytest.raises(UnsupportedModelError, match=rf"model\.gguf .*{message}.*Use the model's safetensors"):
        load(file)


def test_a_full_disk_is_not_blamed_on_the_file(file: Path, tmp_path: Path) -> None:
    """Libraries in Rust have their own errors for it."""
    make_gguf(["F32"], file)
    target = tmp_path / "target"
    target.mkdir()
    (target / "tokenizer.json").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left on device"):
        gguf_convert.convert_gguf(file, target, progress=False)
