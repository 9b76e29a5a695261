"""Kernels for weights with scales per group against torch: groups.c or float_groups.c in this CPU's own build,
float_groups.c in the narrowest and the widest build, and tiled_groups.c over its instructions in plain C."""

from __future__ import annotations

import dataclasses
import importlib.util
from pathlib import Path

import pytest
import torch

from splitserve.engine.kernels.groups import QuantizedMatrix, joined
from splitserve.engine.kernels.library import KernelLibrary, find_library
from splitserve.engine.kernels.weights import Epilogue, Kind, PackedGateUp, PackedLinear, PackedScores, Scratch

OWN = find_library()
pytestmark = pytest.mark.skipif(OWN is None, reason="installed without a C compiler")

HAS_WIDE_FLOATS = OWN is not None and OWN.lanes == 16 and not OWN.multiplies_pairs
BUILDS = ("this", "any", "tiles") if HAS_WIDE_FLOATS else ("this", "any", "wide", "tiles")

FORMS = ("4 bits", "4 bits, offsets", "8 bits", "8 bits, offsets", "fp8")
# The last one has more inputs than are expanded at a time for several blocks of rows (tiled_groups.c).
SHAPES = [(1, 16, 16), (17, 64, 32), (48, 96, 16), (129, 256, 128), (130, 320, 320), (70, 1248, 48)]


@pytest.fixture(scope="module", params=BUILDS)
def library(request: pytest.FixtureRequest) -> KernelLibrary:
    if request.param in ("wide", "tiles"):
        found: KernelLibrary = request.getfixturevalue(
            {"wide": "wide_library", "tiles": "tiled_library"}[request.param]
        )
        return found
    if request.param == "this":
        assert OWN is not None
        return OWN
    spec = importlib.util.find_spec("splitserve._native.kernels_any")
    assert spec is not None
    assert spec.origin is not None
    return KernelLibrary(Path(spec.origin))


def matrix_of(
    form: str, outputs: int, inputs: int, group: int, seed: int = 0, *, in_halves: bool = False
) -> QuantizedMatrix:
    """`in_halves`: float16 holds scales and offsets exactly."""
    random = torch.Generator().manual_seed(seed)
    bits = 4 if form.startswith("4") else 8
    codes = torch.randint(0, 1 << bits, (outputs, inputs), generator=random, dtype=torch.uint8)
    if form == "fp8":
        # 0x7f and 0xff are no numbers.
        codes = torch.where(codes & 0x7F == 0x7F, codes - 1, codes)
    scales = (torch.rand(outputs, inputs // group, generator=random) + 0.1) / (1 << bits)
    offsets = torch.randn(scales.shape, generator=random) if "offsets" in form else None
    if in_halves:
        scales, offsets = scales.half().float(), None if offsets is None else offsets.half().float()
    return QuantizedMatrix(codes, scales, offsets, bits, form == "fp8")


def rows_of(rows: int, inputs: int) -> torch.Tensor:
    return torch.randn(rows, inputs, generator=torch.Generator().manual_seed(7)).bfloat16()


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    """One rounding to bfloat16, and float32 sums in another order."""
    largest = float(expected.abs().max()) if expected.numel() else 0.0
    torch.testing.assert_close(found.float(), expected, rtol=0.005, atol=1e-4 * largest + 1e-6)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rows", [0, 1, 2, 5, 12, 13, 50, 100])
@pytest.mark.parametrize(("outputs", "inputs", "group"), SHAPES)
def test_a_quantized_linear_is_a_linear_of_its_weights(
    library: KernelLibrary, form: str, rows: int, outputs: int, inputs: int, group: int
) -> None:
    matrix, bias, x = matrix_of(form, outputs, inputs, group), torch.randn(outputs), rows_of(rows, inputs)
    found = PackedLinear(library, Scratch(), matrix, bias)(x)
    assert_close(found, x.float() @ matrix.dequantize().T + bias)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rows", [481, 490])
def test_more_rows_than_are_converted_at_a_time(library: KernelLibrary, form: str, rows: int) -> None:
    """The second chunk has one row, or several (float_groups.c)."""
    matrix, bias, x = matrix_of(form, 40, 96, 32), torch.randn(40), rows_of(rows, 96)
    linear = PackedLinear(library, Scratch(), matrix, bias)
    found = linear(x)
    assert_close(found, x.float() @ matrix.dequantize().T + bias)
    assert torch.equal(found[478:], torch.cat([linear(row) for row in x[478:].split(1)]))


@pytest.mark.parametrize("form", ["8 bits", "fp8"])
@pytest.mark.parametrize("rows", [1, 20])
def test_activations_far_from_zero_lose_no_digits(library: KernelLibrary, form: str, rows: int) -> None:
    matrix, x = matrix_of(form, 40, 4096, 4096), (rows_of(rows, 4096) + 1).bfloat16()
    layer = PackedScores(library, Scratch(), matrix)
    exact = x.double() @ matrix.dequantize().double().T
    assert float((layer(x.float()).double() - exact).abs().max()) < 3e-5 * float(exact.square().mean().sqrt())


@pytest.mark.parametrize("form", FORMS)
def test_factors_in_float16_change_no_bit(library: KernelLibrary, form: str) -> None:
    matrix, x = matrix_of(form, 130, 96, 16), rows_of(3, 96)
    halves = dataclasses.replace(
        matrix,
        # Subnormal numbers of float16, too.
        scales=torch.cat([matrix.scales[:, :3], matrix.scales[:, 3:] * 2**-15], 1).half().float(),
        offsets=None if matrix.offsets is None else matrix.offsets.half().float(),
    )
    floats = joined([halves, matrix])
    assert (halves.has_halves, floats.has_halves) == (True, False)
    for rows in (1, 3):
        found = PackedLinear(library, Scratch(), halves)(x[:rows])
        assert torch.equal(found, PackedLinear(library, Scratch(), floats)(x[:rows])[:, :130])


@pytest.mark.parametrize("number", [1 / 3, 1e5, float("inf")])
def test_factors_beyond_float16_stay_float32(number: float) -> None:
    matrix = matrix_of("4 bits, offsets", 2, 32, 16)
    exact = dataclasses.replace(matrix, scales=torch.ones(2, 2), offsets=torch.ones(2, 2))
    assert exact.has_halves
    assert not dataclasses.replace(exact, scales=torch.full((2, 2), number)).has_halves
    assert not dataclasses.replace(exact, offsets=torch.full((2, 2), number)).has_halves


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(("outputs", "inputs", "group"), [(30, 128, 32), (400, 128, 32), (200, 96, 48), (70, 720, 720)])
def test_a_row_depends_on_itself_only(
    library: KernelLibrary, form: str, threads: int, outputs: int, inputs: int, group: int
) -> None:
    linear, x = PackedLinear(library, Scratch(), matrix_of(form, outputs, inputs, group)), rows_of(60, inputs)
    torch.set_num_threads(3 - threads)
    alone = torch.cat([linear(x[i : i + 1]) for i in range(60)])
    torch.set_num_threads(threads)
    try:
        for rows in (*range(1, 41), 60):
            assert torch.equal(linear(x[:rows]), alone[:rows])
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rows", [20, 100])
@pytest.mark.parametrize("group", [64, 112, 448, 1344])
def test_stretches_of_inputs_change_no_bit(library: KernelLibrary, form: str, rows: int, group: int) -> None:
    """Within groups and across them (tiled_groups.c)."""
    matrix, bias, x = matrix_of(form, 100, 1344, group, in_halves=group == 112), torch.randn(100), rows_of(rows, 1344)
    linear = PackedLinear(library, Scratch(), matrix, bias)
    assert torch.equal(linear(x), torch.cat([linear(row) for row in x.split(1)]))


@pytest.mark.parametrize("epilogue", [Epilogue.SILU_MUL, Epilogue.GELU_MUL])
def test_gate_and_up_of_a_row_depend_on_it_only(library: KernelLibrary, epilogue: Epilogue) -> None:
    gate, up = (matrix_of("4 bits", 64, 96, 32, seed, in_halves=True) for seed in (0, 1))
    both, x = PackedGateUp(library, Scratch(), gate, up, epilogue=epilogue), rows_of(40, 96)
    assert torch.equal(both(x), torch.cat([both(row) for row in x.split(1)]))


def test_int8_weights_give_the_same_bits_in_any_number_of_rows(library: KernelLibrary) -> None:
    """Also outputs with weights that are all 0: their scale is subnormal."""
    weight = torch.randn(70, 96, generator=torch.Generator().manual_seed(3)).bfloat16()
    weight[5] = 0
    linear, x = PackedLinear(library, Scratch(), weight, None, Kind.INT8), rows_of(40, 96)
    x[:, ::7] *= 2.0**-128
    assert torch.equal(linear(x), torch.cat([linear(row) for row in x.split(1)]))
    assert (linear(x)[:, 5] == 0).all()


@pytest.mark.parametrize("rows", [1, 20])
@pytest.mark.parametrize("group", [16, 32])
def test_numbers_behind_a_row_are_not_read(tiled: KernelLibrary, rows: int, group: int) -> None:
    linear, x = PackedLinear(tiled, Scratch(), matrix_of("4 bits", 40, 96, group)), rows_of(rows, 96)
    beside_nan = torch.full((rows, 300), torch.nan).bfloat16()
    beside_nan[:, 50:146] = x
    assert torch.equal(linear(beside_nan[:, 50:146]), linear(x))


@pytest.mark.parametrize("form", FORMS)
def test_subnormal_numbers_give_the_same_bits_in_any_number_of_rows(library: KernelLibrary, form: str) -> None:
    """As activations, as sums of a group, and as totals."""
    matrix = matrix_of(form, 40, 96, 32)
    matrix = dataclasses.replace(
        matrix,
        # Sums that are subnormal count as much as others.
        scales=matrix.scales * torch.tensor([1.0, 2.0**20, 2.0**20]),
        offsets=None if matrix.offsets is None else matrix.offsets * 2.0**20,
    )
    x = rows_of(34, 96).float() * torch.tensor([2.0**power for power in range(-129, -121)]).repeat(12)
    x = (x * torch.rand(34, 96, generator=torch.Generator().manual_seed(1))).bfloat16()
    assert ((x != 0) & (x.abs() < 2.0**-126)).any()
    linear = PackedLinear(library, Scratch(), matrix)
    together = linear(x)
    assert together.isfinite().all()
    assert torch.equal(together.view(torch.int16), torch.cat([linear(row) for row in x.split(1)]).view(torch.int16))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("size", [1, 20, 130])
@pytest.mark.parametrize("rows", [1, 9, 30])
def test_gate_and_up_of_quantized_weights(library: KernelLibrary, form: str, size: int, rows: int) -> None:
    gate, up, x = matrix_of(form, size, 32, 16), matrix_of(form, size, 32, 16, seed=1), rows_of(rows, 32)
    found = PackedGateUp(library, Scratch(), gate, up)(x)
    a, b = (x.float() @ matrix.dequantize().T for matrix in (gate, up))
    expected = torch.nn.functional.silu(a) * b
    assert ((found.float() - expected).abs() <= 0.005 * expected.abs() + 1e-4 * float(expected.abs().max())).all()


@pytest.mark.parametrize(
    ("first", "second"), [("4 bits", "4 bits, offsets"), ("4 bits", "8 bits"), ("4 bits, offsets", "8 bits")]
)
def test_weights_of_different_formats_are_joined_without_loss(first: str, second: str) -> None:
    one, other = matrix_of(first, 5, 64, 32), matrix_of(second, 3, 64, 16)
    both = joined([one, other])
    assert (both.group, both.shape) == (16, (8, 64))
    torch.testing.assert_close(
        both.dequantize(), torch.cat([one.dequantize(), other.dequantize()]), rtol=1e-6, atol=1e-6
    )


def test_every_code_of_fp8_is_its_number(library: KernelLibrary) -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    codes = codes[codes & 0x7F != 0x7F]
    matrix = QuantizedMatrix(
        torch.nn.functional.pad(codes[:, None], (0, 15)), torch.ones(len(codes), 1), None, 8, is_fp8=True
    )
    x = torch.zeros(1, 16).bfloat16()
    x[0, 0] = 1.0
    found = PackedLinear(library, Scratch(), matrix)(x)[0]
    assert torch.equal(found.float(), codes.view(torch.float8_e4m3fn).float())
