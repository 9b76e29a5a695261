"""Control plane of one manager: typed messages, sent and received over a channel of raw frames.

1. `post` encodes a message and adds it to the outbox. Any thread that holds the manager's lock may call it.
2. `flush` sends the outbox, `collect` returns received messages. Only the manager's tick calls them.
Unreadable frames are counted and dropped. Independent of rooms.
"""

from __future__ import annotations

import logging
from collections import deque
from typing import Protocol

from splitserve.transfer.wire import (
    AnyControlMessage,
    Mail,
    VersionMismatch,
    WireError,
    decode,
    encode,
    new_epoch,
)

logger = logging.getLogger(__name__)


class ControlChannel(Protocol):
    """Non-blocking channel of frames between the managers of a cluster: in order and at most once for each pair.

    Only processes with the cluster token can send frames.
    """

    @property
    def address(self) -> str:
        """Address at which others reach us."""
        ...

    def send(self, address: str, frame: bytes) -> None:
        """Queue a frame. A frame that cannot be queued is dropped; deadlines and retries of the callers cover that."""
        ...

    def receive(self) -> list[bytes]:
        """Return received frames, at most as many as one tick may handle."""
        ...

    def forget(self, address: str) -> None:
        """Free the resources for a peer that is gone."""
        ...


class Mailbox:
    """Messages of one manager. `epoch`: None: draw one."""

    def __init__(self, channel: ControlChannel, epoch: int | None = None) -> None:
        self.channel = channel
        self.epoch = new_epoch() if epoch is None else epoch
        self._outbox: deque[tuple[str, bytes]] = deque()
        # Frames dropped because they are unreadable.
        self.num_undecodable = 0

    def post(self, address: str, to_epoch: int, body: AnyControlMessage) -> None:
        frame = encode(body, epoch=self.epoch, to_epoch=to_epoch, sender=self.channel.address)
        self._outbox.append((address, frame))

    def reply(self, mail: Mail, body: AnyControlMessage) -> None:
        self.post(mail.sender, mail.epoch, body)

    def flush(self) -> None:
        while self._outbox:
            self.channel.send(*self._outbox.popleft())

    def collect(self) -> list[Mail | VersionMismatch]:
        arrived: list[Mail | VersionMismatch] = []
        for frame in self.channel.receive():
            try:
                arrived.append(decode(frame))
            except VersionMismatch as mismatch:
                self._count(mismatch)
                arrived.append(mismatch)
            except WireError as error:
                self._count(error)
        return arrived

    def _count(self, error: ValueError) -> None:
        """Count a dropped frame. Log only the 1st, 2nd, 4th, 8th ..., so that a sender cannot flood the log."""
        self.num_undecodable += 1
        if self.num_undecodable.bit_count() == 1:
            logger.warning("dropped %d control messages so far, the last: %s", self.num_undecodable, error)

    def forget(self, address: str) -> None:
        """Flush the outbox, then free the resources for a peer."""
        self.flush()
        self.channel.forget(address)
