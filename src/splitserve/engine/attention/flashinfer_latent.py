"""Attention over latents (`engine/mla.py`) with FlashInfer's kernel, which computes both prompts and decodes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from splitserve.core.errors import EngineError
from splitserve.core.layout import KVComponent
from splitserve.engine.attention.base import AttentionParams, PagedKV

if TYPE_CHECKING:
    from splitserve.engine.attention.flashinfer import PageLists

# Elements of a row of DeepSeek-V2 and V3: a latent of 512, and 64 with positions. The library has kernels for these.
_ROW_SIZE = 576
# Parts of torch.cuda have no types.
_cuda: Any = torch.cuda


@dataclass(frozen=True, slots=True)
class LatentSizes:
    """Sizes that a wrapper is planned for."""

    num_heads: int
    # Elements of a latent, and of the part of a row with positions.
    rank: int
    rope_size: int
    scaling: float

    @classmethod
    def of(cls, query: torch.Tensor, value: torch.Tensor, params: AttentionParams) -> LatentSizes:
        """Return the sizes of a call. Raises EngineError if the library does not support such a call."""
        if params.window is not None or params.softcap is not None:
            raise EngineError("FlashInfer has no windows and soft caps over latents: use --attention-backend torch")
        rank = value.shape[2]
        return cls(query.shape[1], rank, query.shape[2] - rank, params.scaling)


def problem_with_latent(component: KVComponent) -> str | None:
    """Return why the kernel cannot serve such a layer; None if it can."""
    if component.head_dim != _ROW_SIZE:
        return f"its kernel for latents is for rows of {_ROW_SIZE}, and the model's have {component.head_dim}"
    return None if component.window is None else "its kernel for latents has no windows"


def kernel_for(device: torch.device) -> str:
    """Return the library's kernel that takes pages in one list, and can be planned again between replays of a graph."""
    is_hopper = device.type == "cuda" and _cuda.get_device_capability(device)[0] == 9
    return "fa3" if is_hopper else "fa2"


class LatentPlanner:
    """Planner of layers with latents."""

    def __init__(self, pool: PagedKV, wrapper: Any, sizes: LatentSizes) -> None:
        self._pool = pool
        self._wrapper = wrapper
        self._sizes = sizes
        # As in `flashinfer.py`: the previous plan must have been copied from the library's page-locked memory.
        self._copied = _cuda.Event() if pool.device.type == "cuda" else None

    @property
    def window(self) -> int | None:
        return None

    def plan(self, lists: PageLists, pages: torch.Tensor, page_size: int) -> None:
        if self._copied is not None:
            self._copied.synchronize()
        sizes = self._sizes
        arrays = (lists.query_begins, lists.page_begins, lists.num_tokens)
        queries, begins, lengths = (torch.from_numpy(array) for array in arrays)
        dtype = getattr(torch, self._pool.components[0].dtype)
        self._wrapper.plan(
            qo_indptr=queries,
            kv_indptr=begins,
            kv_indices=pages,
            kv_len_arr=lengths,
            num_heads=sizes.num_heads,
            head_dim_ckv=sizes.rank,
            head_dim_kpe=sizes.rope_size,
            page_size=page_size,
            causal=True,
            sm_scale=sizes.scaling,
            q_data_type=dtype,
            kv_data_type=dtype,
        )
        if self._copied is not None:
            self._copied.record()

    def run(self, query: torch.Tensor, layer: int) -> torch.Tensor:
        """Return the attention of one layer. query [T, num_heads, rank + rope_size]; result [T, num_heads, rank]."""
        # [num_pages, page_size, rank + rope_size]; the kernel uses strides.
        rows, rank = self._pool.latents[layer].squeeze(2), self._sizes.rank
        out: torch.Tensor = self._wrapper.run(
            q_nope=query[..., :rank],
            q_pe=query[..., rank:],
            ckv_cache=rows[..., :rank],
            kpe_cache=rows[..., rank:],
        )
        return out
