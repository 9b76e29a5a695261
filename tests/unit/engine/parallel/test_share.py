"""One rank's share of a model, in this process: a stage needs no other rank until it computes a step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, FalconConfig, MambaConfig, RobertaConfig
from transformers.models.llama import modeling_llama

from splitserve.core.config import CacheConfig, ModelConfig
from splitserve.core.errors import ConfigError, ModelLoadError, UnsupportedModelError
from splitserve.core.parallel import ParallelRank
from splitserve.engine.build import build_engine
from splitserve.engine.loader import LoadedModel, load_model
from splitserve.engine.parallel.checkpoint import Checkpoint
from splitserve.engine.parallel.ranks import Ranks
from support.tiny_models import TINY_KINDS, TinyKind

Folder = Callable[[TinyKind], Path]
SIZES: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2}


def stage_of(
    folder: Path, pp_rank: int, pp_size: int = 2, pp_layers: tuple[int, ...] = (), **model: Any
) -> LoadedModel:
    rank = ParallelRank(pp_rank=pp_rank, pp_size=pp_size)
    store = dist.HashStore()
    for other in rank.group():
        # They have loaded theirs.
        store.set(f"loaded-{other.index}", b"loaded")
    ranks = Ranks(rank, torch.device("cpu"), [None] * pp_size, store)
    return load_model(ModelConfig(model=str(folder), device="cpu", threads=1, **model), ranks, pp_layers)


@pytest.mark.parametrize("kind", TINY_KINDS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_a_stage_has_equals_what_transformers_loads(kind: TinyKind, dtype: str, tiny_folder: Folder) -> None:
    whole = AutoModelForCausalLM.from_pretrained(tiny_folder(kind), dtype=getattr(torch, dtype))
    wanted = dict(whole.named_parameters()) | dict(whole.named_buffers())
    seen: set[str] = set()
    for pp_rank in range(2):
        model = stage_of(tiny_folder(kind), pp_rank, dtype=dtype).model
        assert not model.training
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            assert tensor.dtype == wanted[name].dtype, name
            assert torch.equal(tensor, wanted[name]), name
            seen.add(name)
    assert seen == wanted.keys()


def test_a_stage_describes_itself(tiny_folder: Folder) -> None:
    first, last = (stage_of(tiny_folder("gemma3"), i, pp_layers=(1, 3)) for i in range(2))
    whole = load_model(ModelConfig(model=str(tiny_folder("gemma3")), device="cpu", threads=1))
    assert [shape.layer for shape in first.layers] == [0]
    assert [(shape.layer, shape.window) for shape in last.layers] == [(1, 32), (2, None), (3, 32)]
    for loaded in (first, last):
        assert loaded.num_parameters == whole.num_parameters
        assert loaded.eos_token_ids == whole.eos_token_ids
        assert loaded.fingerprint == whole.fingerprint
        assert (loaded.vocab_size, loaded.context_length) == (whole.vocab_size, whole.context_length)


@pytest.mark.parametrize("pp_layers", [(1, 1), (3,), (0, 3)])
def test_layers_that_do_not_fit_are_refused(pp_layers: tuple[int, ...], tiny_folder: Folder) -> None:
    with pytest.raises(ConfigError, match="3 layers together"):
        stage_of(tiny_folder("llama"), 0, pp_layers=pp_layers)


def test_a_model_whose_layers_need_more_than_hidden_states_has_no_stages(
    tiny_folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = modeling_llama.LlamaRotaryEmbedding.forward

    def of_embeddings(self: Any, x: torch.Tensor, position_ids: torch.Tensor) -> Any:
        cos, sin = plain(self, x, position_ids)
        return cos * x.mean(), sin

    monkeypatch.setattr(modeling_llama.LlamaRotaryEmbedding, "forward", of_embeddings)
    stage_of(tiny_folder("llama"), 0)
    with pytest.raises(ModelLoadError, match="more of the layers before them than hidden states"):
        stage_of(tiny_folder("llama"), 1)


@pytest.mark.parametrize("stage", [0, 1])
def test_a_stage_whose_layers_give_no_numbers_names_the_weights(
    stage: int, tiny_folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = modeling_llama.LlamaDecoderLayer.forward
    monkeypatch.setattr(modeling_llama.LlamaDecoderLayer, "forward", lambda *a, **k: plain(*a, **k) * float("nan"))
    with pytest.raises(ModelLoadError, match="its weights give NaN"):
        stage_of(tiny_folder("llama"), stage)


def test_a_model_whose_layers_hand_on_several_things_has_no_stages(
    tiny_folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = modeling_llama.LlamaDecoderLayer.forward
    monkeypatch.setattr(modeling_llama.LlamaDecoderLayer, "forward", lambda *a, **k: plain(*a, **k)[0])
    with pytest.raises(ModelLoadError, match="something else than hidden states"):
        stage_of(tiny_folder("llama"), 0, pp_layers=(1, 2))


def test_a_checkpoint_that_lacks_a_tensor_is_named(tiny_folder: Folder, tmp_path: Path) -> None:
    for file in tiny_folder("llama").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace('"num_hidden_layers": 3', '"num_hidden_layers": 4'))
    stage_of(tmp_path, 0)
    with pytest.raises(ModelLoadError, match=r"lack model\.layers\.3\..*and 6 more"):
        stage_of(tmp_path, 1)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (FalconConfig(**SIZES, num_attention_heads=4), "its class has attention of its own"),
        (MambaConfig(**SIZES), "it has layers of type linear_attention"),
        (RobertaConfig(**SIZES, num_attention_heads=4, is_decoder=True), "the positions of RobertaForCausalLM start"),
    ],
    ids=["falcon", "mamba", "roberta"],
)
def test_an_unsupported_model_is_rejected_as_on_one_rank(config: Any, reason: str, tmp_path: Path) -> None:
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError) as alone:
        load_model(ModelConfig(model=str(tmp_path), device="cpu", threads=1, context_length=64))
    with pytest.raises(UnsupportedModelError, match=f"{reason}.*Choose a decoder-only text model") as share:
        stage_of(tmp_path, 0, context_length=64)
    assert str(share.value) == str(alone.value)


def test_a_folder_without_safetensors_says_so(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="has no safetensors files"):
        Checkpoint(tmp_path)


def test_a_checkpoint_in_several_files_is_one(tiny_folder: Folder, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_folder("mixtral"))
    model.save_pretrained(tmp_path, max_shard_size="300KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    loaded = stage_of(tmp_path, 1).model
    for name, tensor in loaded.named_parameters():
        assert torch.equal(tensor, model.get_parameter(name)), name


def test_what_several_ranks_cannot_do_is_refused_before_anything_is_loaded() -> None:
    ranks = Ranks(ParallelRank(pp_size=2), torch.device("cpu"), [None, None], dist.HashStore())
    nowhere = ModelConfig(model="/nowhere")
    with pytest.raises(ConfigError, match="shared pool"):
        build_engine(nowhere, CacheConfig(shared_pool="/dev/shm/x"), ranks=ranks)


def test_quantization_is_for_one_rank(tiny_folder: Folder) -> None:
    with pytest.raises(ConfigError, match="quantization int8 is for models on one rank"):
        stage_of(tiny_folder("llama"), 0, quantization="int8")
