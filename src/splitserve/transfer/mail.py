"""Control plane of one manager: typed messages, sent and received over a channel of raw frames.

1. `post` numbers and seals a message and adds it to the outbox. Any thread that holds the manager's lock may call it.
2. `flush` sends the outbox, `collect` returns received messages. Only the manager's tick calls them.
Frames of another cluster, repeated frames and unreadable frames are counted and dropped. Independent of rooms.
"""

from __future__ import annotations

import itertools
import logging
from collections import deque
from typing import Protocol

from splitserve.transfer.seal import ReplayWindow, SealError, control_key, seal, unseal
from splitserve.transfer.wire import (
    PROTOCOL_VERSION,
    AnyControlMessage,
    Mail,
    VersionMismatch,
    WireError,
    decode,
    encode,
)

logger = logging.getLogger(__name__)


class ControlChannel(Protocol):
    """Non-blocking channel of frames between managers: in order and at most once for each pair."""

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
    """Sealed messages of one manager. `token`: the cluster's. Only messages of its holders are accepted."""

    def __init__(self, channel: ControlChannel, epoch: int, token: bytes = b"") -> None:
        self._channel = channel
        self.epoch = epoch
        self._key = control_key(token)
        self._numbers = itertools.count(1)
        self._taken = ReplayWindow()
        self._outbox: deque[tuple[str, bytes]] = deque()
        # Dropped frames: of another cluster, repeated, or unreadable.
        self.num_undecodable = 0

    @property
    def address(self) -> str:
        return self._channel.address

    def post(self, address: str, to_epoch: int, body: AnyControlMessage) -> None:
        number = next(self._numbers)
        envelope = encode(body, epoch=self.epoch, to_epoch=to_epoch, sender=self._channel.address, number=number)
        self._outbox.append((address, seal(self._key, PROTOCOL_VERSION, address, envelope)))

    def reply(self, mail: Mail, body: AnyControlMessage) -> None:
        self.post(mail.sender, mail.epoch, body)

    def flush(self) -> None:
        while self._outbox:
            self._channel.send(*self._outbox.popleft())

    def collect(self) -> list[Mail | VersionMismatch]:
        arrived: list[Mail | VersionMismatch] = []
        for frame in self._channel.receive():
            try:
                arrived.append(self._open(frame))
            except VersionMismatch as mismatch:
                self._count(mismatch)
                arrived.append(mismatch)
            except (SealError, WireError) as error:
                self._count(error)
        return arrived

    def _open(self, frame: bytes) -> Mail:
        """Open a frame. Raises SealError, VersionMismatch, WireError."""
        version, envelope = unseal(self._key, self._channel.address, frame)
        mail = decode(envelope, version)
        # A message to an earlier instance is handled elsewhere and takes no entry in the replay window.
        if mail.to_epoch == self.epoch and not self._taken.take(mail.epoch, mail.number):
            raise WireError(f"message {mail.number} from {mail.sender} has come already")
        return mail

    def _count(self, error: ValueError) -> None:
        """Count a dropped frame. Log only the 1st, 2nd, 4th, 8th ..., so that a sender cannot flood the log."""
        self.num_undecodable += 1
        if self.num_undecodable.bit_count() == 1:
            logger.warning("dropped %d control messages so far, the last: %s", self.num_undecodable, error)

    def forget(self, address: str) -> None:
        """Flush the outbox, then free the resources for a peer."""
        self.flush()
        self._channel.forget(address)
