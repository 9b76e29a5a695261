"""Linear layers by tile instructions (AMX), over these instructions in plain C: `support/tile_reference.h`.

A CPU with AMX runs the tests with the fixture `tiled` on its own instructions, too.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from splitserve.engine.kernels import library as kernel_library
from splitserve.engine.kernels.library import KernelLibrary, find_library
from splitserve.engine.kernels.weights import Kind, PackedGateUp, PackedLinear, PackedScores, Scratch
from splitserve.tools.bench.machine_limits import peak_gmultiply_per_s

pytestmark = pytest.mark.skipif(find_library() is None, reason="installed without a C compiler")

TILE_FLAGS = frozenset(("amx_tile", "amx_bf16", "amx_int8"))
# Rows beside the limits of tiles, and inputs beside those of their words. The last number of inputs has several
# stretches (tiles.c) and a rest.
ROWS = (1, 2, 15, 16, 17, 31, 32, 33, 47, 485)
NUM_INPUTS = (1, 2, 3, 31, 32, 33, 63, 64, 65, 100, 576, 1377)


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def sums_in_order(weight: torch.Tensor, rows: torch.Tensor) -> NDArray[np.float32]:
    """Return the sums in the order of TDPBF16PS. In float64 a product and its sum with a float32 are exact here."""
    num_inputs = -(-weight.shape[1] // 32) * 32
    w, x = (np.zeros((len(values), num_inputs)) for values in (weight, rows))
    w[:, : weight.shape[1]], x[:, : weight.shape[1]] = weight.double().numpy(), rows.double().numpy()
    total = np.zeros((len(x), len(w)), np.float32)
    for first in range(0, num_inputs, 32):
        halves = np.zeros((2, len(x), len(w)), np.float32)
        for k, half in itertools.product(range(first, first + 32, 2), (0, 1)):
            products = np.multiply.outer(x[:, k + half], w[:, k + half])
            halves[half] = (halves[half] + products).astype(np.float32)
        total += halves[0] + halves[1]
    return total


@pytest.mark.parametrize("num_inputs", NUM_INPUTS)
def test_sums_have_the_order_of_the_instruction(tiled: KernelLibrary, num_inputs: int) -> None:
    weight, x = random(70, num_inputs), random(35, num_inputs, seed=1).float()
    found = PackedScores(tiled, Scratch(), weight)(x)
    assert np.array_equal(found.numpy(), sums_in_order(weight, x))


def test_subnormal_numbers_are_zero(tiled: KernelLibrary) -> None:
    tiny = torch.tensor([2.0**-130, 2.0**-70]).bfloat16()
    scores = PackedScores(tiled, Scratch(), tiny[:, None])
    # As an operand, and as a product.
    assert scores(torch.tensor([[2.0**20], [2.0**-60]])).tolist() == [[0.0, 2.0**-50], [0.0, 0.0]]


@pytest.mark.parametrize("kind", [Kind.BF16, Kind.W8A8])
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("num_inputs", NUM_INPUTS)
def test_a_layer_of_tiles_is_close_to_one_without(
    tiled_library: KernelLibrary, kind: Kind, rows: int, num_inputs: int
) -> None:
    own = find_library()
    assert own is not None
    weight, bias, x = random(75, num_inputs), random(75, seed=1), random(rows, num_inputs, seed=2)
    found, expected = (PackedLinear(library, Scratch(), weight, bias, kind)(x) for library in (tiled_library, own))
    # Both round to bfloat16 once. Sums of int8 are exact.
    torch.testing.assert_close(found, expected, rtol=0.01 if kind is Kind.BF16 else 0, atol=0.01)
    plain = torch.nn.functional.linear(x.float(), weight.float(), bias.float())
    # The largest of many errors of int8 grows a little faster than the root of the inputs.
    assert float((found.float() - plain).abs().max()) < (0.05 if num_inputs <= 576 else 0.06) * num_inputs**0.5 + 0.05


@pytest.mark.parametrize("rows", [3, 40])
def test_gate_and_up_of_tiles(tiled_library: KernelLibrary, rows: int) -> None:
    gate, up, x = random(50, 70), random(50, 70, seed=1), random(rows, 70, seed=2)
    found = PackedGateUp(tiled_library, Scratch(), gate, up)(x)
    expected = torch.nn.functional.silu(x.float() @ gate.float().T) * (x.float() @ up.float().T)
    torch.testing.assert_close(found.float(), expected, rtol=0.01, atol=0.02)


def test_numbers_behind_a_row_or_a_panel_are_not_read(tiled: KernelLibrary) -> None:
    """Rows of a larger tensor lie beside NaN."""
    weight, x = random(40, 33), torch.full((20, 200), torch.nan).bfloat16()
    x[:, 50:83] = random(20, 33, seed=1)
    found = PackedScores(tiled, Scratch(), weight)
    layer = PackedLinear(tiled, Scratch(), weight)
    assert torch.equal(layer(x[:, 50:83]), found(x[:, 50:83].float()).bfloat16())
    x[3, 60], x[4, 61] = torch.nan, torch.inf
    assert layer(x[:, 50:83])[3].isnan().all()
    assert not layer(x[:, 50:83])[4].isfinite().any()
    assert layer(x[:, 50:83])[[2, 5]].isfinite().all()


@settings(max_examples=25, deadline=None)
@given(
    kind=st.sampled_from([Kind.BF16, Kind.W8A8]),
    size=st.tuples(st.integers(1, 150), st.integers(1, 200)),
    cuts=st.sets(st.integers(1, 511), max_size=6),
    num_rows=st.integers(1, 512),
    threads=st.integers(1, 4),
)
def test_no_number_of_rows_and_no_division_among_threads_changes_a_bit(
    tiled_library: KernelLibrary,
    kind: Kind,
    size: tuple[int, int],
    cuts: set[int],
    num_rows: int,
    threads: int,
) -> None:
    num_outputs, num_inputs = size
    layer = PackedLinear(tiled_library, Scratch(), random(num_outputs, num_inputs), random(num_outputs, seed=3), kind)
    x = random(num_rows, num_inputs, seed=1)
    torch.set_num_threads(1)
    alone = torch.cat([layer(row) for row in x.split(1)])
    torch.set_num_threads(threads)
    ends = [0, *sorted(cut for cut in cuts if cut < num_rows), num_rows]
    together = torch.cat([layer(x[first:end]) for first, end in itertools.pairwise(ends)])
    torch.set_num_threads(1)
    assert torch.equal(together, alone)


@pytest.mark.parametrize("kind", [Kind.BF16, Kind.W8A8])
@pytest.mark.parametrize("rows", [1, 33, 65])
def test_sums_that_are_kept_between_stretches_are_those_of_a_row_alone(
    tiled_library: KernelLibrary, kind: Kind, rows: int
) -> None:
    # 34 panels: a task of one thread has more than the kernel keeps at a time.
    layer = PackedLinear(tiled_library, Scratch(), random(1060, NUM_INPUTS[-1]), None, kind)
    x = random(rows, NUM_INPUTS[-1], seed=1)
    assert torch.equal(layer(x), torch.cat([layer(row) for row in x.split(1)]))


def test_the_instructions_are_used_if_cpu_and_build_have_them(tiled_library: KernelLibrary) -> None:
    assert tiled_library.multiplies_tiles
    assert tiled_library.name == "amx"
    assert tiled_library.max_bfloat16_rows is None
    assert PackedLinear(tiled_library, Scratch(), random(3, 4)).layer_args.uses_tiles
    assert not PackedLinear(tiled_library, Scratch(), random(3, 4), None, Kind.INT8).layer_args.uses_tiles
    int8 = PackedLinear(tiled_library, Scratch(), random(3, 16), None, Kind.INT8).layer_args
    assert (int8.kind, int8.uses_tiles) == (Kind.GROUPS8, True)


@pytest.mark.parametrize("missing", sorted(TILE_FLAGS))
def test_they_are_not_used_if_the_cpu_lacks_one(
    tiled_library: KernelLibrary, missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel_library, "_cpu_flags", lambda: TILE_FLAGS - {missing})
    library = KernelLibrary(tiled_library.file)
    assert not library.multiplies_tiles
    assert library.name != "amx"
    assert not PackedLinear(library, Scratch(), random(3, 4)).layer_args.uses_tiles


def test_they_are_not_used_if_the_system_refuses_them(monkeypatch: pytest.MonkeyPatch) -> None:
    own = find_library()
    assert own is not None
    if own.multiplies_tiles:
        pytest.skip("this system permits them")
    monkeypatch.setattr(kernel_library, "_cpu_flags", lambda: TILE_FLAGS)
    library = KernelLibrary(own.file)
    assert (library.multiplies_tiles, library.name) == (False, own.name)


@pytest.mark.parametrize(("function", "integers"), [("multiply_tiles", b" tdpbssd"), ("multiply_tiled_groups", b"")])
def test_the_build_for_bfloat16_contains_the_instructions(
    instructions_of_build: Callable[..., bytes], function: str, integers: bytes
) -> None:
    code = instructions_of_build(f"--disassemble={function}")
    expected = (b"ldtilecfg tilezero tileloadd tdpbf16ps tilestored tilerelease" + integers).split()
    assert not [instruction for instruction in expected if instruction not in code]


def test_the_peak_counts_the_multiply_adds_of_tiles(tiled_library: KernelLibrary) -> None:
    function = ctypes.CDLL(str(tiled_library.file)).multiply_adds_of_tiles
    function.restype = ctypes.c_uint64
    assert function(ctypes.c_uint64(3)) == 3 * 4 * 16 * 16 * 32
    assert peak_gmultiply_per_s(tiled_library, of_pairs=True, rounds=10) > 0
