"""What the driver of a worker and its followers say to each other about rooms: orders one way, reports the other.

A room of the group has a number, drawn by the driver; each rank has an end of it. The links between them are ordered
and lose nothing, so an order needs no answer of its own: a report says how many orders of its room were carried out
before it. Pure data: no sockets.
"""

from __future__ import annotations

from typing import Any

import msgspec

from splitserve.core.request import BootstrapInfo
from splitserve.disaggregation.state import KVPoll
from splitserve.disaggregation.wire import Cause
from splitserve.messages import TransferStats


class Order(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Base, driver -> every follower: the class name is the tag."""

    # The room's number in the group.
    number: int


class OpenSender(Order, frozen=True):
    rid: str
    bootstrap: BootstrapInfo


class OpenReceiver(Order, frozen=True):
    """`attempt`: the driver's number of this use of the room; all its ranks announce the room under it."""

    rid: str
    bootstrap: BootstrapInfo
    attempt: int


class SendPages(Order, frozen=True):
    """The arguments of `SenderPort.send`."""

    pages: list[int]
    is_last: bool
    metadata_index: int | None
    window_pages: list[int] = []


class AnnouncePages(Order, frozen=True):
    """The arguments of `ReceiverPort.init`, but the prompt: the driver alone asks for one."""

    pages: list[int]
    metadata_index: int
    num_tokens: int
    num_held_tokens: int
    window_pages: list[int] = []


class GiveUp(Order, frozen=True):
    """The room failed on another rank, or its request was aborted."""

    cause: Cause


class Clear(Order, frozen=True):
    """Forget the room. Every rank's end is final and quiescent."""


AnyOrder = OpenSender | OpenReceiver | SendPages | AnnouncePages | GiveUp | Clear


class RoomReport(msgspec.Struct, frozen=True, kw_only=True):
    """A follower's end of a room, whenever something of it has changed."""

    number: int
    # Orders of this room, with the one that opened it, that had been carried out.
    num_orders: int
    state: KVPoll
    is_quiescent: bool
    # Why it Failed.
    failure: Cause | None = None
    # A sender's, after Success.
    stats: TransferStats | None = None


_encoder = msgspec.msgpack.Encoder()
_orders: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(AnyOrder)
_reports = msgspec.msgpack.Decoder(RoomReport)


def encode(message: AnyOrder | RoomReport) -> bytes:
    return _encoder.encode(message)


def decode_order(frame: bytes) -> AnyOrder:
    """Raises msgspec.DecodeError."""
    order: AnyOrder = _orders.decode(frame)
    return order


def decode_report(frame: bytes) -> RoomReport:
    """Raises msgspec.DecodeError."""
    return _reports.decode(frame)
