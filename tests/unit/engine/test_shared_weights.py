"""A model over mapped weights computes what the same model with private weights does, to the last bit."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from splitserve.core.config import ModelConfig
from splitserve.core.errors import ModelLoadError
from splitserve.engine import shared_weights, whole_model
from splitserve.engine.kernels import layers
from splitserve.engine.kernels.decoder import PlainDecoder
from splitserve.engine.kernels.library import KernelLibrary, LinearArgs, find_library
from splitserve.engine.kernels.stack import DecoderStack
from splitserve.engine.kernels.weights import PackedLinear
from splitserve.engine.loader import LoadedModel, load_model
from splitserve.engine.weights_file import WeightsFolder
from support.local_attention import LocalAttention
from support.multimodal import save_multimodal
from support.tiny_models import SMALL_SHAPE, TINY_KINDS, TinyKind

ROPE = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def long_rope(long_factor: list[float]) -> dict[str, Any]:
    more = {"short_factor": [3.0] * 16, "original_max_position_embeddings": 64, "factor": 2.0}
    return {"rope_type": "longrope", "rope_theta": 1e4, "long_factor": long_factor} | more


CONFIGS = {
    "untied": transformers.LlamaConfig(**SMALL_SHAPE),
    "tied, with biases": transformers.LlamaConfig(**SMALL_SHAPE, attention_bias=True, tie_word_embeddings=True),
    "biases of queries": transformers.Qwen2Config(**SMALL_SHAPE),
    "norms of heads": transformers.Qwen3Config(**SMALL_SHAPE),
    "scaled positions": transformers.LlamaConfig(
        **SMALL_SHAPE, rope_parameters=ROPE | {"original_max_position_embeddings": 64}
    ),
    "positions with factors": transformers.LlamaConfig(**SMALL_SHAPE, rope_parameters=long_rope([3.0] * 16)),
    "not fused": transformers.Gemma2Config(**SMALL_SHAPE, query_pre_attn_scalar=32),
    "latents": transformers.MiniCPM3Config(
        **SMALL_SHAPE, kv_lora_rank=32, q_lora_rank=24, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=24
    ),
}
needs_kernels = pytest.mark.skipif(find_library() is None, reason="installed without a C compiler")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SPLITSERVE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "weights"


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the names of the models of which the checkpoint was read."""
    names: list[str] = []
    build = whole_model._build

    def record(folder: Path, name: str, *rest: Any) -> Any:
        names.append(name)
        return build(folder, name, *rest)

    monkeypatch.setattr(whole_model, "_build", record)
    return names


def saved(config: Any, folder: Path) -> Path:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    for name, parameter in model.named_parameters():
        parameter.data.normal_(1.0 if "norm" in name else 0.0, 0.2)
    model.save_pretrained(folder)
    return folder


def load(folder: Path, **settings: Any) -> LoadedModel:
    return load_model(ModelConfig(model=str(folder), device="cpu", threads=1, **settings))


def logits(loaded: LoadedModel) -> torch.Tensor:
    tokens, positions = torch.arange(24)[None] * 3 % 101, torch.arange(24)[None]
    with torch.inference_mode():
        found: torch.Tensor = loaded.model(
            input_ids=tokens, position_ids=positions, use_cache=False, step_attention=LocalAttention()
        ).logits
    return found


def are_mapped(tensors: Iterable[torch.Tensor]) -> bool:
    """Return whether the memory of all these tensors is in files of weights, read-only."""
    lines = (line.split() for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith(".weights"))
    ranges = [[int(word, 16) for word in line[0].split("-")] for line in lines if line[1] == "r--s"]
    return all(any(first <= tensor.data_ptr() < last for first, last in ranges) for tensor in tensors)


def tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return all tensors except the frequencies of positions, which transformers may overwrite."""
    found = {name: tensor for name, _, _, tensor in shared_weights._slots(model)}
    return {name: tensor for name, tensor in found.items() if not name.endswith("inv_freq")}


@needs_kernels
@pytest.mark.parametrize("quantization", [None, "int8", "w8a8"])
@pytest.mark.parametrize("name", CONFIGS)
def test_mapped_weights_have_the_logits_of_private_ones(
    name: str, quantization: str | None, tmp_path: Path, loads: list[str]
) -> None:
    folder = saved(CONFIGS[name], tmp_path / "model")
    private = load(folder, dtype="bfloat16", quantization=quantization, share_weights=False)
    first, second = (load(folder, dtype="bfloat16", quantization=quantization) for _ in range(2))
    assert len(loads) == 2
    for mapped in (first, second):
        assert torch.equal(logits(private), logits(mapped))
        assert are_mapped(tensors(mapped.model).values())
        assert (mapped.layers, mapped.num_parameters) == (private.layers, private.num_parameters)
        assert isinstance(mapped.model.lm_head, PackedLinear)
    is_fused = isinstance(next(iter(second.model.base_model.layers)), DecoderStack)
    assert is_fused == (name not in ("not fused", "latents"))
    assert (PlainDecoder.of(second.model) is not None) == is_fused


@pytest.mark.parametrize(
    ("dtype", "kind"),
    [*(("float32", kind) for kind in TINY_KINDS), *(("bfloat16", kind) for kind in ("llama", "qwen3", "gemma3"))],
)
def test_every_kind_of_model_is_mapped(
    kind: TinyKind, dtype: str, tiny_folder: Callable[[TinyKind], Path], loads: list[str]
) -> None:
    private, *mapped = (
        load(tiny_folder(kind), dtype=dtype, share_weights=is_shared) for is_shared in (False, True, True)
    )
    assert len(loads) == 2
    for found in mapped:
        assert torch.equal(logits(private), logits(found))
        assert are_mapped(tensors(found.model).values())
        assert found.eos_token_ids == private.eos_token_ids == {258}


@needs_kernels
@pytest.mark.parametrize("quantization", [None, "int8"])
@pytest.mark.parametrize(("kind", "text_kind"), [("gemma3", "gemma3_text"), ("mistral3", "mistral")])
def test_a_text_part_has_the_bits_of_its_plain_model(
    kind: str, text_kind: str, quantization: str | None, tmp_path: Path
) -> None:
    """With our kernels in bfloat16, and the weights of both mapped or private."""
    save_multimodal(kind, text_kind, tmp_path / "whole", dtype="bfloat16")
    whole = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path / "whole", dtype=torch.bfloat16)
    plain = transformers.AutoModelForCausalLM.from_config(whole.config.text_config, dtype=torch.bfloat16)
    plain.model.load_state_dict(whole.model.language_model.state_dict())
    plain.lm_head.load_state_dict(whole.lm_head.state_dict())
    plain.save_pretrained(tmp_path / "plain")
    expected = logits(load(tmp_path / "plain", quantization=quantization, share_weights=False))
    for is_shared in (False, True, True):
        found = load(tmp_path / "whole", quantization=quantization, share_weights=is_shared)
        assert torch.equal(logits(found), expected)
        assert (found.dtype_name, found.kernels is None) == ("bfloat16", False)
        assert isinstance(found.model.lm_head, PackedLinear)
        assert are_mapped(tensors(found.model).values()) == is_shared


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_positions_with_factors_for_two_lengths_are_mapped(
    dtype: str, tmp_path: Path, cache: Path, loads: list[str]
) -> None:
    config = transformers.LlamaConfig(**SMALL_SHAPE, rope_parameters=long_rope([5.0] * 16))
    folder = saved(config, tmp_path / "model")
    private, *mapped = (
        load(folder, dtype=dtype, context_length=64, share_weights=is_shared) for is_shared in (False, True, True)
    )
    assert len(loads) == 2
    assert len(list(cache.glob("*.weights"))) == 1
    for found in mapped:
        assert torch.equal(logits(private), logits(found))
        assert are_mapped(tensors(found.model).values())


@needs_kernels
def test_packed_experts_are_private(tiny_folder: Callable[[TinyKind], Path], loads: list[str]) -> None:
    for _ in range(2):
        load(tiny_folder("mixtral"), dtype="bfloat16")
    assert len(loads) == 2


@needs_kernels
def test_a_layer_that_was_not_replaced_stays_torchs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = saved(CONFIGS["untied"], tmp_path / "model")
    with monkeypatch.context() as patch:
        patch.setattr(layers._Replacer, "_are_alike", lambda self, old, *_: not isinstance(old, torch.nn.Linear))
        built = load(folder, dtype="bfloat16")
    mapped = load(folder, dtype="bfloat16")
    assert type(built.model.lm_head) is type(mapped.model.lm_head) is torch.nn.Linear
    assert torch.equal(logits(built), logits(mapped))
    assert are_mapped([mapped.model.lm_head.weight])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return saved(CONFIGS["untied"], tmp_path / "model")


def test_another_checkpoint_config_or_option_has_a_file_of_its_own(folder: Path, cache: Path) -> None:
    load(folder, dtype="bfloat16")
    load(folder, dtype="float32")
    load(folder, dtype="bfloat16", kernels="torch")
    before = len(list(cache.glob("*.weights")))
    assert before == 3
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.5}))
    load(folder, dtype="bfloat16")
    assert len(list(cache.glob("*.weights"))) == before + 1


def test_a_changed_checkpoint_is_loaded_again(folder: Path, loads: list[str]) -> None:
    before = load(folder, dtype="bfloat16")
    [file] = folder.glob("*.safetensors")
    content = bytearray(file.read_bytes())
    # The sign of the last weight. Size and mtime stay.
    content[-1] ^= 0x80
    times = os.stat(file)
    file.write_bytes(content)
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    after = load(folder, dtype="bfloat16")
    assert len(loads) == 2
    assert before.fingerprint != after.fingerprint
    assert not torch.equal(logits(before), logits(after))


@pytest.mark.parametrize("is_shared", [True, False])
def test_a_checkpoint_that_changes_during_the_load_is_neither_stored_nor_served(
    is_shared: bool, folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its fingerprint may be that of other weights, and then its worker would pair with workers that have those."""
    build = whole_model._build

    def build_and_change(*args: Any) -> Any:
        model = build(*args)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.5}))
        return model

    monkeypatch.setattr(whole_model, "_build", build_and_change)
    with pytest.raises(ModelLoadError, match=r"changed while they were loaded\. Start again"):
        load(folder, dtype="bfloat16", share_weights=is_shared)
    assert not list(cache.glob("*.weights"))


@needs_kernels
def test_the_code_and_the_build_of_the_kernels_are_in_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = find_library()
    assert library is not None

    def key(kernels: KernelLibrary | None = library, quantization: str | None = None) -> str:
        return shared_weights.weights_key("weights", "bfloat16", quantization, kernels)

    keys = {key(), key(None), key(quantization="int8"), shared_weights.weights_key("other", "bfloat16", None, library)}
    (tmp_path / "packing.py").write_text("# another way to pack")
    monkeypatch.setattr(shared_weights, "_ENGINE", tmp_path)
    keys.add(key())
    monkeypatch.setattr(library, "file", tmp_path / "packing.py")
    keys.add(key())
    monkeypatch.setattr(shared_weights, "__version__", "another release")
    keys.add(key())
    assert len(keys) == 7


@pytest.mark.parametrize("damage", ["byte", "truncated", "other tensors"])
def test_a_damaged_file_is_built_again(
    damage: str, folder: Path, cache: Path, loads: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    expected = logits(load(folder, dtype="bfloat16"))
    [file] = cache.glob("*.weights")
    content = bytearray(file.read_bytes())
    if damage == "byte":
        content[100] ^= 1
        file.write_bytes(content)
    elif damage == "truncated":
        file.write_bytes(content[:-100])
    else:
        mapped = WeightsFolder(cache).open(file.stem)
        assert mapped is not None
        WeightsFolder(cache).store(file.stem, mapped.facts, {".other": torch.ones(1)})
    loaded = load(folder, dtype="bfloat16")
    assert "built again" in caplog.text
    assert len(loads) == 2
    assert torch.equal(logits(loaded), expected)
    assert are_mapped(tensors(loaded.model).values())


def test_without_a_writable_cache_weights_are_private(
    folder: Path, cache: Path, loads: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    cache.parent.mkdir()
    cache.write_text("a file in the place of the folder")
    loaded = load(folder, dtype="bfloat16")
    assert loads == [str(folder)]
    assert "weights are private" in caplog.text
    assert not are_mapped([next(iter(tensors(loaded.model).values()))])


def test_a_file_in_a_folder_that_is_not_writable_is_mapped(
    folder: Path, cache: Path, loads: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    load(folder, dtype="bfloat16")

    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "utime", refuse)
    monkeypatch.setattr(WeightsFolder, "building", refuse)
    load(folder, dtype="bfloat16")
    assert len(loads) == 1


def test_a_builder_that_waits_too_long_loads_for_itself(
    folder: Path, cache: Path, loads: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    with WeightsFolder(cache).building(60.0):
        loaded = load(folder, dtype="bfloat16", load_timeout=0.0)
    assert loads == [str(folder)]
    assert "weights are private" in caplog.text
    assert not are_mapped([next(iter(tensors(loaded.model).values()))])


def test_a_module_with_addresses_that_cannot_be_renewed_stays_private(
    folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    adapt = whole_model.adapt

    def add_addresses(model: Any, name: str) -> None:
        adapt(model, name)
        model.args = LinearArgs(panels=model.lm_head.weight.data_ptr())

    monkeypatch.setattr(whole_model, "adapt", add_addresses)
    load(folder, dtype="bfloat16")
    assert "no method to renew them" in caplog.text
    assert not list(cache.glob("*.weights"))
