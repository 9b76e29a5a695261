"""What makes a control frame one of this cluster's: a seal under the cluster token, and each message taken once.

  frame   magic, version, seal | envelope

1. The sender seals an envelope for one address. The seal is an HMAC-SHA256 over version, address and the whole
   envelope, in which stand both instances' epochs and the message's number.
2. The receiver checks the seal before it parses anything. A frame without a good one is dropped: whoever does not hold
   the token gets no answer, not even about versions.
3. The receiver takes each number of a sender once (`Numbers`).

What a recorded frame can still do: nothing. At another worker's address its seal is wrong. A successor at the same
address sees an epoch that is over; it tells the worker named as the sender, whose session with that epoch has ended,
too. To the same instance it is a repetition. That is not left to the protocol's idempotence: once the table of closed
rooms has forgotten a room, its TransferInfo would look new, and would name pages that belong to another by then.

Magic, version and seal keep their place and meaning in all versions, so that a mismatch can be named. Pure: no sockets.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from collections import OrderedDict

MAGIC = b"SSKC"
SEAL_BYTES = 32
# How far messages of one sender may overtake each other. A connection keeps their order; two in a row may not.
WINDOW = 1024
# Senders whose numbers are remembered: several times the peers that a manager talks to.
MAX_SENDERS = 8192

_HEADER = struct.Struct(f"<4sH{SEAL_BYTES}s")
_SEALED = struct.Struct("<HI")


class SealError(ValueError):
    """A frame that does not come from a holder of the cluster token, or was not meant for this address."""


def control_key(token: bytes) -> bytes:
    """The key of the seals; proofs on other connections are of no use here, nor the other way round."""
    return hmac.digest(token, b"splitserve control", hashlib.sha256)


def seal(key: bytes, version: int, address: str, envelope: bytes) -> bytes:
    """The frame that carries `envelope` to `address`."""
    return _HEADER.pack(MAGIC, version, _mac(key, version, address, envelope)) + envelope


def unseal(key: bytes, address: str, frame: bytes) -> tuple[int, bytes]:
    """(version, envelope) of a frame that arrived at `address`. Raises SealError."""
    if len(frame) < _HEADER.size or not frame.startswith(MAGIC):
        raise SealError("not a control frame")
    _, version, mac = _HEADER.unpack_from(frame)
    envelope = frame[_HEADER.size :]
    if not hmac.compare_digest(mac, _mac(key, version, address, envelope)):
        raise SealError(f"a frame of protocol version {version} is not sealed with this cluster's token")
    return version, envelope


def _mac(key: bytes, version: int, address: str, envelope: bytes) -> bytes:
    name = address.encode()
    return hmac.digest(key, _SEALED.pack(version, len(name)) + name + envelope, hashlib.sha256)


class Numbers:
    """Which messages have arrived, by sender: the highest number and a bit for each of the `WINDOW` below it."""

    def __init__(self) -> None:
        self._seen: OrderedDict[int, tuple[int, int]] = OrderedDict()

    def take(self, sender: int, number: int) -> bool:
        """Whether `number` of the instance `sender` is new. Too old to tell counts as seen."""
        highest, bits = self._seen.get(sender, (0, 0))
        ahead = number - highest
        if ahead > 0:
            highest, bits = number, (bits << min(ahead, WINDOW) | 1) & ((1 << WINDOW) - 1)
        elif -ahead >= WINDOW or bits >> -ahead & 1:
            return False
        else:
            bits |= 1 << -ahead
        self._seen[sender] = highest, bits
        self._seen.move_to_end(sender)
        if len(self._seen) > MAX_SENDERS:
            self._seen.popitem(last=False)
        return True
