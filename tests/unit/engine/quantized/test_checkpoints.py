"""Quantized checkpoints of every supported scheme: the weights that they stand for, and logits of the kernels."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from splitserve.core.errors import ConfigError, ModelLoadError, UnsupportedModelError
from splitserve.engine.kernels.layers import computes_all
from splitserve.engine.kernels.library import find_library
from splitserve.engine.kernels.stack import DecoderStack
from splitserve.engine.kernels.weights import Kind, PackedLinear
from splitserve.engine.quantized.layers import QuantizedEmbedding
from support.local_attention import LocalAttention
from support.quantized import SCHEMES, TinyScheme, awq, gptq, make_gguf, make_quantized
from support.served_logits import assert_same_logprobs, assert_served_as, load, logprobs

needs_kernels = pytest.mark.skipif(find_library() is None, reason="installed without a C compiler")
GGUF_FILES: dict[str, tuple[list[str], bool]] = {
    "Q4_0": (["Q4_0"], False),
    "Q4_1, tied": (["Q4_1"], True),
    "Q8_0": (["Q8_0"], False),
    "Q4_K": (["Q4_K"], False),
    "Q4_K and Q6_K mixed, tied": (["Q6_K", "Q4_K", "Q4_K"], True),
    "Q5_0, Q5_1, Q5_K": (["Q5_0", "Q5_1", "Q5_K"], False),
}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPLITSERVE_CACHE", str(tmp_path / "cache"))


@needs_kernels
@pytest.mark.parametrize("name", [name for name in SCHEMES if "activations" not in name])
def test_a_quantized_checkpoint_runs_in_the_kernels(name: str, tmp_path: Path) -> None:
    reference = make_quantized(SCHEMES[name], tmp_path)
    loaded = load(tmp_path)
    assert loaded.dtype_name == "bfloat16"
    assert loaded.num_parameters == sum(p.numel() for p in reference.parameters())
    (stack,) = loaded.model.model.layers
    assert isinstance(stack, DecoderStack)
    assert_served_as(loaded, reference)


@needs_kernels
def test_int8_activations_of_a_checkpoint_are_quantized_row_by_row(tmp_path: Path) -> None:
    reference = make_quantized(SCHEMES["compressed int8 with int8 activations"], tmp_path)
    loaded = load(tmp_path)
    (stack,) = loaded.model.model.layers
    assert stack.layers[0].qkv_proj._args.kind == Kind.W8A8
    difference = (logprobs(loaded.model, step_attention=LocalAttention()) - logprobs(reference)).abs()
    assert 0.0 < float(difference.mean()) < 0.3


@pytest.mark.parametrize("name", SCHEMES)
def test_without_kernels_the_same_weights_are_floats(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    reference = make_quantized(SCHEMES[name], tmp_path)
    with caplog.at_level(logging.WARNING):
        loaded = load(tmp_path, dtype="float32")
    assert "are converted to float32" in caplog.text
    expected = reference.state_dict()
    found = loaded.model.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@needs_kernels
@pytest.mark.parametrize("name", GGUF_FILES)
def test_a_gguf_stays_in_its_types(name: str, tmp_path: Path) -> None:
    kinds, tied = GGUF_FILES[name]
    reference = make_gguf(kinds, tmp_path / "model.gguf", tied=tied)
    loaded = load(tmp_path / "model.gguf")
    assert computes_all(loaded.model)
    assert isinstance(loaded.model.model.embed_tokens, QuantizedEmbedding)
    assert isinstance(loaded.model.lm_head, PackedLinear)
    assert_served_as(loaded, reference)


@pytest.mark.parametrize("name", GGUF_FILES)
def test_a_gguf_without_kernels_has_the_same_weights(name: str, tmp_path: Path) -> None:
    kinds, tied = GGUF_FILES[name]
    reference = make_gguf(kinds, tmp_path / "model.gguf", tied=tied)
    found, expected = load(tmp_path / "model.gguf", dtype="float32").model.state_dict(), reference.state_dict()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("tied", [False, True])
def test_a_gguf_without_quantized_weights_becomes_floats(tied: bool, tmp_path: Path) -> None:
    reference = make_gguf(["F32"], tmp_path / "model.gguf", tied=tied)
    loaded = load(tmp_path / "model.gguf", dtype="float32")
    assert torch.equal(loaded.model.lm_head.weight, reference.lm_head.weight)
    assert (loaded.folder / "model.safetensors").is_file()


@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
@pytest.mark.parametrize("absent", ["model.layers.1.mlp.up_proj.weight", "model.norm.weight"])
def test_a_gguf_that_lacks_a_tensor_is_rejected_by_its_name(kind: str, absent: str, tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    make_gguf([kind], file, absent=absent)
    with pytest.raises(ModelLoadError, match=re.escape(f"The weights in {file} lack {absent}. Copy the file")) as error:
        load(file)
    assert "config.json" not in str(error.value)


def edit_tensors(folder: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("scheme", "part"),
    [
        ("awq, groups of 64", "qzeros"),
        ("gptq 8 bits", "scales"),
        ("compressed 4 bits", "weight_scale"),
        ("compressed int8", "weight"),
    ],
)
def test_a_layer_without_a_part_is_rejected_by_its_name(scheme: str, part: str, tmp_path: Path) -> None:
    make_quantized(SCHEMES[scheme], tmp_path)
    name = f"model.layers.1.mlp.up_proj.{part}"
    edit_tensors(tmp_path, lambda tensors: tensors.pop(name))
    with pytest.raises(UnsupportedModelError, match=re.escape(f"lack {name}.")):
        load(tmp_path)


@pytest.mark.parametrize(
    ("scheme", "scale"), [("fp8 in blocks", "weight_scale_inv"), ("compressed int8", "weight_scale")]
)
def test_codes_without_scales_are_not_taken_as_weights(scheme: str, scale: str, tmp_path: Path) -> None:
    make_quantized(SCHEMES[scheme], tmp_path)
    edit_tensors(tmp_path, lambda tensors: tensors.pop(f"model.layers.1.mlp.up_proj.{scale}"))
    with pytest.raises(UnsupportedModelError, match=r"model\.layers\.1\.mlp\.up_proj\.weight in .* without scales"):
        load(tmp_path)


def test_biases_that_the_model_has_are_not_left_out(tmp_path: Path) -> None:
    make_quantized(awq(64), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"attention_bias": True}))
    with pytest.raises(UnsupportedModelError, match=r"lack model\.layers\.0\.self_attn\.k_proj\.bias, .* and 5 more"):
        load(tmp_path)


@needs_kernels
def test_biases_of_some_projections_stay_with_them(tmp_path: Path) -> None:
    """The writer stores biases for all layers: those of keys are 0."""
    reference, random = make_quantized(gptq(4, 64, symmetric=True), tmp_path), torch.Generator().manual_seed(2)

    def fill(tensors: dict[str, torch.Tensor]) -> None:
        for i, layer in enumerate(reference.model.layers):
            for name in ("q_proj", "v_proj"):
                linear = getattr(layer.self_attn, name)
                linear.bias = torch.nn.Parameter(torch.randn(linear.out_features, generator=random).half().float())
                tensors[f"model.layers.{i}.self_attn.{name}.bias"] = linear.bias.data.half()

    edit_tensors(tmp_path, fill)
    loaded = load(tmp_path)
    assert isinstance(loaded.model.model.layers[0], DecoderStack)
    assert_served_as(loaded, reference)


def test_reordered_inputs_are_rejected_before_weights_are_read(tmp_path: Path) -> None:
    make_quantized(gptq(4, 32, symmetric=True, reordered=True), tmp_path)
    with pytest.raises(ModelLoadError, match=r"gptq with 4 bits with reordered inputs.*desc_act"):
        load(tmp_path)


def test_quantized_checkpoints_are_not_quantized_again(tmp_path: Path) -> None:
    make_quantized(awq(64), tmp_path)
    with pytest.raises(ConfigError, match=r"already quantized \(awq with 4 bits\).*Remove this option"):
        load(tmp_path, quantization="int8")


def test_a_config_that_does_not_match_the_files_is_an_error(tmp_path: Path) -> None:
    make_quantized(awq(64), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["hidden_size"] = 128
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelLoadError):
        load(tmp_path)


@needs_kernels
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("scheme", [awq(64), gptq(4, 64, symmetric=False), SCHEMES["compressed 4 bits"]])
def test_tokens_beyond_the_vocabulary_have_no_logits(scheme: TinyScheme, dtype: str, tmp_path: Path) -> None:
    """A writer pads a quantized head to whole words of codes. These outputs could have the largest logits."""
    reference = make_quantized(scheme, tmp_path)
    num_tokens, width = reference.lm_head.weight.shape
    head, weight = scheme.write(-(-num_tokens // 8) * 8, width, torch.Generator().manual_seed(3))
    assert len(weight) > num_tokens
    reference.lm_head.weight.data = weight[:num_tokens].clone()

    def replace_head(tensors: dict[str, torch.Tensor]) -> None:
        del tensors["lm_head.weight"]
        tensors |= {f"lm_head.{name}": tensor for name, tensor in head.items()}

    edit_tensors(tmp_path, replace_head)
    loaded = load(tmp_path, dtype=dtype)
    assert logprobs(loaded.model, step_attention=LocalAttention()).shape[-1] == loaded.vocab_size == num_tokens
    if dtype == "float32":
        assert_same_logprobs(loaded, reference)
    else:
        assert_served_as(loaded, reference)


@pytest.mark.parametrize(
    ("layer", "outputs"), [("model.layers.1.self_attn.k_proj", 128), ("model.layers.1.mlp.up_proj", 256)]
)
def test_a_layer_with_other_outputs_than_the_config_is_rejected(layer: str, outputs: int, tmp_path: Path) -> None:
    make_quantized(awq(64), tmp_path)
    stored, _ = awq(64).write(outputs, 256, torch.Generator().manual_seed(3))
    edit_tensors(tmp_path, lambda tensors: tensors.update({f"{layer}.{name}": t for name, t in stored.items()}))
    with pytest.raises(UnsupportedModelError, match=rf"{layer} has {outputs} outputs in .* config makes it (64|512)\."):
        load(tmp_path)


def test_a_quantized_model_with_attention_of_its_own_is_rejected(tmp_path: Path) -> None:
    make_quantized(awq(64), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | {"model_type": "gptj", "architectures": None}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModelError, match=r"its class has attention of its own\. Choose a decoder"):
        load(tmp_path)
