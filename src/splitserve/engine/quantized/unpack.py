"""Conversion of a linear layer's tensors to a matrix, for GPTQ, AWQ, compressed-tensors and FP8 checkpoints.

Codes of 4 and 8 bits lie in int32 words, the lowest bits first. Each function takes the layer's tensors by the last
part of their names. A layout that differs from its scheme raises ValueError with the difference.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping

import torch

from splitserve.engine.kernels.groups import GROUP_STEP, QuantizedMatrix
from splitserve.engine.quantized.layers import Unpack
from splitserve.engine.quantized.schemes import QuantizationScheme

Tensors = Mapping[str, torch.Tensor]

# AWQ: column of each code in a word.
_AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)


def unpack_of(scheme: QuantizationScheme) -> Unpack:
    """Return the function for the layers of a checkpoint."""
    if scheme.method == "gptq":
        return functools.partial(_gptq, scheme)
    if scheme.method == "awq":
        return _awq
    return functools.partial(_scaled, scheme)


def _gptq(scheme: QuantizationScheme, tensors: Tensors) -> QuantizedMatrix:
    """Unpack qweight [words, outputs], qzeros [groups, words], scales [groups, outputs]."""
    codes = _codes(tensors["qweight"].T, scheme.bits)
    scales = tensors["scales"].float().T
    zeros = _codes(tensors["qzeros"], scheme.bits).T
    if scheme.zeros_less_one:
        zeros = zeros + 1 & (1 << scheme.bits) - 1
    return _affine(codes, scales, zeros, scheme.bits)


def _awq(tensors: Tensors) -> QuantizedMatrix:
    """Unpack qweight [inputs, words], qzeros [groups, words] and scales [groups, outputs]."""
    codes, zeros = (_awq_codes(tensors[name]).T for name in ("qweight", "qzeros"))
    return _affine(codes.contiguous(), tensors["scales"].float().T, zeros, 4)


def _awq_codes(words: torch.Tensor) -> torch.Tensor:
    order = torch.tensor(_AWQ_COLUMNS).argsort()
    return _codes(words, 4).view(len(words), -1, 8)[..., order].flatten(1)


def _scaled(scheme: QuantizationScheme, tensors: Tensors) -> QuantizedMatrix:
    """Unpack weight or weight_packed [outputs, ...] with weight_scale or weight_scale_inv, and zero points if any."""
    scales = tensors["weight_scale_inv" if "weight_scale_inv" in tensors else "weight_scale"].float()
    zeros = tensors.get("weight_zero_point")
    if "weight_packed" in tensors:
        codes = _codes(tensors["weight_packed"], scheme.bits)
        if zeros is not None:
            zeros = _codes(zeros.T, scheme.bits).T
    else:
        weight = tensors["weight"]
        if weight.dtype is torch.float8_e4m3fn:
            return _grouped(QuantizedMatrix(weight.view(torch.uint8), _spread(scales, weight.shape), None, 8, True))
        if weight.dtype is not torch.int8:
            raise ValueError(f"its weight is {weight.dtype}, not int8 or float8_e4m3fn")
        codes = (weight.to(torch.int16) + 128).to(torch.uint8)
        zeros = None if zeros is None else zeros.to(torch.int16) + 128
    scales = _spread(scales, codes.shape)
    if zeros is not None:
        return _affine(codes, scales, _spread(zeros, codes.shape), scheme.bits)
    whole_rows = scheme.quantizes_rows and scales.shape[1] == 1
    matrix = QuantizedMatrix(codes, scales, None, scheme.bits, quantizes_rows=whole_rows)
    return matrix if whole_rows else _grouped(matrix)


def _codes(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the codes of int32 words [n, m] as uint8 [n, m x codes per word]."""
    if words.dtype is not torch.int32:
        raise ValueError(f"its words are {words.dtype}, not int32")
    octets = words.contiguous().view(torch.uint8)
    if bits == 8:
        return octets
    return torch.stack([octets & 15, octets >> 4], -1).flatten(-2)


def _affine(codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, bits: int) -> QuantizedMatrix:
    """Return (codes - zeros) x scales; zeros and scales [outputs, groups]."""
    middle = 1 << (bits - 1)
    offsets = None if bool((zeros == middle).all()) else -zeros.float() * scales
    return _grouped(QuantizedMatrix(codes, scales, offsets, bits))


def _grouped(matrix: QuantizedMatrix) -> QuantizedMatrix:
    """Check the shape of the groups. Raises ValueError."""
    (num_outputs, num_inputs), groups = matrix.shape, matrix.scales.shape
    if groups[0] != num_outputs or num_inputs % groups[1] or matrix.group % GROUP_STEP:
        raise ValueError(
            f"{num_inputs} inputs and {num_outputs} outputs have scales {list(groups)}: groups must divide the inputs "
            f"and be multiples of {GROUP_STEP}"
        )
    return matrix


def _spread(values: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Return a value for each output and group; `values`: per tensor, per output, per group or per block of both."""
    num_outputs, num_inputs = shape
    if values.numel() == 1:
        return values.reshape(1, 1).expand(num_outputs, 1).contiguous()
    values = values.reshape(len(values), -1)
    if len(values) == num_outputs:
        return values.contiguous()
    rows, columns = (_block(size, count) for size, count in zip(shape, values.shape, strict=True))
    # Columns of a block are groups; if the last block is shorter, groups must be shorter, too.
    group = math.gcd(columns, num_inputs)
    spread = values.repeat_interleave(rows, 0)[:num_outputs].repeat_interleave(columns // group, 1)
    return spread[:, : num_inputs // group].contiguous()


def _block(size: int, count: int) -> int:
    """Return the size of blocks, a power of two or all: `count` of them cover `size`."""
    if count == 1:
        return size
    block = 1 << (-(-size // count) - 1).bit_length()
    if -(-size // block) != count:
        raise ValueError(f"{count} scales do not belong to blocks of {size} numbers")
    return block


def check_order(index: torch.Tensor, num_groups: int) -> None:
    """Raise ValueError if inputs are not in the order of their groups. index: the group of each input."""
    if not torch.equal(index.long(), torch.arange(len(index)) // -(-len(index) // num_groups)):
        raise ValueError("choose a checkpoint without desc_act or actorder, or with static groups")
