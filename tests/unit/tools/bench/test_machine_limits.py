"""Limits of the machine: each measurement counts what it computes."""

import ctypes

import pytest

from splitserve.engine.kernels.library import find_library
from splitserve.tools.bench.machine_limits import (
    MachineLimits,
    matmul_gmultiply_per_s,
    measure_limits,
    peak_gmultiply_per_s,
    read_gb_per_s,
)

needs_kernels = pytest.mark.skipif(find_library() is None, reason="installed without a C compiler")


def test_a_read_and_a_product_have_a_throughput():
    assert read_gb_per_s(1 << 20) > 0
    assert matmul_gmultiply_per_s("float32", rows=16) > 0


@needs_kernels
@pytest.mark.parametrize("of_pairs", [False, True])
def test_the_peak_counts_the_multiply_adds_of_its_registers(of_pairs):
    library = find_library()
    function = ctypes.CDLL(str(library.file)).multiply_adds
    function.restype = ctypes.c_uint64
    operands = (ctypes.c_float * (2 * library.lanes))(*([0.5] * (2 * library.lanes)))
    count = function(ctypes.c_uint64(3), ctypes.c_uint64(of_pairs), operands)
    sums = count // (3 * library.lanes * (2 if of_pairs and library.multiplies_pairs else 1))
    assert sums in (12, 24)
    if of_pairs and library.multiplies_pairs:
        # Sum i begins at 0.5 + i. In a round the product of the upper halves, 0.25, is added.
        expected = sum(0.5 + i + 3 * 0.25 for i in range(sums))
    elif not of_pairs:
        # Three times half of the sum, and 0.5.
        expected = sum(((0.5 + i) * 0.125) + 0.875 for i in range(sums))
    else:
        return
    assert list(operands[: library.lanes]) == pytest.approx([expected] * library.lanes)
    assert peak_gmultiply_per_s(library, of_pairs=of_pairs, rounds=10) > 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_limits_name_their_instruction(dtype):
    found = measure_limits(dtype, 1 << 20)
    assert min(found.read_gb_per_s, found.gmultiply_per_s) > 0
    assert found.instruction


def test_the_higher_of_two_measurements_is_the_limit():
    first, second = MachineLimits(30.0, 200.0, "pairs"), MachineLimits(40.0, 100.0, "torch")
    assert first.or_higher(second) == second.or_higher(first) == MachineLimits(40.0, 200.0, "pairs")
