"""Models in bfloat16, float16, int8 and w8a8: a token's logits depend on its own sequence only, bit for bit."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
import transformers

from splitserve.core.config import ModelConfig
from splitserve.engine.attention.base import AttentionParams, PagedBatch
from splitserve.engine.attention.choice import choose_attention
from splitserve.engine.attention.torch_sdpa import TorchSdpaBackend
from splitserve.engine.kernels.layers import computes_all
from splitserve.engine.kernels.library import find_library
from splitserve.engine.kernels.rotations import Rotations
from splitserve.engine.loader import LoadedModel, load_model
from splitserve.engine.parallel.steps import body_and_head
from splitserve.engine.pool import KVPool, layout_for
from splitserve.engine.probe import OwnValues
from support.tiny_models import TINY_KINDS, TinyKind

pytestmark = pytest.mark.skipif(find_library() is None, reason="installed without a C compiler")

# Dtypes and quantizations.
NUMBERS = ("bfloat16", "float16", "int8", "w8a8")
# Tokens that are computed alone.
NUM_ALONE = 20
# Lengths of sequences, and their tokens in each step until they are done. 0: the sequence is not in the step.
LENGTHS = (90, 40, 17)
STEPS = ((70, 0, 1), (1, 25, 1), (1, 1, 14), *((1, 1, 1),) * 18)
PAGE_SIZE = 8
# Rows of one step. With the largest number torch divides its tensors among threads.
ROWS = (2, 3, 13, 20, 700)
# Numbers of threads of one test.
THREADS = [(1, 3), pytest.param((2,), marks=pytest.mark.soak)]


class OwnTokenAttention(OwnValues):
    """OwnValues that accepts latents, too."""

    def forward(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, params: AttentionParams
    ) -> torch.Tensor:
        if params.is_latent:
            return query[..., : value.shape[-1]] + value
        return super().forward(layer, query, key, value, params)


def logits(loaded: LoadedModel, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        body, head = body_and_head(loaded)
        hidden = body(ids[None], positions[None], OwnTokenAttention())
        assert hidden is not None
        return head(hidden)


@pytest.fixture(scope="module")
def load(tiny_folder: Callable[[TinyKind], Path]) -> Callable[[TinyKind, str], LoadedModel]:
    """Return a model in these numbers, loaded on first use."""
    return functools.cache(lambda kind, numbers: load_model(config_of(tiny_folder(kind), numbers)))


def config_of(folder: Path, numbers: str) -> ModelConfig:
    if numbers == "float16" and find_library(torch.float16) is None:
        pytest.skip("this CPU does not convert float16")
    config = ModelConfig(model=str(folder), device="cpu", threads=1, dtype="bfloat16")
    is_dtype = numbers in ("bfloat16", "float16")
    change = {"dtype": numbers} if is_dtype else {"quantization": numbers}
    return msgspec.structs.replace(config, **change)


@pytest.mark.parametrize("kind", TINY_KINDS)
@pytest.mark.parametrize("numbers", NUMBERS)
@pytest.mark.parametrize("threads", THREADS, ids=str)
def test_logits_of_a_token_do_not_depend_on_other_rows_or_threads(
    kind: TinyKind, numbers: str, threads: tuple[int, ...], load: Callable[[TinyKind, str], LoadedModel]
) -> None:
    loaded = load(kind, numbers)
    assert computes_all(loaded.model)
    ids = torch.randint(0, 256, (max(ROWS),), generator=torch.Generator().manual_seed(1))
    positions = torch.randint(0, 4000, (max(ROWS),), generator=torch.Generator().manual_seed(2))
    alone = torch.cat([logits(loaded, ids[i : i + 1], positions[i : i + 1]) for i in range(NUM_ALONE)])
    for num_threads in threads:
        torch.set_num_threads(num_threads)
        for rows in ROWS:
            found = logits(loaded, ids[:rows], positions[:rows])[:NUM_ALONE]
            assert torch.equal(found, alone[: len(found)]), (rows, num_threads)


def test_products_with_rotary_positions_do_not_depend_on_other_rows() -> None:
    generator = torch.Generator().manual_seed(0)
    rotations = torch.polar(torch.ones(500, 4), torch.randn(500, 4, generator=generator)).as_subclass(Rotations)
    rows = torch.view_as_complex(torch.randn(500, 4, 2, generator=generator))
    found = rows * rotations
    torch.testing.assert_close(found, rows * rotations.as_subclass(torch.Tensor))
    for i in range(500):
        assert torch.equal(found[i], rows[i] * rotations[i])
        assert torch.equal(found[i:], rows[i:] * rotations[i:])


class PagedSequences:
    """Sequences through a model with its own choice of attention, in any steps."""

    def __init__(self, loaded: LoadedModel) -> None:
        self._body, self._head = body_and_head(loaded)
        generator = np.random.default_rng(0)
        counts = [-(-n // PAGE_SIZE) for n in LENGTHS]
        layout = layout_for(loaded.layers, loaded.dtype_name, page_size=PAGE_SIZE, num_pages=sum(counts))
        pool = KVPool(layout, loaded.device)
        self.attention = choose_attention("auto", loaded, pool)
        self._pages = np.split(generator.permutation(sum(counts)), np.cumsum(counts)[:-1])
        self.ids = [generator.integers(0, 256, n) for n in LENGTHS]

    def step(self, parts: dict[int, range]) -> dict[int, torch.Tensor]:
        """Compute these tokens of these sequences; return the logits of each."""
        batch = PagedBatch(
            np.array([part.start for part in parts.values()]),
            np.array([len(part) for part in parts.values()]),
            tuple(self._pages[i][: -(-part.stop // PAGE_SIZE)] for i, part in parts.items()),
            PAGE_SIZE,
        )
        ids = torch.from_numpy(np.concatenate([self.ids[i][part.start : part.stop] for i, part in parts.items()]))
        with torch.inference_mode():
            positions = torch.from_numpy(batch.positions)
            hidden = self._body(ids[None], positions[None], self.attention.plan(batch))
            assert hidden is not None
            found = self._head(hidden)
        return dict(zip(parts, found.split([len(part) for part in parts.values()]), strict=True))


@pytest.mark.parametrize("kind", TINY_KINDS)
@pytest.mark.parametrize("numbers", NUMBERS)
@pytest.mark.parametrize("threads", THREADS, ids=str)
def test_logits_of_a_sequence_do_not_depend_on_chunks_or_other_sequences(
    kind: TinyKind, numbers: str, threads: tuple[int, ...], load: Callable[[TinyKind, str], LoadedModel]
) -> None:
    sequences = PagedSequences(load(kind, numbers))
    assert type(sequences.attention) is not TorchSdpaBackend
    expected = [sequences.step({i: range(n)})[i] for i, n in enumerate(LENGTHS)]
    for num_threads in threads:
        torch.set_num_threads(num_threads)
        done = [0] * len(LENGTHS)
        for lengths in STEPS:
            ends = [min(n + length, most) for n, length, most in zip(done, lengths, LENGTHS, strict=True)]
            parts = {i: range(n, end) for i, (n, end) in enumerate(zip(done, ends, strict=True)) if end > n}
            for i, found in sequences.step(parts).items():
                assert torch.equal(found, expected[i][done[i] : ends[i]]), (i, done[i], num_threads)
            done = ends
        assert done == list(LENGTHS)


@pytest.mark.parametrize("kind", TINY_KINDS)
@pytest.mark.parametrize(("numbers", "tolerance"), [("bfloat16", 0.4), ("float16", 0.06)])
def test_logprobs_are_close_to_those_of_transformers_in_float32(
    kind: TinyKind,
    numbers: str,
    tolerance: float,
    tiny_folder: Callable[[TinyKind], Path],
    load: Callable[[TinyKind, str], LoadedModel],
) -> None:
    sequences = PagedSequences(load(kind, numbers))
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_folder(kind), dtype=torch.float32).eval()
    for i, (ids, length) in enumerate(zip(sequences.ids, LENGTHS, strict=True)):
        with torch.inference_mode():
            expected = model(torch.from_numpy(ids)[None]).logits[0].log_softmax(-1)
        found = sequences.step({i: range(length)})[i].log_softmax(-1)
        assert float((found - expected).abs().mean()) < tolerance
