"""Encoder for the wire format of Protocol Buffers, with the four kinds of fields that a Perfetto trace needs."""

from __future__ import annotations

import struct

# Wire types.
_VARINT, _FIXED64, _BYTES = 0, 1, 2


def varint(value: int) -> bytes:
    """Return a number in 7 bits per byte. Negative numbers are in two's complement of 64 bits."""
    value &= (1 << 64) - 1
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def number_field(field: int, value: int) -> bytes:
    """Return a field of any integer type, an enum or a bool."""
    return varint(field << 3 | _VARINT) + varint(value)


def fixed64_field(field: int, value: int) -> bytes:
    return varint(field << 3 | _FIXED64) + struct.pack("<Q", value)


def double_field(field: int, value: float) -> bytes:
    return varint(field << 3 | _FIXED64) + struct.pack("<d", value)


def bytes_field(field: int, value: bytes | str) -> bytes:
    """Return a field of text, bytes, or an encoded message."""
    data = value.encode() if isinstance(value, str) else value
    return varint(field << 3 | _BYTES) + varint(len(data)) + data
