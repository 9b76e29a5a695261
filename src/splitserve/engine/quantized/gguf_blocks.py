"""Exact conversion of GGUF blocks to matrices: Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K and Q6_K.

The layouts are those of ggml-common.h in llama.cpp. A K block has 256 inputs in groups with scales of their own.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from gguf.quants import Q4_K

from splitserve.engine.kernels.groups import QuantizedMatrix

# Blocks uint8 [n, bytes of a block] -> codes [n, inputs], scales [n, groups], offsets or None; and bits of a code.
_Parts = tuple[np.ndarray, np.ndarray, np.ndarray | None]


def unpack_blocks(rows: torch.Tensor, type_name: str) -> QuantizedMatrix:
    """Return the matrix of uint8 [outputs, bytes of a row]."""
    unpack, block_bytes, bits = _TYPES[type_name]
    blocks = rows.numpy().reshape(-1, block_bytes)
    codes, scales, offsets = unpack(blocks)
    num_outputs = len(rows)
    return QuantizedMatrix(
        torch.from_numpy(codes.reshape(num_outputs, -1)),
        torch.from_numpy(scales.reshape(num_outputs, -1)),
        None if offsets is None else torch.from_numpy(offsets.reshape(num_outputs, -1)),
        bits,
    )


def _half(blocks: np.ndarray, at: int) -> np.ndarray:
    return np.ascontiguousarray(blocks[:, at : at + 2]).view(np.float16).astype(np.float32)


def _nibbles(octets: np.ndarray, run: int) -> np.ndarray:
    """Return the codes of each `run` bytes: first all low halves, then all high ones."""
    parts = octets.reshape(len(octets), -1, 1, run) >> np.array([0, 4], np.uint8).reshape(1, 1, 2, 1)
    return (parts & 15).reshape(len(octets), -1)


def _fifth_bits(blocks: np.ndarray, at: int) -> np.ndarray:
    return np.unpackbits(blocks[:, at : at + 4], axis=1, bitorder="little") << 4


def _q4_0(blocks: np.ndarray) -> _Parts:
    return _nibbles(blocks[:, 2:], 16), _half(blocks, 0), None


def _q4_1(blocks: np.ndarray) -> _Parts:
    return _nibbles(blocks[:, 4:], 16), _half(blocks, 0), _half(blocks, 2)


def _q5_0(blocks: np.ndarray) -> _Parts:
    # The middle moves from 16 to 128.
    return (_nibbles(blocks[:, 6:], 16) | _fifth_bits(blocks, 2)) + np.uint8(112), _half(blocks, 0), None


def _q5_1(blocks: np.ndarray) -> _Parts:
    return _nibbles(blocks[:, 8:], 16) | _fifth_bits(blocks, 4), _half(blocks, 0), _half(blocks, 2)


def _q8_0(blocks: np.ndarray) -> _Parts:
    return blocks[:, 2:] ^ np.uint8(128), _half(blocks, 0), None


def _k_scales(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return scales and offsets of the eight groups of Q4_K and Q5_K."""
    scales, minima = Q4_K.get_scale_min(np.ascontiguousarray(blocks[:, 4:16]))
    return _half(blocks, 0) * scales.astype(np.float32), -_half(blocks, 2) * minima.astype(np.float32)


def _q4_k(blocks: np.ndarray) -> _Parts:
    return _nibbles(blocks[:, 16:], 32), *_k_scales(blocks)


def _q5_k(blocks: np.ndarray) -> _Parts:
    # Bit i of the byte of an input's place belongs to group i.
    bits = np.unpackbits(blocks[:, 16:48, None], axis=2, bitorder="little").transpose(0, 2, 1)
    return _nibbles(blocks[:, 48:], 32) | bits.reshape(len(blocks), -1) << 4, *_k_scales(blocks)


def _q6_k(blocks: np.ndarray) -> _Parts:
    low = _nibbles(blocks[:, :128], 64)
    high = blocks[:, 128:192].reshape(-1, 2, 1, 32) >> np.array([0, 2, 4, 6], np.uint8).reshape(1, 1, 4, 1)
    scales = _half(blocks, 208) * blocks[:, 192:208].view(np.int8).astype(np.float32)
    # The middle moves from 32 to 128.
    return (low | (high & 3).reshape(len(blocks), -1) << 4) + np.uint8(96), scales, None


# Function, bytes of a block, bits of a code.
_TYPES: dict[str, tuple[Callable[[np.ndarray], _Parts], int, int]] = {
    "Q4_0": (_q4_0, 18, 4),
    "Q4_1": (_q4_1, 20, 4),
    "Q5_0": (_q5_0, 22, 8),
    "Q5_1": (_q5_1, 24, 8),
    "Q8_0": (_q8_0, 34, 8),
    "Q4_K": (_q4_k, 144, 4),
    "Q5_K": (_q5_k, 176, 8),
    "Q6_K": (_q6_k, 210, 8),
}
# Types of tensors that stay in their blocks.
KEPT_TYPES = frozenset(_TYPES)
