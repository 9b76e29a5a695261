"""Latent attention: logits are transformers', the pool has latents and nothing else, any part of the heads will do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from splitserve.core.config import ModelConfig
from splitserve.core.errors import ModelLoadError
from splitserve.engine.attention.base import AttentionBackend, PagedBatch
from splitserve.engine.attention.flashinfer import FlashInferBackend
from splitserve.engine.attention.torch_sdpa import TorchSdpaBackend
from splitserve.engine.loader import LoadedModel, load_model
from splitserve.engine.mla import UpProjection, use_latents
from splitserve.engine.pool import KVPool, layout_for
from support import fake_flashinfer
from support.tiny_models import MLA_KINDS, TinyKind

# On both sides of page, chunk and block borders; the last one is beyond the context that _YARN stretches.
LENGTHS = (1, 2, 15, 16, 17, 65, 300, 1100)
NUM_DECODED = 6
# Elements of a row, and of its latent.
ROW, RANK = 40, 32

BACKENDS: dict[str, Callable[[KVPool], AttentionBackend]] = {
    "torch": TorchSdpaBackend,
    "flashinfer": lambda pool: FlashInferBackend(pool, fake_flashinfer),
}


def prompts(vocab_size: int, lengths: Sequence[int] = LENGTHS) -> list[list[int]]:
    rng = np.random.default_rng(3)
    return [rng.integers(0, vocab_size, n + NUM_DECODED).tolist() for n in lengths]


class PagedForward:
    """Sequences through the model by pages, any number of tokens of each at a time. Keeps all logits."""

    def __init__(self, loaded: LoadedModel, sequences: list[list[int]], page_size: int, backend: str = "torch") -> None:
        self._loaded, self._sequences, self._page_size = loaded, sequences, page_size
        counts = [-(-len(s) // page_size) for s in sequences]
        layout = layout_for(loaded.layers, loaded.dtype_name, page_size=page_size, num_pages=sum(counts) + 1)
        self.pool = KVPool(layout, torch.device("cpu"))
        for rows in self.pool.latents.values():
            rows.fill_(torch.nan)
        self._attention = BACKENDS[backend](self.pool)
        numbers = np.random.default_rng(0).permutation(sum(counts))
        self._pages = np.split(numbers, np.cumsum(counts)[:-1])
        self._done = [0] * len(sequences)
        self.logits: list[list[torch.Tensor]] = [[] for _ in sequences]

    def step(self, lengths: Sequence[int]) -> None:
        """The next tokens of each; 0: it sits the step out."""
        active = [i for i, n in enumerate(lengths) if n]
        starts, new = ([values[i] for i in active] for values in (self._done, lengths))
        pages = [self._pages[i][: -(-(self._done[i] + lengths[i]) // self._page_size)] for i in active]
        batch = PagedBatch(np.array(starts), np.array(new), tuple(pages), self._page_size)
        tokens = [t for i in active for t in self._sequences[i][self._done[i] : self._done[i] + lengths[i]]]
        with torch.inference_mode():
            out = self._loaded.model(
                input_ids=torch.tensor([tokens]),
                position_ids=torch.from_numpy(batch.positions)[None],
                use_cache=False,
                step_attention=self._attention.plan(batch),
            )
        for i, logits in zip(active, out.logits[0].float().split(new), strict=True):
            self._done[i] += lengths[i]
            self.logits[i].append(logits)

    def run(self, chunk: int) -> list[torch.Tensor]:
        """Prompts by `chunk` tokens a step, the last tokens of each one by one; logits of each sequence."""
        while any(done < len(s) for done, s in zip(self._done, self._sequences, strict=True)):
            ends = [max(len(s) - NUM_DECODED, d + 1) for d, s in zip(self._done, self._sequences, strict=True)]
            left = [min(e, len(s)) - d for e, d, s in zip(ends, self._done, self._sequences, strict=True)]
            self.step([min(chunk, n) for n in left])
        return [torch.cat(parts) for parts in self.logits]


@pytest.fixture(scope="module")
def expected(tiny_folder: Callable[[TinyKind], Path]) -> Callable[[TinyKind], list[torch.Tensor]]:
    """Logits of transformers' eager attention, a sequence at a time."""
    found: dict[TinyKind, list[torch.Tensor]] = {}

    def logits(kind: TinyKind) -> list[torch.Tensor]:
        if kind not in found:
            model = transformers.AutoModelForCausalLM.from_pretrained(
                tiny_folder(kind), dtype=torch.float32, attn_implementation="eager"
            ).eval()
            with torch.inference_mode():
                found[kind] = [model(torch.tensor([s])).logits[0] for s in prompts(model.config.vocab_size)]
        return found[kind]

    return logits


@pytest.mark.parametrize("kind", MLA_KINDS)
@pytest.mark.parametrize(
    ("page_size", "chunk", "backend"), [(1, 64, "torch"), (16, 7, "torch"), (5, 2048, "torch"), (16, 300, "flashinfer")]
)
def test_logits_equal_transformers_eager(
    kind: TinyKind,
    page_size: int,
    chunk: int,
    backend: str,
    tiny_model: Callable[[TinyKind], LoadedModel],
    expected: Callable[[TinyKind], list[torch.Tensor]],
) -> None:
    loaded = tiny_model(kind)
    found = PagedForward(loaded, prompts(loaded.vocab_size), page_size, backend).run(chunk)
    for ours, theirs in zip(found, expected(kind), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)


SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "initializer_range": 0.3,
    "max_position_embeddings": 2048,
    "pad_token_id": 0,
    "kv_lora_rank": 16,
    "q_lora_rank": 12,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
}
EXPERTS: dict[str, Any] = {
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}


@pytest.mark.parametrize(
    "config",
    [
        transformers.MiniCPM3Config(**SMALL),
        transformers.Glm4MoeLiteConfig(**SMALL, **EXPERTS, mlp_layer_types=["dense", "sparse"]),
        transformers.YoutuConfig(**SMALL),
    ],
    ids=["minicpm3", "glm4-moe-lite", "youtu"],
)
def test_other_families_with_latents(config: Any, tmp_path: Path) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    loaded = load_model(ModelConfig(model=str(tmp_path), device="cpu", threads=1))
    assert all(shape.is_latent for shape in loaded.layers)
    reference = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    sequences = prompts(64, (5, 40, 100))
    for ours, tokens in zip(PagedForward(loaded, sequences, 16).run(33), sequences, strict=True):
        with torch.inference_mode():
            theirs = reference(torch.tensor([tokens])).logits[0]
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)


@pytest.mark.parametrize("kind", MLA_KINDS)
def test_bfloat16_differs_by_roundings(
    kind: TinyKind, tiny_folder: Callable[[TinyKind], Path], expected: Callable[[TinyKind], list[torch.Tensor]]
) -> None:
    loaded = load_model(ModelConfig(model=str(tiny_folder(kind)), device="cpu", threads=1, dtype="bfloat16"))
    found = torch.cat(PagedForward(loaded, prompts(loaded.vocab_size), 16).run(64))
    exact = torch.cat(expected(kind))
    # Some tokens go to other experts: nearly all must be close, and not each of them.
    off = (found - exact).abs().amax(-1) / exact.abs().amax(-1)
    assert off.median() < 0.05
    assert (found.argmax(-1) == exact.argmax(-1)).float().mean() > 0.7


@pytest.mark.parametrize("kind", MLA_KINDS)
def test_the_pool_holds_one_row_a_token_and_layer(
    kind: TinyKind, tiny_model: Callable[[TinyKind], LoadedModel]
) -> None:
    loaded = tiny_model(kind)
    layout = layout_for(loaded.layers, loaded.dtype_name, page_size=16, num_pages=4)
    assert [(c.name, c.layer, c.num_heads, c.total_heads, c.head_dim) for c in layout.components] == [
        ("latent", layer, 1, 1, ROW) for layer in range(3)
    ]
    assert layout.bytes_per_token == 3 * ROW * 4
    pool = KVPool(layout, torch.device("cpu"))
    assert (pool.keys, pool.values) == ({}, {})


def test_a_model_with_heads_of_its_own_has_no_latents(tiny_model: Callable[[TinyKind], LoadedModel]) -> None:
    layers = tiny_model("llama").layers
    own = layout_for(layers, "float32", page_size=16, num_pages=4)
    assert {c.name for c in own.components} == {"k", "v"}
    both = layout_for(layers, "float32", page_size=16, num_pages=4, draft=tiny_model("deepseek_v3").layers)
    assert {c.name for c in both.components} == {"k", "v", "draft_latent"}


def test_saved_latents_come_back_into_other_pages(tiny_model: Callable[[TinyKind], LoadedModel]) -> None:
    layout = layout_for(tiny_model("deepseek_v3").layers, "float32", page_size=4, num_pages=6)
    pool = KVPool(layout, torch.device("cpu"))
    for rows in pool.latents.values():
        rows.copy_(torch.randn(rows.shape))
    before = {layer: rows.clone() for layer, rows in pool.latents.items()}
    copy = pool.save([4, 1])
    assert sum(part.nbytes for part in copy.parts) == 2 * pool.bytes_per_page
    pool.restore(copy, 0, [0, 5])
    for layer, rows in pool.latents.items():
        assert torch.equal(rows[[0, 5]], before[layer][[4, 1]])


def heads_of(attention: Any, first: int, last: int) -> Any:
    """A shard of an attention module with the heads [first, last), as tensor parallelism cuts it."""
    config = attention.config
    part = type(attention)(config, attention.layer_idx).eval()
    part.load_state_dict(attention.state_dict())
    query = config.qk_nope_head_dim + config.qk_rope_head_dim
    both = config.qk_nope_head_dim + config.v_head_dim
    for name, size in (("q_b_proj", query), ("kv_b_proj", both)):
        linear = getattr(part, name)
        linear.weight = torch.nn.Parameter(linear.weight[first * size : last * size])
    value = config.v_head_dim
    part.o_proj.weight = torch.nn.Parameter(part.o_proj.weight[:, first * value : last * value])
    return part


@pytest.fixture
def attention(tiny_folder: Callable[[TinyKind], Path]) -> Any:
    """Of a model as transformers loads it."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tiny_folder("deepseek_v3"), attn_implementation="splitserve_paged"
    )
    return model.model.layers[1].self_attn.eval()


def test_shards_of_the_heads_over_the_whole_latent_sum_up(
    attention: Any, tiny_model: Callable[[TinyKind], LoadedModel]
) -> None:
    loaded = tiny_model("deepseek_v3")
    states = torch.randn(1, 20, 96, generator=torch.Generator().manual_seed(0))
    batch = PagedBatch(np.array([0]), np.array([20]), (np.arange(5),), 4)
    positions = torch.from_numpy(batch.positions)[None]

    def output(module: Any) -> torch.Tensor:
        use_latents(module, "a shard")
        layout = layout_for(loaded.layers, "float32", page_size=4, num_pages=5)
        with torch.inference_mode():
            return module(
                hidden_states=states,
                position_embeddings=loaded.model.model.rotary_emb(states, positions),
                attention_mask=None,
                step_attention=TorchSdpaBackend(KVPool(layout, torch.device("cpu"))).plan(batch),
            )[0]

    with torch.inference_mode(False), torch.no_grad():
        shards = [heads_of(attention, first, first + 2) for first in (0, 2, 4)]
    torch.testing.assert_close(sum(output(shard) for shard in shards), output(attention), rtol=0, atol=1e-5)


def test_a_model_that_makes_other_keys_of_its_latents_is_refused(
    attention: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    expand = type(attention).expand_kv
    monkeypatch.setattr(type(attention), "expand_kv", lambda self, c, r: (lambda k, v: (2 * k, v))(*expand(self, c, r)))
    with pytest.raises(ModelLoadError, match=r"Model strange: .*not known here"):
        use_latents(torch.nn.ModuleList([attention]), "strange")


def test_absorbing_and_expanding_undo_nothing_but_the_up_projection() -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(2 * (3 + 4), 5, generator=generator, dtype=torch.float64)
    up = UpProjection(weight, key_size=3, value_size=4)
    query = torch.randn(6, 2, 3 + 2, generator=generator, dtype=torch.float64)
    row = torch.randn(5 + 2, generator=generator, dtype=torch.float64)
    keys = (weight.view(2, 7, 5) @ row[:5])[:, :3]
    scores = (query[..., :3] * keys).sum(-1) + query[..., 3:] @ row[5:]
    torch.testing.assert_close(up.absorb(query) @ row, scores)
    values = (weight.view(2, 7, 5) @ row[:5])[:, 3:]
    torch.testing.assert_close(up.expand(row[:5].expand(6, 2, 5)), values.expand(6, 2, 4))
