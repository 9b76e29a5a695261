"""Small writes as plain bytes, for transports with small writes that take longer than a round trip over a socket.

A metadata row is a few KiB. It is sent in the same frame that announces it. Independent of sockets and senders.
"""

from __future__ import annotations

import ctypes
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class AuxData(Protocol):
    """Conversion of pieces of memory, given by address and length, to one string of bytes and back."""

    def serialize_data_from_buffer(self, addresses: NDArray[np.uint64], lengths: NDArray[np.uint64]) -> bytes:
        """Return the bytes of all pieces, in order. The caller has checked that the memory is its own."""
        ...

    def deserialize_data_to_buffer(
        self, data: bytes, addresses: NDArray[np.uint64], lengths: NDArray[np.uint64]
    ) -> None:
        """Write the bytes to the pieces. Raises ValueError, before it writes, unless `data` fills them exactly."""
        ...


class AuxDataCodec:
    """Codec for memory that the CPU reads and writes."""

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
    """Check that `data` fills pieces of these lengths exactly. Raises ValueError."""
    if len(data) != (expected := int(lengths.sum())):
        raise ValueError(f"{len(data)} bytes for pieces of {expected}")
