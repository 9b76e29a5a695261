"""Small writes as plain bytes, for transports whose own small writes cost more than a round trip over a socket.

A metadata row is a few KiB: it rides in the same frame that announces it. Knows nothing of sockets or of who sends.
"""

from __future__ import annotations

import ctypes

import numpy as np
from numpy.typing import NDArray


class AuxDataCodec:
    """Pieces of memory, given by address and length, to one string of bytes and back."""

    @staticmethod
    def serialize_data_from_buffer(addresses: NDArray[np.uint64], lengths: NDArray[np.uint64]) -> bytes:
        """The bytes of all pieces, in order. The caller has checked that the memory is its own."""
        pairs = zip(addresses.tolist(), lengths.tolist(), strict=True)
        return b"".join(ctypes.string_at(address, length) for address, length in pairs)

    @staticmethod
    def deserialize_data_to_buffer(data: bytes, addresses: NDArray[np.uint64], lengths: NDArray[np.uint64]) -> None:
        """Put the bytes where the pieces lie. Raises ValueError, before it writes, unless `data` fills them exactly."""
        ends = np.cumsum(lengths).tolist()
        if len(data) != (ends[-1] if ends else 0):
            raise ValueError(f"{len(data)} bytes for pieces of {ends[-1] if ends else 0}")
        first = 0
        for address, end in zip(addresses.tolist(), ends, strict=True):
            ctypes.memmove(address, data[first:end], end - first)
            first = end
