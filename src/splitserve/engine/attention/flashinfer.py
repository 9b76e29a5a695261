"""Paged attention with FlashInfer's kernels: GPUs, 16-bit pools.

1. `page_lists` converts a step to the library's format: pages of all requests in one list, the offset of each request's
   pages, and the fill of its last page. For layers with a window they begin with the first new token's window.
2. A step of one new token per request uses the library's decode kernels, any other step its prefill kernels, which take
   both kinds at once. Layers with latents have one wrapper for both (`flashinfer_latent.py`).
3. Layers with the same parameters share a wrapper of the library, planned when a step reaches the first of them.
4. `FlashInferFixedDecode` keeps one set of arrays for good, so that a CUDA graph finds the next step's data there.

Nothing is read past a request's last token, so nothing has to be zeroed there. Pages before the first one that is
attended to may have any owner, for the same reason. The library compiles its kernels on first use, which takes minutes
unless its package of compiled kernels is installed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from splitserve.engine.attention.base import AttentionParams, PagedBatch, PagedKV
from splitserve.engine.attention.flashinfer_latent import (
    LatentPlanner,
    LatentSizes,
    kernel_for,
    problem_with_latent,
)
from splitserve.engine.attention.torch_sdpa import dtype_of, first_visible, new_slots
from splitserve.engine.inputs import to_device

Int32Array = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class PageLists:
    """A step as the library's page table. R requests."""

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
_DTYPES = frozenset({"bfloat16", "float16"})
# Minimum query heads per KV head for decode on tensor cores. These are faster from there on and support any number. The
# other kernels support only some numbers.
_TENSOR_CORE_GROUP = 3

# Parts of torch.cuda have no types.
_cuda: Any = torch.cuda


def problem_with(pool: PagedKV) -> str | None:
    """Return why the kernels cannot serve such a pool; None if they can."""
    for component in pool.components:
        if component.dtype not in _DTYPES:
            return f"its kernels are for {' and '.join(sorted(_DTYPES))}, and the KV pool is {component.dtype}"
        if component.layer in pool.latents:
            if (problem := problem_with_latent(component)) is not None:
                return problem
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
    head_size: int
    params: AttentionParams

    @classmethod
    def of(cls, query: torch.Tensor, key: torch.Tensor, params: AttentionParams) -> _Kind:
        return cls(query.shape[1], key.shape[1], query.shape[2], params)

    @property
    def wants_tensor_cores(self) -> bool:
        return self.num_heads // self.num_kv_heads >= _TENSOR_CORE_GROUP

    def options(self, dtype: torch.dtype) -> dict[str, Any]:
        """Return the named arguments of `plan` of either wrapper. The library's window excludes the token itself."""
        window, softcap = self.params.window, self.params.softcap
        return {
            "sm_scale": self.params.scaling,
            "window_left": -1 if window is None else window - 1,
            "logits_soft_cap": softcap,
            "q_data_type": dtype,
            "kv_data_type": dtype,
        }


class Planner(Protocol):
    """A wrapper of the library, planned again for each step."""

    @property
    def window(self) -> int | None: ...

    def plan(self, lists: PageLists, pages: torch.Tensor, page_size: int) -> None:
        """Plan a step. `pages`: the pages of `lists`, on the device. The host reads the short arrays, too."""
        ...

    def run(self, query: torch.Tensor, layer: int) -> torch.Tensor:
        """Return the attention of one layer after its new keys and values were stored."""
        ...


class FlashInferBackend:
    """ReplayableBackend over one pool. `library` is the module. Not for two threads at a time."""

    def __init__(self, pool: PagedKV, library: Any) -> None:
        self.pool = pool
        self.library = library
        self.dtype = dtype_of(pool)
        self.workspace = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=pool.device)
        self._decoding: dict[_Kind, Planner] = {}
        self._prefilling: dict[_Kind, Planner] = {}
        self._latent: dict[LatentSizes, Planner] = {}

    def plan(self, batch: PagedBatch) -> FlashInferStep:
        return FlashInferStep(self, batch)

    def fixed_decode(self, num_requests: int, max_pages: int) -> FlashInferFixedDecode:
        return FlashInferFixedDecode(self, num_requests, max_pages)

    def prefill_planner(self, kind: _Kind) -> Planner:
        if kind not in self._prefilling:
            wrapper = self.library.BatchPrefillWithPagedKVCacheWrapper(self.workspace, "NHD")
            self._prefilling[kind] = _Planner(self, wrapper, kind, is_decode=False)
        return self._prefilling[kind]

    def decode_planner(self, kind: _Kind) -> Planner:
        if kind not in self._decoding:
            wrapper = self.library.BatchDecodeWithPagedKVCacheWrapper(
                self.workspace, "NHD", use_tensor_cores=kind.wants_tensor_cores
            )
            self._decoding[kind] = _Planner(self, wrapper, kind, is_decode=True)
        return self._decoding[kind]

    def latent_planner(self, sizes: LatentSizes) -> Planner:
        if sizes not in self._latent:
            kernel = kernel_for(self.pool.device)
            wrapper = self.library.mla.BatchMLAPagedAttentionWrapper(self.workspace, backend=kernel)
            self._latent[sizes] = LatentPlanner(self.pool, wrapper, sizes)
        return self._latent[sizes]

    def store(self, layer: int, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        if layer in self.pool.latents:
            self.pool.latents[layer].flatten(0, 1).index_copy_(0, slots, key)
            return
        self.pool.keys[layer].flatten(0, 1).index_copy_(0, slots, key)
        self.pool.values[layer].flatten(0, 1).index_copy_(0, slots, value)


class _Planner:
    """Planner of layers with keys and values."""

    def __init__(self, backend: FlashInferBackend, wrapper: Any, kind: _Kind, *, is_decode: bool) -> None:
        self.wrapper = wrapper
        self._pool = backend.pool
        self._kind = kind
        self._is_decode = is_decode
        self._options = kind.options(backend.dtype)
        # The library plans in its own page-locked memory, and the device copies from there: the previous plan must have
        # been copied. None on a CPU.
        self._copied = _cuda.Event() if backend.pool.device.type == "cuda" else None

    @property
    def window(self) -> int | None:
        return self._kind.params.window

    def plan(self, lists: PageLists, pages: torch.Tensor, page_size: int) -> None:
        if self._copied is not None:
            self._copied.synchronize()
        kind, options = self._kind, self._options
        begins, last = torch.from_numpy(lists.page_begins), torch.from_numpy(lists.last_page_tokens)
        sizes = (kind.num_heads, kind.num_kv_heads, kind.head_size, page_size)
        if self._is_decode:
            self.wrapper.plan(begins, pages, last, *sizes, **options)
        else:
            queries = torch.from_numpy(lists.query_begins)
            self.wrapper.plan(queries, begins, pages, last, *sizes, causal=True, **options)
        if self._copied is not None:
            self._copied.record()

    def run(self, query: torch.Tensor, layer: int) -> torch.Tensor:
        out: torch.Tensor = self.wrapper.run(query.contiguous(), (self._pool.keys[layer], self._pool.values[layer]))
        return out


class _StepLists:
    """The page lists of a step, one per window, and its slots, computed for the first layer that needs them."""

    def __init__(self, batch: PagedBatch, device: torch.device) -> None:
        self._batch = batch
        self._device = device
        self._made: dict[int | None, tuple[PageLists, torch.Tensor]] = {}
        # Key: whether a layer's pages are those of the windowed layers' own pool.
        self._slots: dict[bool, torch.Tensor] = {}

    def is_windowed(self, window: int | None) -> bool:
        return self._batch.is_windowed(window)

    def slots(self, window: int | None) -> torch.Tensor:
        """Return the slots in which layers with `window` store the new tokens. [T]"""
        is_windowed = self._batch.is_windowed(window)
        if is_windowed not in self._slots:
            slots = new_slots(self._batch, self._batch.pages_for(window))
            self._slots[is_windowed] = to_device(slots, self._device)
        return self._slots[is_windowed]

    def plan(self, planner: Planner) -> None:
        if planner.window not in self._made:
            lists = page_lists(self._batch, planner.window)
            self._made[planner.window] = lists, to_device(lists.pages, self._device)
        planner.plan(*self._made[planner.window], self._batch.page_size)


class _Attending(ABC):
    """StepAttention of both kinds of step: stores new KV in its slots, and has a planned wrapper per kind of layer."""

    def __init__(self, backend: FlashInferBackend) -> None:
        self._backend = backend
        self._planners: dict[_Kind | LatentSizes, Planner] = {}

    def forward(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, params: AttentionParams
    ) -> torch.Tensor:
        backend = self._backend
        backend.store(layer, self._slots_for(params.window), key, value)
        kind = LatentSizes.of(query, value, params) if params.is_latent else _Kind.of(query, key, params)
        planner = self._planners.get(kind)
        if planner is None:
            planner = self._planners[kind] = self._new_planner(kind)
        return planner.run(query, layer)

    @abstractmethod
    def _new_planner(self, kind: _Kind | LatentSizes) -> Planner:
        """Return a wrapper planned for this step."""

    @abstractmethod
    def _slots_for(self, window: int | None) -> torch.Tensor:
        """Return the slots of the new tokens, in layers with `window`. [T]"""


class FlashInferStep(_Attending):
    """StepAttention for one step."""

    def __init__(self, backend: FlashInferBackend, batch: PagedBatch) -> None:
        super().__init__(backend)
        self._lists = _StepLists(batch, backend.pool.device)
        self._is_decode = bool((batch.lengths == 1).all())

    def _slots_for(self, window: int | None) -> torch.Tensor:
        return self._lists.slots(window)

    def _new_planner(self, kind: _Kind | LatentSizes) -> Planner:
        if isinstance(kind, LatentSizes):
            planner = self._backend.latent_planner(kind)
        else:
            planner = self._backend.decode_planner(kind) if self._is_decode else self._backend.prefill_planner(kind)
        self._lists.plan(planner)
        return planner


class FlashInferFixedDecode(_Attending):
    """FixedDecode. The first `forward` creates the wrappers; it must run before any recording."""

    def __init__(self, backend: FlashInferBackend, num_requests: int, max_pages: int) -> None:
        super().__init__(backend)
        self._num_requests = num_requests
        self._max_pages = max_pages
        # Window -> arrays of a step. The library copies each step's arrays into these.
        self._buffers: dict[int | None, dict[str, torch.Tensor]] = {}
        self._lists: _StepLists | None = None
        # Key: whether layers use the windowed layers' own pool. Each step's slots are copied into these.
        self._slots: dict[bool, tuple[int | None, torch.Tensor]] = {}

    def fill(self, batch: PagedBatch) -> None:
        self._lists = _StepLists(batch, self._backend.pool.device)
        for window, slots in self._slots.values():
            slots.copy_(self._lists.slots(window))
        for planner in self._planners.values():
            self._lists.plan(planner)

    def _new_planner(self, kind: _Kind | LatentSizes) -> Planner:
        assert self._lists is not None
        planner = self._latent_planner(kind) if isinstance(kind, LatentSizes) else self._plain_planner(kind)
        self._lists.plan(planner)
        return planner

    def _slots_for(self, window: int | None) -> torch.Tensor:
        assert self._lists is not None
        is_windowed = self._lists.is_windowed(window)
        if is_windowed not in self._slots:
            self._slots[is_windowed] = window, self._lists.slots(window).clone()
        return self._slots[is_windowed][1]

    def _plain_planner(self, kind: _Kind) -> Planner:
        backend = self._backend
        wrapper = backend.library.BatchDecodeWithPagedKVCacheWrapper(
            backend.workspace,
            "NHD",
            use_cuda_graph=True,
            use_tensor_cores=kind.wants_tensor_cores,
            **self._buffers_of(kind.params.window),
        )
        return _Planner(backend, wrapper, kind, is_decode=True)

    def _latent_planner(self, sizes: LatentSizes) -> Planner:
        buffers = self._buffers_of(None)
        begins, last = buffers["paged_kv_indptr_buffer"], buffers["paged_kv_last_page_len_buffer"]
        wrapper = self._backend.library.mla.BatchMLAPagedAttentionWrapper(
            self._backend.workspace,
            use_cuda_graph=True,
            qo_indptr=torch.zeros_like(begins),
            kv_indptr=begins,
            kv_indices=buffers["paged_kv_indices_buffer"],
            kv_len_arr=torch.zeros_like(last),
            backend=kernel_for(self._backend.pool.device),
        )
        return LatentPlanner(self._backend.pool, wrapper, sizes)

    def _buffers_of(self, window: int | None) -> dict[str, torch.Tensor]:
        if window not in self._buffers:
            sizes = {
                "paged_kv_indptr_buffer": self._num_requests + 1,
                "paged_kv_indices_buffer": self._num_requests * self._max_pages,
                "paged_kv_last_page_len_buffer": self._num_requests,
            }
            device = self._backend.pool.device
            self._buffers[window] = {
                name: torch.zeros(size, dtype=torch.int32, device=device) for name, size in sizes.items()
            }
        return self._buffers[window]
