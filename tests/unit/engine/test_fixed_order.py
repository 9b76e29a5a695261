"""The GPU kernels with one order of sums, in Triton's interpreter on CPU tensors.

The interpreter multiplies the bits of bfloat16 numbers as integers, so products in bfloat16 are tested on GPUs only.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton", reason="needs Triton, for its interpreter: pip install triton")
if torch.cuda.is_available():
    pytest.skip("tests/gpu runs the kernels on the GPU", allow_module_level=True)
from splitserve.engine import fixed_order

DTYPES = (torch.float32, torch.float16)


def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1)).to(dtype)


@settings(max_examples=20)
@given(rows=st.integers(1, 40), inputs=st.integers(1, 150), columns=st.integers(1, 70), dtype=st.sampled_from(DTYPES))
def test_products_are_those_of_torch(rows: int, inputs: int, columns: int, dtype: torch.dtype) -> None:
    # Weights of linear layers arrive transposed.
    a, b, bias = random(rows, inputs, dtype=dtype), random(columns, inputs, dtype=dtype).t(), random(columns)
    exact = a.double() @ b.double()
    tolerance = {"atol": 0.05, "rtol": 0.02} if dtype is not torch.float32 else {"atol": 1e-4, "rtol": 1e-4}
    torch.testing.assert_close(fixed_order.mm(a, b).double(), exact, **tolerance)
    found = fixed_order.addmm(bias.to(dtype), a, b, beta=0.5, alpha=2.0)
    torch.testing.assert_close(found.double(), 2 * exact + 0.5 * bias.to(dtype).double(), **tolerance)


@settings(max_examples=15)
@given(rows=st.integers(2, 70), first=st.integers(0, 60), dtype=st.sampled_from(DTYPES))
def test_a_row_has_the_same_bits_in_any_batch(rows: int, first: int, dtype: torch.dtype) -> None:
    a, b, bias = random(rows, 130, dtype=dtype), random(130, 66, dtype=dtype), random(66, dtype=dtype)
    row = slice(first % rows, first % rows + 1)
    assert torch.equal(fixed_order.mm(a, b)[row], fixed_order.mm(a[row], b))
    assert torch.equal(fixed_order.addmm(bias, a, b)[row], fixed_order.addmm(bias, a[row], b))
    assert torch.equal(fixed_order.mean(a, [-1], True)[row], fixed_order.mean(a[row], [-1], True))


@pytest.mark.parametrize("size", [1, 1000, 1024, 2500])
@pytest.mark.parametrize("dims", [[-1], [0], [0, 1], None])
def test_means_are_those_of_torch(size: int, dims: Any) -> None:
    values = random(3, size)
    for keepdim in (False, True):
        expected = values.mean(dims or [0, 1], keepdim=keepdim)
        torch.testing.assert_close(fixed_order.mean(values, dims, keepdim), expected)
    assert fixed_order.mean(values.bfloat16(), [-1], dtype=torch.float32).dtype is torch.float32


def test_no_rows_and_no_inputs() -> None:
    assert fixed_order.mm(random(0, 4), random(4, 3)).shape == (0, 3)
    assert torch.equal(fixed_order.mm(random(2, 0), random(0, 3)), torch.zeros(2, 3))
