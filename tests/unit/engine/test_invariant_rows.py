"""Models in bfloat16, int8 and w8a8, without attention: a token's logits do not depend on other tokens or threads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch

from splitserve.core.config import ModelConfig
from splitserve.engine.attention.base import AttentionParams
from splitserve.engine.kernels.library import find_library
from splitserve.engine.loader import LoadedModel, load_model
from splitserve.engine.probe import LanguageHead, run_body
from support.tiny_models import TINY_KINDS, TinyKind

pytestmark = pytest.mark.skipif(find_library() is None, reason="installed without a C compiler")

# Tokens that are computed alone.
NUM_ALONE = 20
# Rows of one step. With the largest number torch divides its tensors among threads.
ROWS = (2, 3, 13, 20, 700)


class OwnTokenAttention:
    """StepAttention in which each token attends to itself only."""

    def forward(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, params: AttentionParams
    ) -> torch.Tensor:
        if params.is_latent:
            return query[..., : value.shape[-1]] + value
        return query * params.scaling + (key + value).repeat_interleave(query.shape[1] // key.shape[1], dim=1)


def logits(loaded: LoadedModel, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        hidden = run_body(loaded.model, ids[None], positions[None], OwnTokenAttention())
        return LanguageHead(loaded.model)(hidden)


@pytest.mark.parametrize("kind", TINY_KINDS)
@pytest.mark.parametrize("quantization", [None, "int8", "w8a8"])
def test_logits_of_a_token_do_not_depend_on_other_rows_or_threads(
    kind: TinyKind, quantization: str | None, tiny_folder: Callable[[TinyKind], Path]
) -> None:
    config = ModelConfig(model=str(tiny_folder(kind)), device="cpu", threads=1, dtype="bfloat16")
    loaded = load_model(msgspec.structs.replace(config, quantization=quantization))
    ids = torch.randint(0, 256, (max(ROWS),), generator=torch.Generator().manual_seed(1))
    positions = torch.randint(0, 4000, (max(ROWS),), generator=torch.Generator().manual_seed(2))
    alone = torch.cat([logits(loaded, ids[i : i + 1], positions[i : i + 1]) for i in range(NUM_ALONE)])
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        for rows in ROWS:
            found = logits(loaded, ids[:rows], positions[:rows])[:NUM_ALONE]
            assert torch.equal(found, alone[: len(found)]), (rows, threads)
