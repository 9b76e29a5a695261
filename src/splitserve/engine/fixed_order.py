"""Operations of torch on GPUs that sum each row in one order, for any number of rows: `--deterministic`.

torch's libraries choose a kernel by the shape of the whole batch, so the last bits of a row depend on other requests.
After `use_fixed_order` the operations of a decoder that sum over a row are kernels with one block size for all shapes:
matrix products (`mm`, `addmm`), and the mean of RMS norms. Softmax and layer norms of torch compute a row in one block
of threads already. Products of batches of matrices (`bmm`), grouped experts and torch's attention stay as they are.

The kernels are written in Triton. They were tested in its interpreter, and have never run on a GPU.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
import triton.language as tl

# Rows, columns and inputs of one step of a product. The number of rows is that of one instruction for 16-bit numbers:
# a larger one would compute more padding in decode steps.
_ROWS, _COLUMNS, _INPUTS = 16, 64, 64
# Numbers that a mean adds at once.
_BLOCK = 1024


# Triton also compiles the signatures, and accepts only its own annotations.
def _multiply(  # type: ignore[no-untyped-def]
    a, b, bias, out, num_rows, num_columns, num_inputs, a_row, a_input, b_input, b_column, bias_row, bias_column,
    alpha, beta, HAS_BIAS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, INPUTS: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    columns = tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    inputs = tl.arange(0, INPUTS)
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for first in range(0, num_inputs, INPUTS):
        i = (first + inputs).to(tl.int64)
        left = tl.load(
            a + rows * a_row + i[None, :] * a_input, mask=(rows < num_rows) & (i[None, :] < num_inputs), other=0.0
        )
        right = tl.load(
            b + i[:, None] * b_input + columns * b_column,
            mask=(i[:, None] < num_inputs) & (columns < num_columns),
            other=0.0,
        )
        total = tl.dot(left, right, total, input_precision="ieee")
    inside = (rows < num_rows) & (columns < num_columns)
    if HAS_BIAS:
        added = tl.load(bias + rows * bias_row + columns * bias_column, mask=inside, other=0.0)
        total = total * alpha + added.to(tl.float32) * beta
    tl.store(out + rows * num_columns + columns, total.to(out.dtype.element_ty), mask=inside)


def _average(rows, out, size, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for first in range(0, size, BLOCK):
        i = first + tl.arange(0, BLOCK)
        total += tl.load(rows + row * size + i, mask=i < size, other=0.0).to(tl.float32)
    tl.store(out + row, (tl.sum(total) / size).to(out.dtype.element_ty))


_multiply_kernel: Any = triton.jit(_multiply)
_average_kernel: Any = triton.jit(_average)


def mm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return a [M, K] @ b [K, N]. Each row of the result depends on its row of `a` and on `b` only."""
    return _product(a, b, None, 1.0, 1.0)


def addmm(bias: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, beta: float = 1, alpha: float = 1) -> torch.Tensor:
    """Return alpha * (a @ b) + beta * bias. `bias` can be expanded to [M, N]."""
    return _product(a, b, bias.expand(a.shape[0], b.shape[1]), alpha, beta)


def _product(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, alpha: float, beta: float) -> torch.Tensor:
    (num_rows, num_inputs), num_columns = a.shape, b.shape[1]
    out = torch.empty(num_rows, num_columns, dtype=a.dtype, device=a.device)
    if out.numel():
        added = out if bias is None else bias
        _multiply_kernel[(triton.cdiv(num_rows, _ROWS), triton.cdiv(num_columns, _COLUMNS))](
            a, b, added, out, num_rows, num_columns, num_inputs, *a.stride(), *b.stride(), *added.stride(),
            float(alpha), float(beta), HAS_BIAS=bias is not None, ROWS=_ROWS, COLUMNS=_COLUMNS, INPUTS=_INPUTS,
        )  # fmt: skip
    return out


def mean(
    values: torch.Tensor, dim: Sequence[int] | None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Return the mean over `dim`. Over the last dimension the order is fixed; means over others are sums divided."""
    values = values if dtype is None else values.to(dtype)
    dims = tuple(range(values.ndim)) if not dim else tuple(d % values.ndim for d in dim)
    size = values.shape[-1] if values.ndim else 0
    if dims != (values.ndim - 1,) or not values.is_floating_point() or not values.numel():
        count = 1
        for d in dims:
            count *= values.shape[d]
        return values.sum(dims, keepdim=keepdim) / count
    out = torch.empty(values.shape[:-1], dtype=values.dtype, device=values.device)
    _average_kernel[(out.numel(),)](values.contiguous(), out, size, BLOCK=_BLOCK)
    return out.unsqueeze(-1) if keepdim else out


_OPERATIONS: dict[str, Callable[..., torch.Tensor]] = {"mm": mm, "addmm": addmm, "mean.dim": mean}


@functools.cache
def use_fixed_order(device_type: str = "CUDA") -> Any:
    """Replace the operations on GPUs in this process, for good. `device_type`: torch's dispatch key.

    Returns torch's registration, which must be kept: its end would restore the operations.
    """
    # Its methods have no types.
    library: Any = torch.library
    registration = library.Library("aten", "IMPL")
    for name, operation in _OPERATIONS.items():
        registration.impl(name, operation, device_type)
    return registration
