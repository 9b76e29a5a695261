"""Weights that a checkpoint stores quantized, in the one form that our kernels take (`codes.h`).

A weight is code x scale + offset. Scales and offsets belong to one output and a group of adjacent inputs. All formats
that we read map to this form exactly: 4-bit and 8-bit integers with zero points or minima, and FP8 in E4M3.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

# Inputs of a group are a multiple of this number: the longest vector of floats.
GROUP_STEP = 16
# Vectors of outputs in a panel.
_VECTORS = 2


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedMatrix:
    """The weight [num_outputs, num_inputs] of a linear layer."""

    # uint8 [num_outputs, num_inputs]: 0 to 15, 0 to 255, or the bytes of float8_e4m3fn.
    codes: torch.Tensor
    # float32 [num_outputs, number of groups].
    scales: torch.Tensor
    # The same shape. None: the weight of the middle code (8 or 128) is 0; FP8 has none.
    offsets: torch.Tensor | None
    # Bits of a code: 4 or 8.
    bits: int
    is_fp8: bool = False
    # Activations are quantized to 8 bits row by row, too (w8a8.c). For 8 bits, one group and no offsets.
    quantizes_rows: bool = False
    # Panels hold float32 scales in any case: a tensor on the meta device has no numbers to decide by.
    keeps_float32: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[1]

    @property
    def group(self) -> int:
        """Return the number of inputs that share a scale."""
        return self.shape[1] // self.scales.shape[1]

    @property
    def has_halves(self) -> bool:
        """Return whether panels hold scales and offsets as float16, which is exact for all of them."""
        if self.keeps_float32:
            return False
        numbers = [self.scales] if self.offsets is None else [self.scales, self.offsets]
        return all(bool(n.isfinite().all()) and torch.equal(n.half().float(), n) for n in numbers)

    @property
    def middle(self) -> int:
        return 1 << (self.bits - 1)

    def signed(self) -> torch.Tensor:
        """Return the codes as int8 in which 0 is the weight 0. For 8 bits without offsets."""
        return (self.codes.to(torch.int16) - self.middle).to(torch.int8)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return the weights: computed in float32, rounded once."""
        num_outputs, num_inputs = self.shape
        numbers = self.codes.view(torch.float8_e4m3fn).float() if self.is_fp8 else self.codes.float()
        if self.offsets is None and not self.is_fp8:
            numbers -= self.middle
        grouped = numbers.view(num_outputs, -1, self.group) * self.scales[..., None]
        if self.offsets is not None:
            grouped = grouped + self.offsets[..., None]
        return grouped.view(num_outputs, num_inputs).to(dtype)

    def is_like(self, other: QuantizedMatrix) -> bool:
        """Return whether both can be rows of one matrix."""
        return (self.is_fp8, self.quantizes_rows, self.shape[1]) == (
            other.is_fp8,
            other.quantizes_rows,
            other.shape[1],
        )

    def padded(self, num_outputs: int) -> QuantizedMatrix:
        """Return the matrix with outputs of weight 0 behind the last, up to `num_outputs`."""
        missing = num_outputs - self.shape[0]
        if not missing:
            return self
        pad = torch.nn.functional.pad
        return self._with(
            pad(self.codes, (0, 0, 0, missing)),
            pad(self.scales, (0, 0, 0, missing)),
            None if self.offsets is None else pad(self.offsets, (0, 0, 0, missing)),
        )

    def rows(self, order: torch.Tensor) -> QuantizedMatrix:
        """Return the matrix with outputs in this order."""
        return self._with(self.codes[order], self.scales[order], None if self.offsets is None else self.offsets[order])

    def _with(self, codes: torch.Tensor, scales: torch.Tensor, offsets: torch.Tensor | None) -> QuantizedMatrix:
        return dataclasses.replace(self, codes=codes, scales=scales, offsets=offsets)

    def _refined(self, bits: int, group: int, with_offsets: bool) -> QuantizedMatrix:
        """Return the same weights with more bits, smaller groups, or offsets."""
        codes, scales, offsets = self.codes, self.scales, self.offsets
        if offsets is None and with_offsets:
            offsets = scales * -self.middle
        if offsets is None and not self.is_fp8:
            codes = codes + (1 << (bits - 1)) - self.middle
        repeats = self.group // group
        scales = scales.repeat_interleave(repeats, 1)
        offsets = None if offsets is None else offsets.repeat_interleave(repeats, 1)
        return dataclasses.replace(self, codes=codes, scales=scales, offsets=offsets, bits=bits)


def joined(matrices: Sequence[QuantizedMatrix]) -> QuantizedMatrix:
    """Return one matrix with the outputs of all, which are alike (`is_like`): the finest of their formats."""
    bits = max(matrix.bits for matrix in matrices)
    group = math.gcd(*(matrix.group for matrix in matrices))
    with_offsets = any(matrix.offsets is not None for matrix in matrices)
    same = [matrix._refined(bits, group, with_offsets) for matrix in matrices]
    offsets = [matrix.offsets for matrix in same if matrix.offsets is not None]
    return dataclasses.replace(
        same[0],
        codes=torch.cat([matrix.codes for matrix in same]),
        scales=torch.cat([matrix.scales for matrix in same]),
        offsets=torch.cat(offsets) if with_offsets else None,
    )


def quantize(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return int8 [num_outputs, num_inputs] in [-127, 127] and float32 scales [num_outputs]; weight is the product."""
    weight = weight.float()
    scales = weight.abs().amax(1).clamp(min=torch.finfo(torch.float32).tiny) / 127
    return (weight / scales[:, None]).round().to(torch.int8), scales


def quantize_outputs(weight: torch.Tensor) -> QuantizedMatrix:
    """Return a weight in 8 bits with one scale per output."""
    codes, scales = quantize(weight)
    return QuantizedMatrix(codes.view(torch.uint8) ^ 0x80, scales[:, None], None, 8, keeps_float32=True)


def pack_groups(matrix: QuantizedMatrix, lanes: int) -> torch.Tensor:
    """Return int32 [panels, groups, words]: each group's codes, then its scales, then its offsets (`codes.h`)."""
    num_inputs, group = matrix.shape[1], matrix.group
    panels, groups = -(-matrix.shape[0] // (_VECTORS * lanes)), num_inputs // group
    padded = matrix.padded(panels * _VECTORS * lanes)
    halves, has_halves = matrix.bits // 4, matrix.has_halves
    # Inputs of a word: first all even ones, then all odd ones, the lowest bits first.
    codes = padded.codes.view(panels, _VECTORS, lanes, groups, -1, 4 // halves, 2)
    codes = codes.permute(0, 3, 4, 1, 2, 6, 5).reshape(panels, groups, -1, 8 // halves)
    if matrix.bits == 4:
        codes = codes[..., ::2] | codes[..., 1::2] << 4
    parts = [codes.contiguous().view(torch.int32).view(panels, groups, -1)]
    for numbers in (padded.scales, padded.offsets):
        if numbers is not None:
            of_panels = numbers.view(panels, _VECTORS * lanes, groups).transpose(1, 2).flatten()
            words = (of_panels.half() if has_halves else of_panels).view(torch.int32)
            parts.append(words.view(panels, groups, -1))
    return torch.cat(parts, 2)
