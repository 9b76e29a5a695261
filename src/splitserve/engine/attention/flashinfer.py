"""Paged attention with FlashInfer's kernels: GPUs, 16-bit pools.

1. `page_lists` converts a step to the library's format: pages of all requests in one list, the offset of each request's
   pages, and the fill of its last page. For layers with a window they begin with the first new token's window.
2. A step of one new token per request uses the library's decode kernels, any other step its prefill kernels, which take
   both kinds at once. Layers with latents (`engine/mla.py`) have one wrapper for both.
3. Layers with the same parameters share a wrapper of the library, planned when a step reaches the first of them.
4. `FlashInferFixedDecode` keeps one set of arrays for good, so that a CUDA graph finds the next step's data there.
5. With `in_fixed_order` a token of a decode step sums its keys in pieces of one size, whatever else is in the step. A
   prompt sums them in one piece. The two orders differ, and a prompt's also depends on the lengths in its step.

Nothing is read past a request's last token, so nothing has to be zeroed there. Pages before the first one that is
attended to may have any owner, for the same reason. The library compiles its kernels on first use, which takes minutes
unless its package of compiled kernels is installed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from splitserve.core.errors import EngineError
from splitserve.engine.attention.base import AttentionParams, PagedBatch, PagedKV
from splitserve.engine.attention.torch_sdpa import dtype_of, first_visible, new_slots
from splitserve.engine.inputs import to_device

Int32Array = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class PageLists:
    """Page table of a step in the library's form, for R requests."""

    # Request r's new tokens are [query_begins[r], query_begins[r + 1]) of the step. [R + 1]
    query_begins: Int32Array
    # Its pages are pages[page_begins[r]:page_begins[r + 1]]. [R + 1]
    page_begins: Int32Array
    pages: Int32Array
    # Tokens in each request's last page, in [1, page_size]. [R]
    last_page_tokens: Int32Array
    # Tokens of each request, new ones included. [R]
    num_tokens: Int32Array


def page_lists(batch: PagedBatch, window: int | None = None) -> PageLists:
    """Return the lists for layers with `window`, without the pages before it, because positions count from the end."""
    firsts = (first_visible(batch.starts, window) // batch.page_size).tolist()
    seen = [pages[first:] for pages, first in zip(batch.pages_for(window), firsts, strict=True)]
    counts = np.array([len(pages) for pages in seen], np.int64)
    ends = batch.starts + batch.lengths
    return PageLists(
        query_begins=batch.offsets.astype(np.int32),
        page_begins=np.concatenate((np.zeros(1, np.int64), np.cumsum(counts))).astype(np.int32),
        pages=np.concatenate(seen).astype(np.int32),
        last_page_tokens=((ends - 1) % batch.page_size + 1).astype(np.int32),
        num_tokens=ends.astype(np.int32),
    )


# The library's recommendation for the partial results of long contexts. All wrappers share it: they run in turn.
_WORKSPACE_BYTES = 128 << 20
# Key, value and query sizes with compiled kernels.
_HEAD_SIZES = frozenset({64, 128, 256})
# Elements of a row of DeepSeek-V2 and V3: a latent of 512, and 64 with positions. The library has kernels for these.
_LATENT_ROW_SIZE = 576
_DTYPES = frozenset({"bfloat16", "float16"})
# Minimum query heads per KV head for which decode uses the kernels for tensor cores. From this number on these are
# faster. They support any number; the other kernels support only some.
_TENSOR_CORE_GROUP = 3

# Tokens of a piece of the keys of a decode step in fixed order.
_PIECE_TOKENS = 2048

# Parts of torch.cuda have no types.
_cuda: Any = torch.cuda


def problem_with(pool: PagedKV) -> str | None:
    """Return why the kernels cannot serve such a pool; None if they can."""
    for component in pool.components:
        if component.dtype not in _DTYPES:
            return f"its kernels are for {' and '.join(sorted(_DTYPES))}, and the KV pool is {component.dtype}"
        if component.layer in pool.latents:
            if component.head_dim != _LATENT_ROW_SIZE:
                found = component.head_dim
                return f"its kernel for latents is for rows of {_LATENT_ROW_SIZE}, and the model's have {found}"
            if component.window is not None:
                return "its kernel for latents has no windows"
        elif component.head_dim not in _HEAD_SIZES:
            sizes = ", ".join(map(str, sorted(_HEAD_SIZES)))
            return f"its kernels are for heads of {sizes}, and the model's have {component.head_dim}"
    if any(pool.keys[layer].shape != pool.values[layer].shape for layer in pool.keys):
        return "its kernels want keys and values of one size"
    return None


@dataclass(frozen=True, slots=True)
class _Kind:
    """Parameters that a wrapper is planned for."""

    num_heads: int
    num_kv_heads: int
    # Elements of a query, and of a value. A latent is the value of its row.
    head_size: int
    value_size: int
    params: AttentionParams
    in_fixed_order: bool

    def new_wrapper(self, library: Any, workspace: torch.Tensor, *, is_decode: bool, **fixed: Any) -> Any:
        """Return a wrapper of the library. `fixed`: arrays that keep their addresses, for CUDA graphs."""
        if self.params.is_latent:
            if self.params.window is not None or self.params.softcap is not None:
                raise EngineError("FlashInfer has no windows and soft caps over latents: use --attention-backend torch")
            # Kernels that take pages in one list, and can be planned again between replays of a graph.
            is_hopper = workspace.is_cuda and _cuda.get_device_capability(workspace.device)[0] == 9
            return library.mla.BatchMLAPagedAttentionWrapper(workspace, backend="fa3" if is_hopper else "fa2", **fixed)
        if is_decode:
            # Pieces of one size exist on tensor cores only.
            on_tensor_cores = self.in_fixed_order or self.num_heads // self.num_kv_heads >= _TENSOR_CORE_GROUP
            return library.BatchDecodeWithPagedKVCacheWrapper(
                workspace, "NHD", use_tensor_cores=on_tensor_cores, **fixed
            )
        if self.in_fixed_order:
            # All other kernels choose the order of sums by the whole step.
            fixed["backend"] = "fa2"
        return library.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", **fixed)

    def order_options(self, page_size: int, *, is_decode: bool) -> dict[str, Any]:
        """Return the options of a plan that fix the order of sums."""
        if not self.in_fixed_order:
            return {}
        if is_decode:
            return {"fixed_split_size": max(1, _PIECE_TOKENS // page_size)}
        # Partial results of all rows of a prompt would exceed the workspace.
        return {"disable_split_kv": True}


class FlashInferBackend:
    """AttentionBackend over one pool, also for recorded decode steps. `library`: module. For one thread at a time.

    `in_fixed_order`: the number of thread blocks of a step then depends on its context, so it cannot be recorded.
    """

    def __init__(self, pool: PagedKV, library: Any, *, in_fixed_order: bool = False) -> None:
        self.pool = pool
        self.in_fixed_order = in_fixed_order
        self._library = library
        self._workspace = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=pool.device)
        self._planners: dict[tuple[_Kind, bool], _Planner] = {}

    def plan(self, batch: PagedBatch) -> FlashInferStep:
        return FlashInferStep(self, batch)

    def fixed_decode(self, num_requests: int, max_pages: int) -> FlashInferFixedDecode:
        """Return the attention for steps of `num_requests` requests, each with at most `max_pages` pages."""
        return FlashInferFixedDecode(self, num_requests, max_pages)

    def planner(self, kind: _Kind, *, is_decode: bool) -> _Planner:
        """Return the wrapper for steps of this kind, which is planned again for each step."""
        key = (kind, is_decode or kind.params.is_latent)
        if key not in self._planners:
            self._planners[key] = self.new_planner(kind, is_decode=is_decode)
        return self._planners[key]

    def new_planner(self, kind: _Kind, *, is_decode: bool, **fixed: Any) -> _Planner:
        wrapper = kind.new_wrapper(self._library, self._workspace, is_decode=is_decode, **fixed)
        return _Planner(self.pool, wrapper, kind, is_decode=is_decode)


class _Planner:
    """A wrapper of the library, planned again for each step."""

    def __init__(self, pool: PagedKV, wrapper: Any, kind: _Kind, *, is_decode: bool) -> None:
        self.wrapper = wrapper
        self.window = kind.params.window
        self._pool = pool
        self._kind = kind
        self._is_decode = is_decode
        dtype = dtype_of(pool)
        self._options: dict[str, Any] = {
            "sm_scale": kind.params.scaling,
            "q_data_type": dtype,
            "kv_data_type": dtype,
        }
        if not kind.params.is_latent:
            # The library's window excludes the token itself.
            self._options["window_left"] = -1 if self.window is None else self.window - 1
            self._options["logits_soft_cap"] = kind.params.softcap
        # The library plans in its own page-locked memory, and the device copies from there: the previous plan must have
        # been copied. None on a CPU.
        self._copied = _cuda.Event() if pool.device.type == "cuda" else None

    def plan(self, lists: PageLists, pages: torch.Tensor, page_size: int) -> None:
        """Plan a step. `pages`: the pages of `lists`, on the device. The host reads the short arrays, too."""
        if self._copied is not None:
            self._copied.synchronize()
        kind, plan = self._kind, self.wrapper.plan
        queries, begins = torch.from_numpy(lists.query_begins), torch.from_numpy(lists.page_begins)
        last = torch.from_numpy(lists.last_page_tokens)
        sizes = (kind.num_heads, kind.num_kv_heads, kind.head_size, page_size)
        order = kind.order_options(page_size, is_decode=self._is_decode)
        if kind.params.is_latent:
            plan(
                qo_indptr=queries,
                kv_indptr=begins,
                kv_indices=pages,
                kv_len_arr=torch.from_numpy(lists.num_tokens),
                num_heads=kind.num_heads,
                head_dim_ckv=kind.value_size,
                head_dim_kpe=kind.head_size - kind.value_size,
                page_size=page_size,
                causal=True,
                **self._options,
            )
        elif self._is_decode:
            plan(begins, pages, last, *sizes, **self._options, **order)
        else:
            plan(queries, begins, pages, last, *sizes, causal=True, **self._options, **order)
        if self._copied is not None:
            self._copied.record()

    def run(self, query: torch.Tensor, layer: int) -> torch.Tensor:
        """Return the attention of one layer after its new keys and values were stored."""
        out: torch.Tensor
        if not self._kind.params.is_latent:
            out = self.wrapper.run(query.contiguous(), (self._pool.keys[layer], self._pool.values[layer]))
            return out
        # [num_pages, page_size, row size]; the kernel uses strides.
        rows, rank = self._pool.latents[layer].squeeze(2), self._kind.value_size
        out = self.wrapper.run(
            q_nope=query[..., :rank], q_pe=query[..., rank:], ckv_cache=rows[..., :rank], kpe_cache=rows[..., rank:]
        )
        return out


class FlashInferStep:
    """StepAttention for one step. Lists, slots and wrappers are made for the first layer that needs them."""

    def __init__(self, backend: FlashInferBackend, batch: PagedBatch) -> None:
        self._backend = backend
        self._pool = backend.pool
        self._batch = batch
        self._planners: dict[_Kind, _Planner] = {}
        # By window.
        self._lists: dict[int | None, tuple[PageLists, torch.Tensor]] = {}
        # Key: whether a layer's pages are those of the windowed layers' own pool.
        self._slots: dict[bool, torch.Tensor] = {}

    def forward(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, params: AttentionParams
    ) -> torch.Tensor:
        is_windowed = self._batch.is_windowed(params.window)
        if is_windowed not in self._slots:
            self._slots[is_windowed] = self._new_slots(is_windowed=is_windowed)
        slots = self._slots[is_windowed]
        if params.is_latent:
            self._pool.latents[layer].flatten(0, 1).index_copy_(0, slots, key)
        else:
            self._pool.keys[layer].flatten(0, 1).index_copy_(0, slots, key)
            self._pool.values[layer].flatten(0, 1).index_copy_(0, slots, value)
        in_order = self._backend.in_fixed_order
        kind = _Kind(query.shape[1], key.shape[1], query.shape[2], value.shape[2], params, in_order)
        planner = self._planners.get(kind)
        if planner is None:
            planner = self._planners[kind] = self._new_planner(kind)
            self._plan(planner)
        return planner.run(query, layer)

    def _new_slots(self, *, is_windowed: bool) -> torch.Tensor:
        """Return the slots of the new tokens, in one of the two pools. [T]"""
        window_pages = self._batch.window_pages if is_windowed else None
        return to_device(new_slots(self._batch, window_pages or self._batch.pages), self._pool.device)

    def _new_planner(self, kind: _Kind) -> _Planner:
        return self._backend.planner(kind, is_decode=bool((self._batch.lengths == 1).all()))

    def _plan(self, planner: _Planner) -> None:
        if planner.window not in self._lists:
            lists = page_lists(self._batch, planner.window)
            self._lists[planner.window] = lists, to_device(lists.pages, self._pool.device)
        planner.plan(*self._lists[planner.window], self._batch.page_size)


class FlashInferFixedDecode(FlashInferStep):
    """StepAttention for any number of steps, each with the same number of requests with one new token.

    Its tensors keep their addresses, so a recording of one step (a CUDA graph) computes the next one after `fill`. The
    first `forward` creates the wrappers; it must run before any recording.
    """

    def __init__(self, backend: FlashInferBackend, num_requests: int, max_pages: int) -> None:
        super().__init__(backend, PagedBatch(np.zeros(0, np.int64), np.zeros(0, np.int64), (), 1))
        self._sizes = (num_requests + 1, num_requests * max_pages, num_requests)
        # By window: buffers for the start of each request's pages, the pages, and the number of tokens in each last
        # page. The library copies the arrays of each step into them.
        self._buffers: dict[int | None, list[torch.Tensor]] = {}

    def fill(self, batch: PagedBatch) -> None:
        """Load the next step. Call before the first `forward`, and between two."""
        self._batch = batch
        self._lists.clear()
        for is_windowed, slots in self._slots.items():
            slots.copy_(self._new_slots(is_windowed=is_windowed))
        for planner in self._planners.values():
            self._plan(planner)

    def _new_slots(self, *, is_windowed: bool) -> torch.Tensor:
        # A copy: on a CPU the tensor shares the memory of its array.
        return super()._new_slots(is_windowed=is_windowed).clone()

    def _new_planner(self, kind: _Kind) -> _Planner:
        window = kind.params.window
        if window not in self._buffers:
            device = self._pool.device
            self._buffers[window] = [torch.zeros(size, dtype=torch.int32, device=device) for size in self._sizes]
        begins, pages, last = self._buffers[window]
        if kind.params.is_latent:
            buffers = {
                "qo_indptr": torch.zeros_like(begins),
                "kv_indptr": begins,
                "kv_indices": pages,
                "kv_len_arr": torch.zeros_like(last),
            }
        else:
            buffers = {
                "paged_kv_indptr_buffer": begins,
                "paged_kv_indices_buffer": pages,
                "paged_kv_last_page_len_buffer": last,
            }
        return self._backend.new_planner(kind, is_decode=True, use_cuda_graph=True, **buffers)
