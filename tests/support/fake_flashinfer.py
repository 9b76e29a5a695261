"""FlashInfer's two paged wrappers in plain torch, with the same arguments and results, for machines without a GPU.

They accept only the arguments that `engine/attention/flashinfer.py` passes, so any other argument fails. As in the real
library, a wrapper made with `use_cuda_graph` reads a step's page table from the buffers passed to its constructor and
takes one batch size.
"""

from __future__ import annotations

import torch

from support import fake_flashinfer_mla as mla

__all__ = ["BatchDecodeWithPagedKVCacheWrapper", "BatchPrefillWithPagedKVCacheWrapper", "mla"]


class _Planned:
    """Arguments of `plan`. [R]: number of requests."""

    def __init__(self, query_begins: torch.Tensor, heads: tuple[int, int, int], page_size: int, causal: bool) -> None:
        self.query_begins = query_begins
        self.num_heads, self.num_kv_heads, self.head_dim = heads
        self.page_size = page_size
        self.causal = causal


class _Wrapper:
    def __init__(self, workspace: torch.Tensor, kv_layout: str) -> None:
        assert kv_layout == "NHD"
        assert workspace.dtype is torch.uint8
        self._planned: _Planned | None = None
        self._window_left = -1
        self._softcap = 0.0
        self._scale = 1.0
        # indptr, indices, last_page_len
        self._table: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None

    def _keep(
        self,
        planned: _Planned,
        table: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        sm_scale: float,
        window_left: int,
        logits_soft_cap: float | None,
        dtypes: tuple[torch.dtype, torch.dtype],
    ) -> None:
        assert all(array.dtype is torch.int32 for array in table)
        assert dtypes[0] is dtypes[1]
        self._planned, self._table = planned, table
        self._scale, self._window_left, self._softcap = sm_scale, window_left, logits_soft_cap or 0.0

    def run(self, q: torch.Tensor, paged_kv_cache: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        planned, table = self._planned, self._table
        assert planned is not None
        assert table is not None
        keys, values = paged_kv_cache
        assert q.is_contiguous()
        assert q.shape[1:] == (planned.num_heads, planned.head_dim)
        assert keys.shape[1:] == (planned.page_size, planned.num_kv_heads, planned.head_dim)
        out = torch.empty_like(q)
        indptr, indices, last_page_len = (array.tolist() for array in table)
        begins = planned.query_begins.tolist()
        for r in range(len(begins) - 1):
            pages = indices[indptr[r] : indptr[r + 1]]
            length = (len(pages) - 1) * planned.page_size + last_page_len[r]
            k, v = (cache[pages].flatten(0, 1)[:length].double() for cache in (keys, values))
            rows = slice(begins[r], begins[r + 1])
            out[rows] = self._attend(q[rows].double(), k, v, planned).to(q.dtype)
        return out

    def _attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, planned: _Planned) -> torch.Tensor:
        group = planned.num_heads // planned.num_kv_heads
        k, v = (x.repeat_interleave(group, dim=1).transpose(0, 1) for x in (k, v))
        scores = q.transpose(0, 1) @ k.transpose(1, 2) * self._scale
        if self._softcap > 0:
            scores = self._softcap * torch.tanh(scores / self._softcap)
        # Queries are the last positions of the keys.
        positions = torch.arange(k.shape[1] - q.shape[0], k.shape[1])[:, None]
        seen = torch.arange(k.shape[1])[None, :]
        hidden = seen > positions if planned.causal else torch.zeros(1, 1, dtype=torch.bool)
        if self._window_left >= 0:
            hidden = hidden | (seen < positions - self._window_left)
        return (scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v).transpose(0, 1)


class BatchPrefillWithPagedKVCacheWrapper(_Wrapper):
    def __init__(self, workspace: torch.Tensor, kv_layout: str, backend: str = "auto") -> None:
        super().__init__(workspace, kv_layout)
        self.backend = backend

    def plan(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        *,
        causal: bool = False,
        sm_scale: float,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
        disable_split_kv: bool = False,
    ) -> None:
        self.splits = "none" if disable_split_kv else "any"
        planned = _Planned(qo_indptr, (num_qo_heads, num_kv_heads, head_dim_qk), page_size, causal)
        table = (paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
        self._keep(planned, table, sm_scale, window_left, logits_soft_cap, (q_data_type, kv_data_type))


class BatchDecodeWithPagedKVCacheWrapper(_Wrapper):
    def __init__(
        self,
        workspace: torch.Tensor,
        kv_layout: str,
        *,
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: torch.Tensor | None = None,
        paged_kv_indices_buffer: torch.Tensor | None = None,
        paged_kv_last_page_len_buffer: torch.Tensor | None = None,
    ) -> None:
        super().__init__(workspace, kv_layout)
        self._use_tensor_cores = use_tensor_cores
        self._buffers: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
        if use_cuda_graph:
            assert paged_kv_indptr_buffer is not None
            assert paged_kv_indices_buffer is not None
            assert paged_kv_last_page_len_buffer is not None
            assert len(paged_kv_indptr_buffer) == len(paged_kv_last_page_len_buffer) + 1
            self._buffers = (paged_kv_indptr_buffer, paged_kv_indices_buffer, paged_kv_last_page_len_buffer)

    def plan(
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *,
        sm_scale: float,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
        fixed_split_size: int | None = None,
    ) -> None:
        if fixed_split_size is not None:
            assert self._use_tensor_cores, "the other kernels have no pieces of one size"
            assert self._buffers is None, "the number of pieces changes between replays"
        self.splits = "any" if fixed_split_size is None else f"{fixed_split_size} pages"
        table = (indptr, indices, last_page_len)
        if self._buffers is not None:
            assert len(last_page_len) == len(self._buffers[2]), "the batch size is fixed with CUDA graphs"
            assert len(indices) <= len(self._buffers[1]), "more pages than the buffer holds"
            for buffer, array in zip(self._buffers, table, strict=True):
                buffer[: len(array)].copy_(array)
            table = self._buffers
        queries = torch.arange(len(last_page_len) + 1)
        planned = _Planned(queries, (num_qo_heads, num_kv_heads, head_dim), page_size, causal=False)
        self._keep(planned, table, sm_scale, window_left, logits_soft_cap, (q_data_type, kv_data_type))
