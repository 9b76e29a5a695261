"""Messages about rooms between the driver of a worker and its followers: orders to them, reports from them.

A room of the group has a number, assigned by the driver. Each rank has an end of the room. The links between ranks are
ordered and lose nothing, so an order needs no answer of its own: a report contains the number of orders of its room
that were carried out before it. Pure data: no sockets.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from splitserve.core.messages import TransferStats
from splitserve.core.parallel import ParallelRank
from splitserve.core.request import BootstrapInfo
from splitserve.transfer.state import KVPoll
from splitserve.transfer.wire import RoomFailureCause


class RankLink(Protocol):
    """Link between the driver and one follower: frames in order, none lost, never blocking, until the link ends.

    `send` may be called from any thread, all else from one.
    """

    def send(self, frame: bytes) -> None:
        """Send a frame. A frame that cannot be queued ends the link."""
        ...

    def collect(self) -> list[bytes]: ...

    @property
    def is_open(self) -> bool:
        """Return whether the link is open. Once False it stays False: the other rank is gone."""
        ...


def followers_of(rank: ParallelRank) -> list[ParallelRank]:
    """Return the followers in the group of `rank`, in the order in which the driver keeps their links."""
    return [other for other in rank.group() if not other.is_driver]


class FollowerCommand(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Base class of orders from the driver to every follower. The class name is the tag."""

    # The room's number in the group.
    number: int


class OpenRoom(FollowerCommand, frozen=True):
    """Order to open a room. `attempt`: the driver's number of this use of the room, which all decode ranks announce.

    `num_tokens`: on prefill, tokens of the prompt.
    """

    rid: str
    bootstrap: BootstrapInfo
    attempt: int | None = None
    num_tokens: int = 0


class SendPages(FollowerCommand, frozen=True):
    """Order with the arguments of `KVSender.send`."""

    pages: list[int]
    is_last: bool
    metadata_index: int | None
    window_pages: list[int] = []


class AnnouncePages(FollowerCommand, frozen=True):
    """Order with the arguments of `KVReceiver.init`, except the prompt: only the driver requests prompts."""

    pages: list[int]
    metadata_index: int
    num_tokens: int
    num_held_tokens: int
    window_pages: list[int] = []


class GiveUp(FollowerCommand, frozen=True):
    """Order to fail a room that failed on another rank or was aborted."""

    cause: RoomFailureCause


class Clear(FollowerCommand, frozen=True):
    """Order to forget a room. Every rank's end is final and quiescent."""


AnyOrder = OpenRoom | SendPages | AnnouncePages | GiveUp | Clear


class RoomReport(msgspec.Struct, frozen=True, kw_only=True):
    """State of a follower's end of a room, sent after each change."""

    number: int
    # Orders of this room carried out so far, including the one that opened it.
    num_orders: int
    state: KVPoll
    is_quiescent: bool
    # Cause of a failure, in state Failed.
    failure: RoomFailureCause | None = None
    # Statistics of a sender, after Success.
    stats: TransferStats | None = None


# `encode` takes both kinds. `decode` of the others raises msgspec.DecodeError.
ENCODER = msgspec.msgpack.Encoder()
ORDERS: msgspec.msgpack.Decoder[AnyOrder] = msgspec.msgpack.Decoder(AnyOrder)
REPORTS = msgspec.msgpack.Decoder(RoomReport)
