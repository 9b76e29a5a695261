"""Messages between the prefill and the decode end of a KV transfer, and a prefill rank's bootstrap registration.

Each message is an envelope (both instances' epochs, reply address) around one tagged body:

  decode -> prefill   KVArgsRegisterInfo   decode's memory, a session to write through, heads to write for each room
  prefill -> decode   RegisterReply        registration accepted, or the reason for the refusal
  decode -> prefill   TransferInfo         one room: pages to write to
  both ways           AbortRoom            one room failed at the sender, with its cause
  prefill -> decode   TransferStatus       final status of one room: prefill writes to it no more
  decode -> prefill   Ping, answered by Pong
  both ways           Unregistered         session unknown or ended: fence it and repeat the handshake

A frame is magic, version and envelope. Their fields never change between versions, so that a version mismatch can be
reported. The connection authenticates the sender (`control.py`). Pure data: no sockets.
"""

from __future__ import annotations

import secrets
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from splitserve.core.errors import KVTransferError, SplitserveError
from splitserve.core.layout import KVLayout, check_kv_dtype
from splitserve.core.messages import TransferStats
from splitserve.core.parallel import ParallelRank
from splitserve.core.request import RoomKey
from splitserve.transfer.convert import is_convertible, travels_as
from splitserve.transfer.metadata import RowWidths
from splitserve.transfer.pairing import HeadPair, check_compatible
from splitserve.transfer.transports.base import PeerAddress

PROTOCOL_VERSION = 7
MAGIC = b"SSKC"
_HEADER = struct.Struct("<4sH")


class WireError(ValueError):
    """Error for a frame that is not a valid message."""


class VersionMismatch(WireError):
    """Error for a frame of another protocol version with a readable envelope."""

    def __init__(self, version: int, envelope: Envelope) -> None:
        self.envelope = envelope
        super().__init__(version_difference(ours=PROTOCOL_VERSION, theirs=version))


class KVArgs(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's memory and model, as sent to its peers."""

    backend: str
    # Fingerprint of the model. KV transfer requires the same on both workers.
    model: str
    layout: KVLayout
    # Fingerprint of the draft model if its KV is in the pages too. "": none.
    draft_model: str = ""
    # Stride of a metadata row in bytes, widths of its optional fields, and number of rows.
    metadata_row_bytes: int
    metadata_widths: RowWidths = RowWidths()
    num_metadata_rows: int
    rank: ParallelRank = ParallelRank()
    # Prefill: it has memory to convert KV to another dtype.
    can_convert: bool = False
    # Decode: dtype in which KV travels if it is narrower than the pool's. None: the pool's dtype.
    transfer_dtype: str | None = None
    # Pool that this worker shares with others on its host, and its instance there. "": the pool is not shared.
    shared_pool: str = ""
    generation: int = 0
    # Whether to compare every room's KV end to end (`pool_bytes.py`), and whether the pool allows it.
    wants_checksum: bool = False
    can_checksum: bool = False

    def __post_init__(self) -> None:
        if self.transfer_dtype is not None:
            check_kv_dtype(self.transfer_dtype)

    def difference(self, target: KVArgs, pairs: Sequence[HeadPair]) -> str | None:
        """Return why this prefill rank cannot send its part, `pairs`, to the decode rank `target`. None: it can.

        The text has both values, the prefill's first.
        """
        for name, ours, theirs in (
            ("transfer backend", self.backend, target.backend),
            ("model fingerprint", self.model, target.model),
            ("draft model fingerprint", self.draft_model or "none", target.draft_model or "none"),
        ):
            if ours != theirs:
                return f"{name} {ours} against {theirs}"
        if difference := self.metadata_widths.difference(target.metadata_widths):
            return difference
        if self.metadata_row_bytes != target.metadata_row_bytes:
            return f"metadata row bytes {self.metadata_row_bytes} against {target.metadata_row_bytes}"
        if difference := check_compatible(self.layout, target.layout):
            return difference
        exchanges = self.shared_pool != "" and target.shared_pool == self.shared_pool
        if exchanges and max(self.rank.group_size, target.rank.group_size) > 1:
            return f"pages change owner between workers of one rank only: {self.rank.name} against {target.rank.name}"
        for pair in pairs:
            if not pair.is_in(self.layout, target.layout):
                return f"{pair} is not in both pools"
            a = self.layout.components[pair.src].dtype
            b = travels_as(target.layout.components[pair.dst].dtype, target.transfer_dtype)
            if a != b and not (self.can_convert and is_convertible(a, b)):
                return f"KV dtype {a} against {b}, which this prefill cannot convert to: give both the same --dtype"
        return self._checksum_difference(target, pairs)

    def checksums(self, other: KVArgs) -> bool:
        """Return whether the two check each transfer by checksums. One side that requires it is enough."""
        return self.wants_checksum or other.wants_checksum

    def _checksum_difference(self, target: KVArgs, pairs: Sequence[HeadPair]) -> str | None:
        if not self.checksums(target):
            return None
        if not (self.can_checksum and target.can_checksum):
            return "--transfer-checksum needs KV pools that the CPU can read on both sides"
        for pair in pairs:
            a, b = self.layout.components[pair.src].dtype, target.layout.components[pair.dst].dtype
            carried = target.transfer_dtype or b
            if a != b or b != carried:
                return f"--transfer-checksum needs one KV dtype on both sides: {a} against {b}, carried as {carried}"
        return None


class PrefillInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Registration of a prefill rank with the bootstrap server, which decode ranks look up. JSON."""

    version: int = PROTOCOL_VERSION
    epoch: int
    # Random number of this start of the worker, the same on all ranks of one scheduler.
    instance: int = 0
    # Address at which its manager receives control messages.
    control_address: str
    args: KVArgs


class RoomFailureCause(msgspec.Struct, frozen=True, kw_only=True):
    """Why a room failed, as reported by the worker that failed."""

    message: str
    http_status: int
    reason: str

    @classmethod
    def of(cls, error: SplitserveError) -> RoomFailureCause:
        message = error.failure_reason if isinstance(error, KVTransferError) else error.message
        return cls(message=message, http_status=error.http_status, reason=error.reason)

    def to_error(self, key: RoomKey) -> KVTransferError:
        error = KVTransferError(key.room, self.message)
        error.http_status, error.reason = self.http_status, self.reason
        return error


class ControlMessage(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Base class of message bodies. The class name is the tag."""


class KVArgsRegisterInfo(ControlMessage, frozen=True):
    """Registration of a decode rank, sent once per prefill epoch and repeated until answered."""

    args: KVArgs
    session: PeerAddress
    # Heads that this prefill rank writes of every room. Empty if it writes no KV, but perhaps the metadata row.
    pairs: tuple[HeadPair, ...]
    # Number of decode ranks that announce each room to this prefill rank, including the sender.
    num_targets: int


class RegisterReply(ControlMessage, frozen=True):
    session_id: str
    # None: accepted.
    refusal: str | None = None


class TransferInfo(ControlMessage, frozen=True):
    """A room's target on one decode rank.

    `attempt` distinguishes this use of the room number from others. All ranks of the decode worker announce the same
    attempt.
    """

    session_id: str
    key: RoomKey
    attempt: int
    rid: str
    # Target pages in token order.
    pages: list[int]
    metadata_index: int
    num_tokens: int
    # Decode already holds the KV of this many tokens from the start. It is not written.
    num_held_tokens: int = 0
    # Prompt to compute if no router sends the request: decode lost its KV and requests it again. Only from driver to
    # driver.
    prompt_ids: list[int] = []
    # Window page of each page, if layers with windows have a pool of their own. -1: nothing is written.
    window_pages: list[int] = []


class AbortRoom(ControlMessage, frozen=True):
    """Notice that a room failed. If decode had announced pages, it repeats the notice until TransferStatus arrives."""

    key: RoomKey
    attempt: int
    cause: RoomFailureCause


class TransferStatus(ControlMessage, frozen=True):
    """Final status of a room: prefill writes no more for it. `failure` None: success, and `stats` is set.

    `checksum` covers the KV as prefill read it. None: neither worker requires one, or no byte was copied.
    """

    key: RoomKey
    attempt: int
    stats: TransferStats | None = None
    failure: RoomFailureCause | None = None
    checksum: int | None = None


class Ping(ControlMessage, frozen=True):
    session_id: str


class Pong(ControlMessage, frozen=True):
    session_id: str


class Unregistered(ControlMessage, frozen=True):
    session_id: str
    why: str


AnyControlMessage = (
    KVArgsRegisterInfo | RegisterReply | TransferInfo | AbortRoom | TransferStatus | Ping | Pong | Unregistered
)  # fmt: skip


class Envelope(msgspec.Struct, frozen=True, kw_only=True):
    # Instances of the sender and of the intended receiver.
    epoch: int
    to_epoch: int
    # Address at which the sender receives replies.
    sender: str
    body: msgspec.Raw


@dataclass(frozen=True, slots=True)
class Mail:
    """A received message."""

    epoch: int
    to_epoch: int
    sender: str
    body: AnyControlMessage


_encoder = msgspec.msgpack.Encoder()
_envelopes = msgspec.msgpack.Decoder(Envelope)
_bodies: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(AnyControlMessage)


def new_epoch() -> int:
    """Return 63 random bits. Called once per start of a process."""
    return secrets.randbits(63)


def encode(body: AnyControlMessage, *, epoch: int, to_epoch: int, sender: str) -> bytes:
    """Return the frame that carries `body`."""
    envelope = Envelope(epoch=epoch, to_epoch=to_epoch, sender=sender, body=msgspec.Raw(_encoder.encode(body)))
    return _HEADER.pack(MAGIC, PROTOCOL_VERSION) + _encoder.encode(envelope)


def decode(frame: bytes) -> Mail:
    """Decode a frame.

    Raises VersionMismatch, or WireError for anything else that is not exactly one of our messages.
    """
    if len(frame) < _HEADER.size or not frame.startswith(MAGIC):
        raise WireError(f"{len(frame)} bytes that are not a control message")
    _, version = _HEADER.unpack_from(frame)
    try:
        envelope = _envelopes.decode(frame[_HEADER.size :])
        if version != PROTOCOL_VERSION:
            raise VersionMismatch(version, envelope)
        body = _bodies.decode(envelope.body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise WireError(f"undecodable control message of {len(frame)} bytes: {error}") from error
    return Mail(envelope.epoch, envelope.to_epoch, envelope.sender, body)


def version_difference(*, ours: int, theirs: int) -> str:
    return f"control protocol version {ours} against {theirs}: run the same Splitserve release on both sides"
