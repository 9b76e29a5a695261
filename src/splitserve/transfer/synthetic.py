"""Synthetic KV for rooms of a decode worker without a peer.

It has the right number of bytes in the right places, but comes from no model. The bytes are the same for all prompts of
one length, and are finite numbers below 2 in every dtype of a pool. Answers from them mean nothing.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from splitserve.core.layout import KVLayout, Region
from splitserve.transfer.copies import Copies, num_bytes
from splitserve.transfer.reshard import RoomPages, plan
from splitserve.transfer.transports.backend import Memory
from splitserve.transfer.transports.staging import (
    HOST,
    FindDevice,
    Pieces,
    StagingBuffer,
    StagingChoice,
    find_device,
)

# Bytes of the pattern, which is repeated.
PATTERN_BYTES = 1 << 20


class SyntheticKV:
    """Writer of synthetic KV into one pool. Region i is component i of the layout."""

    def __init__(self, layout: KVLayout, regions: Sequence[Region], find_device: FindDevice = find_device) -> None:
        self._layout = layout
        self._memory = Memory(regions)
        self._find_device = find_device
        # Made for the first room.
        self._pattern: StagingBuffer | None = None

    def copies(self, pages: RoomPages, tokens: range) -> Copies:
        """Return what a transfer of these tokens would write into our pages. `tokens.stop` is the prompt's end."""
        return plan(self._layout, self._layout, pages, pages, tokens, tokens.stop).copies

    def fill(self, copies: Copies) -> None:
        """Write synthetic KV to the targets of the copies."""
        total = num_bytes(copies)
        if total == 0:
            return
        pattern = self._pattern = self._pattern or self._make_pattern()
        pieces = Pieces(self._memory.targets(copies), copies["length"])
        for first in range(0, total, PATTERN_BYTES):
            pattern.scatter(0, pieces.between(first, min(first + PATTERN_BYTES, total)))

    def _make_pattern(self) -> StagingBuffer:
        choice = StagingChoice(HOST, self._find_device)
        choice.register(self._memory.regions)
        buffer = choice.to_send(1, PATTERN_BYTES)
        data = synthetic_bytes(PATTERN_BYTES)
        ctypes.memmove(buffer.address, data, len(data))
        return buffer


def synthetic_bytes(count: int) -> bytes:
    """Return the pattern. In any float dtype its values are finite and have both signs."""
    rng = np.random.default_rng(0)
    # The high byte of a value holds its exponent: up to 0x3F it is below 2.
    magnitude, sign = rng.integers(0x30, 0x40, count, np.uint8), rng.integers(0, 2, count, np.uint8)
    pattern: NDArray[np.uint8] = magnitude | sign << 7
    return pattern.tobytes()
