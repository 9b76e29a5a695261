"""Small writes as plain bytes, for transports whose own small writes cost more than a round trip over a socket.

A metadata row is a few KiB: it rides in the same frame that announces it. Knows nothing of sockets or of who sends.
"""

from __future__ import annotations

import ctypes
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class AuxData(Protocol):
    """Pieces of memory, given by address and length, to one string of bytes and back."""

    def serialize_data_from_buffer(self, addresses: NDArray[np.uint64], lengths: NDArray[np.uint64]) -> bytes:
        """The bytes of all pieces, in order. The caller has checked that the memory is its own."""
        ...

    def deserialize_data_to_buffer(
        self, data: bytes, addresses: NDArray[np.uint64], lengths: NDArray[np.uint64]
    ) -> None:
        """Put the bytes where the pieces lie. Raises ValueError, before it writes, unless `data` fills them exactly."""
        ...


class AuxDataCodec:
    """Of memory that the CPU reads and writes."""

    @staticmethod
    def serialize_data_from_buffer(addresses: NDArray[np.uint64], lengths: NDArray[np.uint64]) -> bytes:
        pairs = zip(addresses.tolist(), lengths.tolist(), strict=True)
        return b"".join(ctypes.string_at(address, length) for address, length in pairs)

    @staticmethod
    def deserialize_data_to_buffer(data: bytes, addresses: NDArray[np.uint64], lengths: NDArray[np.uint64]) -> None:
        check_fills(data, lengths)
        ends = np.cumsum(lengths).tolist()
        first = 0
        for address, end in zip(addresses.tolist(), ends, strict=True):
            ctypes.memmove(address, data[first:end], end - first)
            first = end


def check_fills(data: bytes, lengths: NDArray[np.uint64]) -> None:
    """Raises ValueError unless `data` fills pieces of these lengths exactly."""
    if len(data) != (expected := int(lengths.sum())):
        raise ValueError(f"{len(data)} bytes for pieces of {expected}")
