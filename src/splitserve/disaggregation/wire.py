"""What the two sides of a hand-over say to each other, and what a prefill rank tells the bootstrap server.

Each message is an envelope (both instances' epochs, reply address, number) around one tagged body:

  decode -> prefill   KVArgsRegisterInfo   here is my memory, a session to write through, and your part of each room
  prefill -> decode   RegisterReply        welcome, or why not
  decode -> prefill   TransferInfo         one room: write to these pages
  both ways           AbortRoom            one room failed here, for this cause
  prefill -> decode   TransferStatus       last word on one room: I write to it no more
  decode -> prefill   Ping, answered by Pong
  both ways           Unregistered         I do not (any longer) know this session: fence it and shake hands again

The envelope's fields never change between versions, so that a mismatch can be named. `seal.py` makes a frame of it,
with the version in front. Pure data: no sockets.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from splitserve.core.layout import KVLayout
from splitserve.core.parallel import ParallelRank
from splitserve.core.request import RoomKey
from splitserve.disaggregation.convert import is_convertible, travels_as
from splitserve.disaggregation.pairing import Pair, check_compatible
from splitserve.disaggregation.transports.base import PeerAddress
from splitserve.errors import KVTransferError, SplitserveError
from splitserve.messages import TransferStats

PROTOCOL_VERSION = 5


class WireError(ValueError):
    """A frame that is not one of ours."""


class VersionMismatch(WireError):
    """A frame of another protocol version; its envelope could be read."""

    def __init__(self, version: int, envelope: Envelope) -> None:
        self.envelope = envelope
        super().__init__(version_difference(ours=PROTOCOL_VERSION, theirs=version))


class KVArgs(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's memory and model, as its peers must know them."""

    backend: str
    # Fingerprint of the model: equal on both sides or the KV cache means nothing.
    model: str
    layout: KVLayout
    # The same of the draft model whose KV is in the pages too; "": none.
    draft_model: str = ""
    # Stride of a metadata row, and how many there are.
    metadata_row_bytes: int
    num_metadata_rows: int
    rank: ParallelRank = ParallelRank()
    # Prefill: it has memory to convert KV in, on the way to another dtype.
    can_convert: bool = False
    # Decode: KV is to travel as this where that is narrower than its pool; None: as its pool's dtype.
    transfer_dtype: str | None = None
    # The pool of several workers of one host that this one computes in, and its instance there; "": a pool of its own.
    shared_pool: str = ""
    generation: int = 0
    # Every room's KV is to be compared end to end (`checksum.py`); the pool is such that it can be.
    wants_checksum: bool = False
    can_checksum: bool = False

    def difference(self, target: KVArgs, pairs: Sequence[Pair]) -> str | None:
        """Why this prefill rank cannot hand its part, `pairs`, over to the decode rank `target`; None where it can.

        Names both values, the prefill's first.
        """
        for name, ours, theirs in (
            ("transfer backend", self.backend, target.backend),
            ("model fingerprint", self.model, target.model),
            ("draft model fingerprint", self.draft_model or "none", target.draft_model or "none"),
            ("metadata row bytes", self.metadata_row_bytes, target.metadata_row_bytes),
        ):
            if ours != theirs:
                return f"{name} {ours} against {theirs}"
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
        """Whether rooms between the two are compared end to end: where one of them wants it."""
        return self.wants_checksum or other.wants_checksum

    def _checksum_difference(self, target: KVArgs, pairs: Sequence[Pair]) -> str | None:
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
    """What a prefill rank registers with the bootstrap server, and decode ranks look up. JSON."""

    version: int = PROTOCOL_VERSION
    epoch: int
    # Of the worker: drawn at its start, the same on all ranks of one scheduler.
    instance: int = 0
    # Where its manager hears control messages.
    control_address: str
    args: KVArgs


class Cause(msgspec.Struct, frozen=True, kw_only=True):
    """Why a room failed, in the words of the side at fault."""

    message: str
    http_status: int
    reason: str

    @classmethod
    def of(cls, error: SplitserveError) -> Cause:
        message = error.failure_reason if isinstance(error, KVTransferError) else error.message
        return cls(message=message, http_status=error.http_status, reason=error.reason)

    def to_error(self, key: RoomKey) -> KVTransferError:
        error = KVTransferError(key.room, self.message)
        error.http_status, error.reason = self.http_status, self.reason
        return error


class Body(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Base: the class name is the tag."""


class KVArgsRegisterInfo(Body, frozen=True):
    """Sent once per prefill epoch, and again until answered."""

    args: KVArgs
    session: PeerAddress
    # What this prefill rank is to write of every room; none where it writes the metadata row at most.
    pairs: tuple[Pair, ...]
    # Decode ranks that will announce each room to this prefill rank, the sender among them.
    num_targets: int


class RegisterReply(Body, frozen=True):
    session_id: str
    # None: accepted.
    refusal: str | None = None


class TransferInfo(Body, frozen=True):
    """A room's target on one decode rank.

    `attempt` tells this use of the room number from any other; all ranks of the decode worker announce it under the
    same.
    """

    session_id: str
    key: RoomKey
    attempt: int
    rid: str
    # In token order.
    pages: list[int]
    metadata_index: int
    num_tokens: int
    # Of these, from the first on: decode has their KV, and nothing of it is written.
    num_held_tokens: int = 0
    # What to compute, where no router brings the request: decode lost the KV of these and asks for it again. Only from
    # driver to driver.
    prompt_ids: list[int] = []
    # Of each of the pages its window page, where layers with windows have a pool of their own; -1: nothing is written.
    window_pages: list[int] = []


class AbortRoom(Body, frozen=True):
    """Decode repeats it until TransferStatus comes, where it had announced pages."""

    key: RoomKey
    attempt: int
    cause: Cause


class TransferStatus(Body, frozen=True):
    """Success where `failure` is None; then `stats` is set. Either way nothing is written for the room any more.

    `checksum` is that of the KV as prefill read it; None where neither side asked for one, or no byte was copied.
    """

    key: RoomKey
    attempt: int
    stats: TransferStats | None = None
    failure: Cause | None = None
    checksum: int | None = None


class Ping(Body, frozen=True):
    session_id: str


class Pong(Body, frozen=True):
    session_id: str


class Unregistered(Body, frozen=True):
    session_id: str
    why: str


AnyBody = (
    KVArgsRegisterInfo | RegisterReply | TransferInfo | AbortRoom | TransferStatus | Ping | Pong | Unregistered
)  # fmt: skip


class Envelope(msgspec.Struct, frozen=True, kw_only=True):
    # The sender's instance, and the instance it means to talk to.
    epoch: int
    to_epoch: int
    # Where the sender hears answers.
    sender: str
    # Counts the sender's messages, from 1.
    number: int
    body: msgspec.Raw


@dataclass(frozen=True, slots=True)
class Mail:
    """A message that arrived."""

    epoch: int
    to_epoch: int
    sender: str
    number: int
    body: AnyBody


_encoder = msgspec.msgpack.Encoder()
_envelopes = msgspec.msgpack.Decoder(Envelope)
_bodies: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(AnyBody)


def new_epoch() -> int:
    """63 random bits: one per start of a process."""
    return secrets.randbits(63)


def encode(body: AnyBody, *, epoch: int, to_epoch: int, sender: str, number: int) -> bytes:
    """The envelope around `body`."""
    raw = msgspec.Raw(_encoder.encode(body))
    return _encoder.encode(Envelope(epoch=epoch, to_epoch=to_epoch, sender=sender, number=number, body=raw))


def decode(data: bytes, version: int = PROTOCOL_VERSION) -> Mail:
    """The message in an envelope of that protocol version.

    Raises VersionMismatch, or WireError for anything else that is not exactly one of our messages.
    """
    try:
        envelope = _envelopes.decode(data)
        if version != PROTOCOL_VERSION:
            raise VersionMismatch(version, envelope)
        body = _bodies.decode(envelope.body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise WireError(f"undecodable control message of {len(data)} bytes: {error}") from error
    return Mail(envelope.epoch, envelope.to_epoch, envelope.sender, envelope.number, body)


def version_difference(*, ours: int, theirs: int) -> str:
    return f"control protocol version {ours} against {theirs}: run the same Splitserve release on both sides"
