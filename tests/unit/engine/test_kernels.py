"""The kernels in C against torch, in each build that this CPU can run."""

from __future__ import annotations

import ctypes
import importlib.util
from pathlib import Path

import pytest
import torch
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from splitserve.engine.kernels.groups import quantize
from splitserve.engine.kernels.library import KernelLibrary, NormArgs, RotateArgs, StoreArgs, find_library
from splitserve.engine.kernels.weights import Kind, PackedGateUp, PackedLinear, Scratch

pytestmark = pytest.mark.skipif(find_library() is None, reason="installed without a C compiler")

# Kinds of weights that are packed from floats.
FLOAT_KINDS = (Kind.BF16, Kind.INT8, Kind.W8A8, Kind.PAIRS)


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    """One rounding to bfloat16, of numbers around 1."""
    torch.testing.assert_close(found.float(), expected.float(), rtol=0.01, atol=0.01)


def product(kind: Kind, weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """x W^T in float32, with what the kind makes of both."""
    if kind in (Kind.BF16, Kind.PAIRS):
        return x.float() @ weight.float().T
    integers, scales = quantize(weight)
    if kind is Kind.INT8:
        return x.float() @ (integers.float() * scales[:, None]).T
    most = x.float().abs().amax(-1, keepdim=True)
    # Not 127 / most, for which torch multiplies with a rounded reciprocal.
    factors = torch.where(most > 0, torch.full_like(most, 127) / most, 0.0)
    rows = (x.float() * factors).round().to(torch.int64)
    return (rows @ integers.to(torch.int64).T).float() * (most / 127) * scales


def test_builds_differ_in_their_vectors() -> None:
    found = find_library()
    spec = importlib.util.find_spec("splitserve._native.kernels_any")
    assert spec is not None
    assert spec.origin is not None
    narrow = KernelLibrary(Path(spec.origin))
    assert found is not None
    assert narrow.lanes == 4
    if torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512"):
        assert found.lanes > narrow.lanes


@pytest.mark.parametrize("kind", FLOAT_KINDS)
@pytest.mark.parametrize("rows", [0, 1, 2, 3, 5, 6, 7, 12, 13, 50, 485])
@pytest.mark.parametrize(("num_inputs", "num_outputs"), [(1, 1), (3, 17), (64, 48), (40, 129), (96, 64)])
def test_a_packed_linear_is_a_linear(
    library: KernelLibrary, kind: Kind, rows: int, num_inputs: int, num_outputs: int
) -> None:
    weight, bias, x = random(num_outputs, num_inputs), random(num_outputs, seed=1), random(rows, num_inputs, seed=2)
    found = PackedLinear(library, Scratch(), weight, bias, kind)(x)
    expected = product(kind, weight, x) + bias.float()
    assert found.shape == expected.shape
    assert found.dtype is torch.bfloat16
    assert_close(found, expected)


def test_rows_of_a_larger_tensor_and_more_dimensions(library: KernelLibrary) -> None:
    weight, x = random(48, 32), random(2, 5, 64)
    linear = PackedLinear(library, Scratch(), weight)
    assert_close(linear(x[..., 16:48]), x[..., 16:48].float() @ weight.float().T)


@pytest.mark.parametrize("kind", FLOAT_KINDS)
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_what_a_row_gives_does_not_depend_on_its_company(library: KernelLibrary, kind: Kind, threads: int) -> None:
    linear = PackedLinear(library, Scratch(), random(200, 96), None, kind)
    x = random(40, 96)
    torch.set_num_threads(threads)
    try:
        together = linear(x)
        # int8 beyond a tile of rows takes another way to the same products.
        for rows in (1, 2, 3, 7, 12, 39):
            assert torch.equal(linear(x[:rows]), together[:rows])
    finally:
        torch.set_num_threads(1)


def test_numbers_that_are_none_stay_so_and_stay_in_their_row(library: KernelLibrary) -> None:
    x = random(4, 32)
    x[1, 5], x[2, 6] = torch.nan, torch.inf
    found = PackedLinear(library, Scratch(), random(40, 32).abs() + 0.5)(x)
    assert found[1].isnan().all()
    assert found[2].isinf().all()
    assert found[[0, 3]].isfinite().all()


@pytest.mark.parametrize("kind", FLOAT_KINDS)
@pytest.mark.parametrize("size", [1, 20, 48, 130])
@pytest.mark.parametrize("rows", [1, 9, 30])
def test_gate_and_up_in_one(library: KernelLibrary, kind: Kind, size: int, rows: int) -> None:
    gate, up, x = random(size, 24), random(size, 24, seed=1), random(rows, 24, seed=2) * 10
    found = PackedGateUp(library, Scratch(), gate, up, kind)(x)
    a, b = (product(kind, w, x) for w in (gate, up))
    expected = torch.nn.functional.silu(a) * b
    assert found.shape == (rows, size)
    # CPUs that multiply bfloat16 take torch for many rows, which rounds both factors, and where silu is steep it shows.
    slope = torch.sigmoid(a) * (1 + a * (1 - torch.sigmoid(a)))
    rounding = torch.finfo(torch.bfloat16).eps
    bound = rounding * ((slope * a * b).abs() + 2 * expected.abs()) + 0.01
    assert ((found.float() - expected).abs() <= bound).all()


@pytest.mark.parametrize("rows", [1, 4, 7, 30, 485])
@pytest.mark.parametrize(("num_inputs", "num_outputs"), [(1, 1), (6, 17), (64, 48), (255, 130), (1536, 40)])
def test_w8a8_multiplies_whole_numbers_exactly(
    library: KernelLibrary, rows: int, num_inputs: int, num_outputs: int
) -> None:
    weight, x = random(num_outputs, num_inputs), random(rows, num_inputs, seed=1)
    x[0] *= 1000.0
    found = PackedLinear(library, Scratch(), weight, None, Kind.W8A8)(x)
    assert torch.equal(found, product(Kind.W8A8, weight, x).bfloat16())


def test_w8a8_of_the_largest_numbers_in_every_place_does_not_overflow(library: KernelLibrary) -> None:
    weight, x = torch.full((40, 4096), -3.0).bfloat16(), torch.full((2, 4096), 5.0).bfloat16()
    x[1] = -5.0
    found = PackedLinear(library, Scratch(), weight, None, Kind.W8A8)(x)
    assert_close(found / 4096, x[:, :1].float() * -3.0 * torch.ones(2, 40))


def test_w8a8_rows_of_nothing_and_of_numbers_that_are_none_stay_so(library: KernelLibrary) -> None:
    x = random(4, 32)
    x[0], x[1, 5], x[2, 6] = 0.0, torch.nan, torch.inf
    found = PackedLinear(library, Scratch(), random(40, 32), None, Kind.W8A8)(x)
    assert not found[0].any()
    assert not found[1:3].isfinite().any()
    assert torch.equal(found[3:], PackedLinear(library, Scratch(), random(40, 32), None, Kind.W8A8)(x[3:]))


@pytest.mark.parametrize("size", [1, 16, 30, 576])
@pytest.mark.parametrize("with_residual", [True, False])
def test_rms_norm(library: KernelLibrary, size: int, with_residual: bool) -> None:
    x, before, weight = random(7, size), random(7, size, seed=1), random(size, seed=2).float()
    residual, out = before.clone(), torch.empty_like(x)
    args = NormArgs(
        inputs=x.data_ptr(),
        weight=weight.data_ptr(),
        residual=residual.data_ptr() if with_residual else None,
        outputs=out.data_ptr(),
        num_rows=7,
        size=size,
        epsilon=1e-5,
        num_threads=2,
    )
    library.rms_norm(ctypes.byref(args))
    total = x + before if with_residual else x
    assert torch.equal(residual, total if with_residual else before)
    mean_square = total.float().pow(2).mean(-1, keepdim=True)
    assert_close(out, total.float() * torch.rsqrt(mean_square + 1e-5) * weight)


@pytest.mark.parametrize("with_norms", [True, False])
def test_rotary_positions_on_queries_and_keys_alone(library: KernelLibrary, with_norms: bool) -> None:
    tokens, heads, kv_heads, size = 9, 4, 2, 32
    states = random(tokens, heads + 2 * kv_heads, size)
    cos, sin = random(tokens, size, seed=1), random(tokens, size, seed=2)
    norms = [random(size, seed=3).float(), random(size, seed=4).float()] if with_norms else [None, None]
    found = states.clone()
    args = RotateArgs(
        states=found.data_ptr(),
        cos=cos.data_ptr(),
        sin=sin.data_ptr(),
        query_norm=None if norms[0] is None else norms[0].data_ptr(),
        key_norm=None if norms[1] is None else norms[1].data_ptr(),
        stride=found.stride(0),
        num_rows=tokens,
        num_query_heads=heads,
        num_key_heads=kv_heads,
        head_size=size,
        epsilon=1e-6,
        num_threads=2,
    )
    library.rotate(ctypes.byref(args))
    q, k = states[:, :heads], states[:, heads : heads + kv_heads]
    if with_norms:
        q, k = (torch.nn.functional.rms_norm(x.float(), (size,), w, 1e-6) for x, w in zip((q, k), norms, strict=True))
    expected = apply_rotary_pos_emb(q.float()[None], k.float()[None], cos.float()[None], sin.float()[None], 2)
    # The norm's result is rounded once before it is turned.
    torch.testing.assert_close(found[:, :heads].float(), expected[0][0], rtol=0.02, atol=0.03)
    torch.testing.assert_close(found[:, heads : heads + kv_heads].float(), expected[1][0], rtol=0.02, atol=0.03)
    assert torch.equal(found[:, heads + kv_heads :], states[:, heads + kv_heads :])


def test_stored_tokens_lie_in_their_slots_and_the_rest_is_cleared_or_untouched(library: KernelLibrary) -> None:
    states, pool = random(3, 24), torch.full((10, 8), 5.0).bfloat16()
    slots, zeroed = torch.tensor([7, 0, 3]), torch.tensor([8, 9])
    args = StoreArgs(
        states=states[:, 8:16].data_ptr(),
        pool=pool.data_ptr(),
        slots=slots.data_ptr(),
        zeroed=zeroed.data_ptr(),
        stride=states.stride(0),
        num_rows=3,
        size=8,
        num_zeroed=2,
    )
    library.store_tokens(ctypes.byref(args))
    assert torch.equal(pool[slots], states[:, 8:16])
    assert not pool[zeroed].any()
    assert (pool[[1, 2, 4, 5, 6]] == 5.0).all()
