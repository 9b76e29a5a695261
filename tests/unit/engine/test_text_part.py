"""Multimodal checkpoints are served as the text model that they contain."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from splitserve.core.errors import ModelLoadError, UnsupportedModelError
from support.local_attention import LocalAttention
from support.multimodal import MULTIMODAL_KINDS, edit_config, rename_weights, save_multimodal, whole_model
from support.quantized import SCHEMES, make_quantized
from support.served_logits import TOKENS, load

NEW_NAMES = {"language_model.model.": "model.language_model.", "language_model.lm_head.": "lm_head."}


def logits(model: object) -> torch.Tensor:
    positions = torch.arange(TOKENS.shape[1])[None]
    with torch.inference_mode():
        out = model(  # type: ignore[operator]
            input_ids=TOKENS, position_ids=positions, use_cache=False, step_attention=LocalAttention()
        )
    return out.logits


@pytest.mark.parametrize("has_new_names", [False, True])
@pytest.mark.parametrize("tied", [None, True, False])
@pytest.mark.parametrize(("kind", "text_kind"), MULTIMODAL_KINDS)
def test_logits_are_those_of_the_whole_model(
    kind: str, text_kind: str, tied: bool | None, has_new_names: bool, tmp_path: Path
) -> None:
    save_multimodal(kind, text_kind, tmp_path, tied=tied)
    if has_new_names:
        rename_weights(tmp_path, NEW_NAMES)
    loaded = load(tmp_path)
    assert torch.equal(logits(loaded.model), logits(whole_model(tmp_path)))
    assert loaded.eos_token_ids == {258, 259}


def test_the_text_model_has_no_other_weights_and_the_log_names_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_multimodal("gemma3", "gemma3_text", tmp_path)
    with caplog.at_level(logging.INFO):
        loaded = load(tmp_path)
    line = f"only the text model is loaded model={tmp_path} type=gemma3 text_model=gemma3_text unused=vision_config"
    assert caplog.messages.count(line) == 1
    assert type(loaded.model) is transformers.Gemma3ForCausalLM
    whole = whole_model(tmp_path)
    assert loaded.num_parameters == sum(p.numel() for p in whole.model.language_model.parameters())
    assert (loaded.context_length, loaded.dtype_name) == (1024, "float32")


@pytest.mark.parametrize("has_head", [False, True])
@pytest.mark.parametrize("kind", ["gemma3", "mistral3"])
def test_the_head_is_tied_only_if_the_checkpoint_has_none(kind: str, has_head: bool, tmp_path: Path) -> None:
    """Configs without tie_word_embeddings: the defaults of both configs differ in Mistral 3."""
    save_multimodal(kind, {"gemma3": "gemma3_text", "mistral3": "mistral"}[kind], tmp_path, tied=not has_head)
    text = json.loads((tmp_path / "config.json").read_text())["text_config"]
    text.pop("tie_word_embeddings", None)
    edit_config(tmp_path, text_config=text, tie_word_embeddings=None)
    loaded = load(tmp_path)
    assert loaded.model.config.tie_word_embeddings is not has_head
    assert torch.equal(logits(loaded.model), logits(whole_model(tmp_path)))


def test_a_head_that_is_tied_by_the_text_config_alone_is_tied(tmp_path: Path) -> None:
    save_multimodal("mistral3", "mistral", tmp_path, tied=True)
    expected = logits(whole_model(tmp_path))
    text = json.loads((tmp_path / "config.json").read_text())["text_config"]
    edit_config(tmp_path, text_config=text | {"tie_word_embeddings": True}, tie_word_embeddings=False)
    assert torch.equal(logits(load(tmp_path).model), expected)


def test_end_tokens_of_the_text_config_end_an_output_unless_others_are_configured(tmp_path: Path) -> None:
    save_multimodal("gemma3", "gemma3_text", tmp_path)
    text = json.loads((tmp_path / "config.json").read_text())["text_config"]
    edit_config(tmp_path, text_config=text | {"eos_token_id": [259, 7]}, eos_token_id=None)
    assert load(tmp_path).eos_token_ids == {259, 7}
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 5}))
    assert load(tmp_path).eos_token_ids == {5}


def test_a_missing_text_weight_is_named(tmp_path: Path) -> None:
    save_multimodal("mistral3", "mistral", tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = {n: t for n, t in load_file(file).items() if not n.endswith("layers.1.mlp.up_proj.weight")}
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ModelLoadError, match=r"lack model\.layers\.1\.mlp\.up_proj\.weight\. Check"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("kind", "text_kind"), [("paligemma", "gemma"), ("aya_vision", "cohere2"), ("llava_next", "granite")]
)
def test_other_multimodal_models_are_rejected(kind: str, text_kind: str, tmp_path: Path) -> None:
    save_multimodal(kind, text_kind, tmp_path)
    says = rf"is multimodal \(vision_config in its config\): {kind} with the text model {text_kind}\. .* Choose"
    with pytest.raises(UnsupportedModelError, match=says):
        load(tmp_path)


@pytest.mark.parametrize("kind", ["gemma3n", "gemma4_assistant", "gemma4_unified_assistant"])
def test_a_class_that_cannot_be_probed_is_rejected_by_name(kind: str, tmp_path: Path) -> None:
    text = {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind, "text_config": text}))
    save_file({}, tmp_path / "model.safetensors")
    with pytest.raises(UnsupportedModelError, match=rf"\({kind}\) cannot be served: .* KV of "):
        load(tmp_path)


@pytest.mark.parametrize("name", ["gptq 4 bits, groups of 32", "compressed 4 bits", "fp8 in blocks"])
@pytest.mark.parametrize("has_new_names", [False, True])
def test_quantized_text_weights_are_those_of_the_file(name: str, has_new_names: bool, tmp_path: Path) -> None:
    """Also if weights of the vision model are quantized."""
    reference = make_quantized(SCHEMES[name], tmp_path)
    quantized = reference.config.to_dict()
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    vision = {f"vision_tower.{n}": t.clone() for n, t in tensors.items() if "layers.0.mlp.up_proj" in n}
    save_file({f"language_model.{n}": t for n, t in tensors.items()} | vision, file, metadata={"format": "pt"})
    if has_new_names:
        rename_weights(tmp_path, NEW_NAMES)
    edit_config(tmp_path, model_type="llava", architectures=None, text_config=quantized, vision_config=None)
    loaded = load(tmp_path, dtype="float32")
    expected, found = reference.state_dict(), loaded.model.state_dict()
    assert loaded.quantization
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
