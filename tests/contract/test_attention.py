"""Every attention backend against a naive one in float64: any mix of lengths, pages, heads, windows and caps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from splitserve.core.layout import first_token_read
from splitserve.engine.attention.base import (
    AttentionBackend,
    AttentionParams,
    PagedBatch,
    StepAttention,
)
from splitserve.engine.attention.flashinfer import FlashInferBackend, FlashInferFixedDecode
from splitserve.engine.attention.kernels import KernelBackend, is_supported
from splitserve.engine.attention.torch_sdpa import TorchSdpaBackend
from splitserve.engine.kernels.library import find_library
from splitserve.engine.pool import KVPool, layout_for
from splitserve.engine.probe import LayerShape
from support import fake_flashinfer

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Backend:
    make: Callable[[KVPool], AttentionBackend]
    dtype: str = "float32"
    # Head sizes are multiples of it.
    head_size_unit: int = 1
    # Of outputs: some roundings to the dtype.
    tolerance: float = 1e-5
    # Whether values may be of another size than keys.
    unequal_sizes: bool = True
    has_latents: bool = True


def kernels(pool: KVPool) -> AttentionBackend:
    library = find_library()
    assert library is not None
    assert is_supported(pool, num_heads=2 * pool.layout.components[0].num_heads, library=library)
    return KernelBackend(pool, library)


class FixedDecodes:
    """Decode steps by the fixed decode of their size, kept from one step to the next; others as they come."""

    def __init__(self, pool: KVPool) -> None:
        self._backend = FlashInferBackend(pool, fake_flashinfer)
        self._fixed: dict[int, FlashInferFixedDecode] = {}

    def plan(self, batch: PagedBatch) -> StepAttention:
        if (batch.lengths != 1).any():
            return self._backend.plan(batch)
        size = len(batch.starts)
        if size not in self._fixed:
            self._fixed[size] = self._backend.fixed_decode(size, self._backend.pool.layout.num_pages)
        self._fixed[size].fill(batch)
        return self._fixed[size]


BACKENDS = {
    "torch_sdpa": Backend(TorchSdpaBackend),
    # The library's part is played by plain torch here; tests/gpu has the real one.
    "flashinfer": Backend(partial(FlashInferBackend, library=fake_flashinfer), unequal_sizes=False),
    "flashinfer_in_order": Backend(
        partial(FlashInferBackend, library=fake_flashinfer, in_fixed_order=True), unequal_sizes=False
    ),
    "flashinfer_fixed": Backend(FixedDecodes, unequal_sizes=False),
    "torch_sdpa_widened": Backend(partial(TorchSdpaBackend, widen=True), "bfloat16", 1, 0.02),
}
STAND_INS = ("flashinfer", "flashinfer_in_order", "flashinfer_fixed")
if find_library() is not None:
    BACKENDS["kernels"] = Backend(kernels, "bfloat16", 16, 0.02, has_latents=False)


def rounded(array: np.ndarray, dtype: str) -> np.ndarray:
    """What is left of it in the pool's dtype, as float32."""
    return torch.from_numpy(array).to(getattr(torch, dtype)).float().numpy()


@dataclass(frozen=True)
class Case:
    """One sequence of steps over a few requests."""

    page_size: int
    num_kv_heads: int
    # Query heads a KV head.
    group: int
    k_dim: int
    v_dim: int
    params: AttentionParams
    # Tokens that each request advances by, step after step; 0: it sits the step out.
    steps: tuple[tuple[int, ...], ...]
    seed: int


@st.composite
def cases(draw: st.DrawFn) -> Case:
    num_requests = draw(st.integers(1, 5))
    length = st.sampled_from([0, 1, 1, 1, 2, 5, 16, 17, 40, 256, 300])
    return Case(
        page_size=draw(st.sampled_from([1, 3, 16])),
        num_kv_heads=draw(st.integers(1, 3)),
        group=draw(st.integers(1, 3)),
        k_dim=draw(st.sampled_from([4, 8])),
        v_dim=draw(st.sampled_from([4, 8])),
        params=AttentionParams(
            scaling=draw(st.sampled_from([0.25, 1.0])),
            window=draw(st.sampled_from([None, 1, 7, 32, 1000])),
            softcap=draw(st.sampled_from([None, 2.0])),
        ),
        steps=tuple(draw(st.tuples(*[length] * num_requests)) for _ in range(draw(st.integers(1, 4)))),
        seed=draw(st.integers(0, 1000)),
    )


@st.composite
def latent_cases(draw: st.DrawFn) -> Case:
    """One KV head with the first elements of its keys as values."""
    case, k_dim = draw(cases()), draw(st.integers(5, 9))
    params = AttentionParams(case.params.scaling, is_latent=True)
    sizes = {"num_kv_heads": 1, "group": draw(st.integers(1, 9)), "k_dim": k_dim, "v_dim": draw(st.integers(1, k_dim))}
    return replace(case, params=params, **sizes)


def naive(q: np.ndarray, k: np.ndarray, v: np.ndarray, start: int, params: AttentionParams) -> np.ndarray:
    """q [n, heads, k_dim] at positions from `start`; k, v [start + n, kv_heads, dim]. One query and head at a time."""
    group = q.shape[1] // k.shape[1]
    out = np.zeros((*q.shape[:2], v.shape[2]))
    for i in range(q.shape[0]):
        first = 0 if params.window is None else max(0, start + i - params.window + 1)
        seen = slice(first, start + i + 1)
        for head in range(q.shape[1]):
            scores = k[seen, head // group] @ q[i, head] * params.scaling
            if params.softcap is not None:
                scores = params.softcap * np.tanh(scores / params.softcap)
            weights = np.exp(scores - scores.max())
            out[i, head] = weights / weights.sum() @ v[seen, head // group]
    return out


class World:
    """A pool full of garbage, and each request's keys and values beside it in plain arrays."""

    def __init__(self, case: Case, backend: str) -> None:
        self.case = case
        self.rng = np.random.default_rng(case.seed)
        totals = [sum(step[r] for step in case.steps) for r in range(len(case.steps[0]))]
        counts = [-(-total // case.page_size) for total in totals]
        self.kind = BACKENDS[backend]
        v_dim = case.v_dim if self.kind.unequal_sizes or case.params.is_latent else case.k_dim
        self.k_dim, self.v_dim = (d * self.kind.head_size_unit for d in (case.k_dim, v_dim))
        params = case.params
        shape = LayerShape(0, case.num_kv_heads, self.k_dim, self.v_dim, params.window, params.is_latent)
        layout = layout_for([shape], self.kind.dtype, page_size=case.page_size, num_pages=sum(counts) + 3)
        self.pool = KVPool(layout, torch.device("cpu"))
        sides = (self.pool.keys, self.pool.values, self.pool.latents)
        self.tensors = [tensor for side in sides for tensor in side.values()]
        for tensor in self.tensors:
            tensor.fill_(torch.nan)
        # Half of the worlds have their pages in a row, the others scattered.
        numbers = np.arange(layout.num_pages) if case.seed % 2 else self.rng.permutation(layout.num_pages)
        self.pages = np.split(numbers[: sum(counts)], np.cumsum(counts)[:-1])
        self.keys = [np.zeros((0, case.num_kv_heads, self.k_dim), np.float32) for _ in totals]
        self.values = [np.zeros((0, case.num_kv_heads, self.v_dim), np.float32) for _ in totals]
        self.backend = self.kind.make(self.pool)

    def normal(self, *shape: int) -> np.ndarray:
        return rounded(self.rng.normal(size=shape).astype(np.float32), self.kind.dtype)

    def forget(self, start: int, pages: np.ndarray) -> None:
        """A page outside the window is not read: its place in `pages` has the first page inside the window."""
        gone = first_token_read(self.case.params.window, start) // self.case.page_size
        for tensor in self.tensors:
            tensor[pages[:gone]] = torch.nan
        pages[:gone] = pages[gone]

    def step(self, lengths: tuple[int, ...]) -> None:
        """Advance the requests and compare every output row."""
        case = self.case
        active = [r for r, n in enumerate(lengths) if n]
        if not active:
            return
        starts = [len(self.keys[r]) for r in active]
        new = [lengths[r] for r in active]
        q = self.normal(sum(new), case.num_kv_heads * case.group, self.k_dim)
        k, v = (
            self.normal(sum(new), case.num_kv_heads, self.k_dim),
            self.normal(sum(new), case.num_kv_heads, self.v_dim),
        )
        if case.params.is_latent:
            v = k[..., : self.v_dim]
        used = [-(-(s + n) // case.page_size) for s, n in zip(starts, new, strict=True)]
        pages = tuple(self.pages[r][:n].astype(np.int64) for r, n in zip(active, used, strict=True))
        for start, numbers in zip(starts, pages, strict=True):
            self.forget(start, numbers)
        batch = PagedBatch(np.array(starts), np.array(new), pages, case.page_size)
        dtype = getattr(torch, self.kind.dtype)
        tensors = (torch.from_numpy(x).to(dtype) for x in (q, k, v))
        out = self.backend.plan(batch).forward(0, *tensors, case.params).float()
        assert out.shape == (sum(new), case.num_kv_heads * case.group, self.v_dim)
        for r, start, begin, end in zip(active, starts, batch.offsets[:-1], batch.offsets[1:], strict=True):
            self.keys[r] = np.concatenate((self.keys[r], k[begin:end]))
            self.values[r] = np.concatenate((self.values[r], v[begin:end]))
            expected = naive(q[begin:end].astype(np.float64), self.keys[r], self.values[r], start, case.params)
            tolerance = self.kind.tolerance
            np.testing.assert_allclose(out[begin:end].numpy(), expected, rtol=10 * tolerance, atol=tolerance)


def check_equals_naive_attention(backend: str, case: Case) -> None:
    world = World(case, backend)
    assert bool(world.pool.keys) != case.params.is_latent
    for lengths in case.steps:
        world.step(lengths)


@pytest.mark.parametrize("backend", [name for name in BACKENDS if name not in STAND_INS])
@settings(max_examples=40, deadline=None)
@given(case=cases())
def test_equals_naive_attention(backend: str, case: Case) -> None:
    check_equals_naive_attention(backend, case)


@pytest.mark.parametrize("backend", [n for n, b in BACKENDS.items() if n not in STAND_INS and b.has_latents])
@settings(max_examples=25, deadline=None)
@given(case=latent_cases())
def test_latents_equal_naive_attention(backend: str, case: Case) -> None:
    check_equals_naive_attention(backend, case)


# Half a second an example: fewer of them, and `make soak` has many.
@pytest.mark.parametrize("backend", STAND_INS)
@settings(max_examples=10, deadline=None)
@given(case=cases() | latent_cases())
def test_what_a_stand_in_is_asked_equals_naive_attention(backend: str, case: Case) -> None:
    check_equals_naive_attention(backend, case)


@pytest.mark.soak
@pytest.mark.parametrize("backend", STAND_INS)
@settings(max_examples=100, deadline=None)
@given(case=cases() | latent_cases())
def test_what_a_stand_in_is_asked_equals_naive_attention_in_many_cases(backend: str, case: Case) -> None:
    check_equals_naive_attention(backend, case)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("window", [None, 50])
def test_decoding_requests_of_very_different_lengths(backend: str, window: int | None) -> None:
    prompts = (1, 15, 16, 255, 256, 700, 1100)
    case = Case(16, 2, 3, 8, 8, AttentionParams(0.3, window), (prompts, *[(1,) * len(prompts)] * 3), seed=4)
    world = World(case, backend)
    for lengths in case.steps:
        world.step(lengths)


@pytest.mark.parametrize("backend", BACKENDS)
def test_layers_with_and_without_a_window_share_a_step(backend: str) -> None:
    kind = BACKENDS[backend]
    size = 8 * kind.head_size_unit
    shapes = [LayerShape(layer, 2, size, size, None) for layer in range(2)]
    pool = KVPool(layout_for(shapes, kind.dtype, page_size=4, num_pages=20), torch.device("cpu"))
    attention, rng = kind.make(pool), np.random.default_rng(0)
    known = [np.zeros((2, 0, 2, size), np.float32) for _ in shapes]
    # A prompt, and decodes behind it.
    for start, length in ((0, 30), (30, 1), (31, 1), (32, 1)):
        batch = PagedBatch(np.array([start]), np.array([length]), (np.arange(3, 12)[: -(-(start + length) // 4)],), 4)
        step = attention.plan(batch)
        for layer, window in enumerate((None, 5)):
            normal = (rng.normal(size=(length, heads, size)).astype(np.float32) for heads in (4, 2, 2))
            q, k, v = (rounded(x, kind.dtype) for x in normal)
            known[layer] = np.concatenate((known[layer], np.stack((k, v))), axis=1)
            params = AttentionParams(0.5, window)
            tensors = (torch.from_numpy(x).to(getattr(torch, kind.dtype)) for x in (q, k, v))
            out = step.forward(layer, *tensors, params).float().numpy()
            expected = naive(q.astype(np.float64), *known[layer], start, params)
            np.testing.assert_allclose(out, expected, rtol=10 * kind.tolerance, atol=kind.tolerance)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("window", [1, 5, 9])
def test_layers_with_windows_have_pages_of_their_own_and_what_has_left_is_nowhere(backend: str, window: int) -> None:
    kind, rng = BACKENDS[backend], np.random.default_rng(window)
    size = 8 * kind.head_size_unit
    shapes = [LayerShape(0, 2, size, size, None), LayerShape(1, 2, size, size, window)]
    layout = replace(layout_for(shapes, kind.dtype, page_size=4, num_pages=40), num_window_pages=24)
    pool = KVPool(layout, CPU)
    for tensor in (*pool.keys.values(), *pool.values.values()):
        tensor.fill_(torch.nan)
    assert (len(pool.keys[0]), len(pool.keys[1])) == (40, 24)
    attention = kind.make(pool)
    # Of two requests; those of the windowed layer's own pool change places.
    pages, windows = np.split(rng.permutation(40)[:24], 2), np.split(rng.permutation(24), 2)
    known = [[np.zeros((2, 0, 2, size), np.float32) for _ in shapes] for _ in pages]
    # Prompts in chunks, one beside a decode, then both decode.
    for step_lengths in ((17, 30), (13, 1), (1, 1), (1, 1), (1, 1)):
        starts = np.array([k[0].shape[1] for k in known])
        lengths = np.array(step_lengths)
        used = -(-(starts + lengths) // 4)
        seen = [w[:n].copy() for w, n in zip(windows, used, strict=True)]
        for numbers, start in zip(seen, starts, strict=True):
            gone = first_token_read(window, int(start)) // 4
            for tensor in (pool.keys[1], pool.values[1]):
                tensor[numbers[:gone]] = torch.nan
            numbers[:gone] = -1
        full = tuple(p[:n].astype(np.int64) for p, n in zip(pages, used, strict=True))
        batch = PagedBatch(starts, lengths, full, 4, tuple(n.astype(np.int64) for n in seen))
        step = attention.plan(batch)
        for layer, layer_window in enumerate((None, window)):
            normal = (rng.normal(size=(lengths.sum(), heads, size)).astype(np.float32) for heads in (4, 2, 2))
            q, k, v = (rounded(x, kind.dtype) for x in normal)
            tensors = (torch.from_numpy(x).to(getattr(torch, kind.dtype)) for x in (q, k, v))
            out = step.forward(layer, *tensors, AttentionParams(0.5, layer_window)).float().numpy()
            for r, (begin, end) in enumerate(zip(batch.offsets[:-1], batch.offsets[1:], strict=True)):
                rows = slice(begin, end)
                known[r][layer] = np.concatenate((known[r][layer], np.stack((k[rows], v[rows]))), axis=1)
                params = AttentionParams(0.5, layer_window)
                expected = naive(q[rows].astype(np.float64), *known[r][layer], int(starts[r]), params)
                np.testing.assert_allclose(out[rows], expected, rtol=10 * kind.tolerance, atol=kind.tolerance)


@pytest.mark.parametrize("window", [None, 3])
def test_masks_of_prompts_are_aligned_for_kernels_of_gpus_and_hide_what_they_should(window: int | None) -> None:
    layout = layout_for([LayerShape(0, 1, 8, 8, window)], "float16", page_size=4, num_pages=2)
    backend = TorchSdpaBackend(KVPool(layout, CPU))
    for num_queries, num_keys in ((1, 1), (1, 300), (2, 2), (2, 7), (5, 261), (256, 263)):
        mask = backend.causal_mask(window, num_queries, num_keys)
        distance = torch.arange(num_keys - num_queries, num_keys)[:, None] - torch.arange(num_keys)
        hidden = (distance < 0) | (distance >= (window or num_keys))
        assert mask.data_ptr() % 16 == 0
        assert torch.equal(mask == -torch.inf, hidden)
        assert torch.equal(mask == 0, ~hidden)
