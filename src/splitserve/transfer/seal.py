"""Seal of control frames: an HMAC under the cluster token, and protection against replay.

  frame   magic, version, seal | envelope

1. The sender seals an envelope for one address. The seal is an HMAC-SHA256 over version, address and the whole
   envelope, which includes both instances' epochs and the message's number.
2. The receiver checks the seal before it parses anything and drops a frame without a valid one. A peer without the
   token thus gets no answer, not even about versions.
3. The receiver accepts each number of a sender once (`ReplayWindow`).

A replayed frame has no effect. At another worker's address its seal is wrong. A successor at the same address finds an
outdated epoch and notifies the worker named as the sender, which has ended its session with that epoch too. At the
same instance it is a repeated number. The idempotence of the protocol would not be enough: once the table of closed
rooms has forgotten a room, its TransferInfo would count as new and name pages that by then belong to another room.

Magic, version and seal keep their offset and meaning in all versions, so that a version mismatch can be reported. Pure:
no sockets.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from collections import OrderedDict

MAGIC = b"SSKC"
SEAL_BYTES = 32
# Maximum distance between the numbers of messages that arrive out of order. One connection keeps the order; two
# successive connections may not.
WINDOW = 1024
# Maximum number of senders in the window: several times the number of peers of a manager.
MAX_SENDERS = 8192

_HEADER = struct.Struct(f"<4sH{SEAL_BYTES}s")
_SEALED = struct.Struct("<HI")


class SealError(ValueError):
    """Error for a frame that no holder of the cluster token sealed, or that was sealed for another address."""


def control_key(token: bytes) -> bytes:
    """Return the key of the seals. It differs from the keys of other connections, so proofs are not transferable."""
    return hmac.digest(token, b"splitserve control", hashlib.sha256)


def seal(key: bytes, version: int, address: str, envelope: bytes) -> bytes:
    """Return the frame that carries `envelope` to `address`."""
    return _HEADER.pack(MAGIC, version, _mac(key, version, address, envelope)) + envelope


def unseal(key: bytes, address: str, frame: bytes) -> tuple[int, bytes]:
    """Return (version, envelope) of a frame received at `address`. Raises SealError."""
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


class ReplayWindow:
    """Received message numbers per sender: the highest number, and a bit for each of the `WINDOW` below it."""

    def __init__(self) -> None:
        self._seen: OrderedDict[int, tuple[int, int]] = OrderedDict()

    def take(self, sender: int, number: int) -> bool:
        """Return whether `number` of the instance `sender` is new. A number below the window counts as seen."""
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
