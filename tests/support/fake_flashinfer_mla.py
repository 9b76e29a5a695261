"""FlashInfer's wrapper for latents (`flashinfer.mla`) in plain torch, with the same arguments and results."""

from __future__ import annotations

import torch

# qo_indptr, kv_indptr, kv_indices, kv_len_arr
_Table = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


class BatchMLAPagedAttentionWrapper:
    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        use_cuda_graph: bool = False,
        qo_indptr: torch.Tensor | None = None,
        kv_indptr: torch.Tensor | None = None,
        kv_indices: torch.Tensor | None = None,
        kv_len_arr: torch.Tensor | None = None,
        *,
        backend: str,
    ) -> None:
        assert backend in ("fa2", "fa3")
        assert float_workspace_buffer.dtype is torch.uint8
        self._buffers: _Table | None = None
        if use_cuda_graph:
            assert qo_indptr is not None
            assert kv_indptr is not None
            assert kv_indices is not None
            assert kv_len_arr is not None
            assert len(kv_indptr) == len(qo_indptr) == len(kv_len_arr) + 1
            self._buffers = (qo_indptr, kv_indptr, kv_indices, kv_len_arr)

    def plan(
        self,
        *,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        kv_indices: torch.Tensor,
        kv_len_arr: torch.Tensor,
        num_heads: int,
        head_dim_ckv: int,
        head_dim_kpe: int,
        page_size: int,
        causal: bool,
        sm_scale: float,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
    ) -> None:
        self._table: _Table = (qo_indptr, kv_indptr, kv_indices, kv_len_arr)
        assert all(array.dtype is torch.int32 for array in self._table)
        assert causal
        assert q_data_type is kv_data_type
        if self._buffers is not None:
            assert len(kv_len_arr) == len(self._buffers[3]), "the batch size is fixed with CUDA graphs"
            assert len(kv_indices) <= len(self._buffers[2]), "more pages than the buffer holds"
            for buffer, array in zip(self._buffers, self._table, strict=True):
                buffer[: len(array)].copy_(array)
            self._table = self._buffers
        self._sizes = (num_heads, head_dim_ckv, head_dim_kpe)
        self._page_size, self._scale = page_size, sm_scale

    def run(
        self, *, q_nope: torch.Tensor, q_pe: torch.Tensor, ckv_cache: torch.Tensor, kpe_cache: torch.Tensor
    ) -> torch.Tensor:
        num_heads, ckv, kpe = self._sizes
        assert q_nope.shape[1:] == (num_heads, ckv)
        assert q_pe.shape[1:] == (num_heads, kpe)
        assert ckv_cache.shape[1:] == (self._page_size, ckv)
        assert kpe_cache.shape[1:] == (self._page_size, kpe)
        queries, begins, pages, lengths = (array.tolist() for array in self._table)
        out = torch.empty_like(q_nope)
        for r, length in enumerate(lengths):
            own = pages[begins[r] : begins[r + 1]]
            c, p = (cache[own].flatten(0, 1)[:length].double() for cache in (ckv_cache, kpe_cache))
            rows = slice(queries[r], queries[r + 1])
            scores = torch.einsum("qhd,kd->hqk", q_nope[rows].double(), c)
            scores += torch.einsum("qhd,kd->hqk", q_pe[rows].double(), p)
            # Queries are the last positions of the keys.
            positions = torch.arange(length - (rows.stop - rows.start), length)[:, None]
            hidden = torch.arange(length)[None, :] > positions
            weights = (scores * self._scale).masked_fill(hidden, -torch.inf).softmax(-1)
            out[rows] = torch.einsum("hqk,kd->qhd", weights, c).to(out.dtype)
        return out
