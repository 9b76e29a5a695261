"""Body and head of plain decoders: the same bits as transformers' code around the same modules."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from transformers.models.llama.modeling_llama import LlamaModel

from splitserve.core.config import ModelConfig
from splitserve.engine.heads.states import HiddenStateTap
from splitserve.engine.kernels.decoder import PlainDecoder, _RotaryTable, is_plain_decoder
from splitserve.engine.kernels.library import find_library
from splitserve.engine.loader import LoadedModel, load_model
from splitserve.engine.probe import LanguageHead, OwnValues, run_body
from support.tiny_models import SMALL_SHAPE

pytestmark = pytest.mark.skipif(find_library() is None, reason="installed without a C compiler")

CONFIGS = {
    "llama": transformers.LlamaConfig(**SMALL_SHAPE, attention_bias=True),
    "mistral": transformers.MistralConfig(**SMALL_SHAPE, sliding_window=16),
    "qwen2": transformers.Qwen2Config(**SMALL_SHAPE),
    "qwen3": transformers.Qwen3Config(**SMALL_SHAPE, tie_word_embeddings=True),
    "llama, positions scaled": transformers.LlamaConfig(
        **SMALL_SHAPE, rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 10_000.0}
    ),
}


def load(name: str, folder: Path, **change: Any) -> LoadedModel:
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(CONFIGS[name]).save_pretrained(folder)
    config = ModelConfig(model=str(folder), device="cpu", threads=1, dtype="bfloat16", share_weights=False)
    return load_model(msgspec.structs.replace(config, **change))


def decoder_of(loaded: LoadedModel) -> PlainDecoder:
    decoder = PlainDecoder.of(loaded.model)
    assert decoder is not None
    return decoder


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("change", [{}, {"dtype": "float16"}, {"quantization": "int8"}], ids=str)
@torch.inference_mode()
def test_states_and_logits_are_those_of_transformers_code(name: str, change: dict[str, str], tmp_path: Path) -> None:
    if change == {"dtype": "float16"} and find_library(torch.float16) is None:
        pytest.skip("this CPU does not convert float16")
    loaded = load(name, tmp_path / "model", **change)
    decoder = decoder_of(loaded)
    for count in (1, 2, 13, 70):
        ids = torch.randint(0, 101, (1, count), generator=torch.Generator().manual_seed(count))
        positions = torch.randint(0, 4000, (1, count), generator=torch.Generator().manual_seed(count))
        expected = run_body(loaded.model, ids, positions, OwnValues())
        found = decoder.body(ids, positions, OwnValues())
        assert torch.equal(found, expected)
        # Neither is zero or NaN everywhere.
        assert float(found.float().std()) > 0.1
        logits = decoder.head(found)
        assert logits.dtype == torch.float32
        assert torch.equal(logits, LanguageHead(loaded.model)(expected))


ROTARY = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(transformers.LlamaConfig(**SMALL_SHAPE))


@given(st.lists(st.lists(st.integers(0, 70_000), min_size=1, max_size=9), min_size=1, max_size=4))
@torch.inference_mode()
def test_rows_of_the_table_are_those_of_the_module(steps: list[list[int]]) -> None:
    table, like = _RotaryTable(ROTARY), torch.zeros(1, 1, 4, dtype=torch.bfloat16)
    for positions in map(torch.tensor, steps):
        for found, expected in zip(table.rows(positions, like), ROTARY(like, positions[None]), strict=True):
            assert torch.equal(found, expected)


@pytest.mark.parametrize("after_layers", [(), (0,), (1,)])
@torch.inference_mode()
def test_a_draft_head_captures_states(after_layers: tuple[int, ...], tmp_path: Path) -> None:
    loaded = load("llama", tmp_path / "model")
    decoder, ids = decoder_of(loaded), torch.arange(5)[None]
    before = decoder.body(ids, ids, OwnValues()).clone()
    tap = HiddenStateTap(loaded.model, after_layers)
    assert torch.equal(decoder.body(ids, ids, OwnValues()), before)
    # The outputs of layers are those before the last norm.
    assert torch.equal(tap.take(), before) == (not after_layers)


def test_models_of_another_kind_keep_transformers_code(tmp_path: Path) -> None:
    assert PlainDecoder.of(load("llama", tmp_path / "model", dtype="float32").model) is None
    model = load("llama", tmp_path / "model").model
    assert is_plain_decoder(model)
    model.base_model.rotary_emb.config.rope_parameters["rope_type"] = "dynamic"
    assert not is_plain_decoder(model)


@pytest.fixture
def other_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    """A version of transformers in which the body of Llama computes something else."""
    forward = LlamaModel.forward

    def doubled(*args: Any, **given: Any) -> Any:
        out = forward(*args, **given)
        out.last_hidden_state = out.last_hidden_state * 2
        return out

    monkeypatch.setattr(LlamaModel, "forward", doubled)


@pytest.mark.usefixtures("other_forward")
@pytest.mark.parametrize("share_weights", [False, True])
def test_a_model_that_computes_something_else_keeps_transformers_code(
    share_weights: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPLITSERVE_CACHE", str(tmp_path / "cache"))
    # The second load maps the weights of the first, if they are shared.
    for _ in range(2):
        assert PlainDecoder.of(load("llama", tmp_path / "model", share_weights=share_weights).model) is None
    assert "computed by transformers' code" in caplog.text
