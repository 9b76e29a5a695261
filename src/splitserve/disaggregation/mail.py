"""The control plane of one manager: typed messages out and in, over a channel of raw frames.

1. `post` puts a message into the outbox; any thread that holds the manager's lock may.
2. `flush` sends the outbox, `collect` returns what arrived; only the manager's tick calls them.
Frames that are not ours are counted and dropped. Knows nothing of rooms.
"""

from __future__ import annotations

import logging
from collections import deque
from typing import Protocol

from splitserve.disaggregation.wire import AnyBody, Mail, VersionMismatch, WireError, decode, encode

logger = logging.getLogger(__name__)


class ControlChannel(Protocol):
    """Frames between managers: in order and at most once for each pair, never blocking."""

    @property
    def address(self) -> str:
        """Where others reach us."""
        ...

    def send(self, address: str, frame: bytes) -> None:
        """Queue a frame. One that cannot be queued is dropped: the deadlines and repeats above take care."""
        ...

    def receive(self) -> list[bytes]:
        """All frames that have arrived."""
        ...

    def forget(self, address: str) -> None:
        """The peer there is gone: free what was kept to reach it."""
        ...


class Mailbox:
    def __init__(self, channel: ControlChannel, epoch: int) -> None:
        self._channel = channel
        self.epoch = epoch
        self._outbox: deque[tuple[str, bytes]] = deque()
        # Frames dropped because they could not be read.
        self.num_undecodable = 0

    @property
    def address(self) -> str:
        return self._channel.address

    def post(self, address: str, to_epoch: int, body: AnyBody) -> None:
        frame = encode(body, epoch=self.epoch, to_epoch=to_epoch, sender=self._channel.address)
        self._outbox.append((address, frame))

    def reply(self, mail: Mail, body: AnyBody) -> None:
        self.post(mail.sender, mail.epoch, body)

    def flush(self) -> None:
        while self._outbox:
            self._channel.send(*self._outbox.popleft())

    def collect(self) -> list[Mail | VersionMismatch]:
        arrived: list[Mail | VersionMismatch] = []
        for frame in self._channel.receive():
            try:
                arrived.append(decode(frame))
            except VersionMismatch as mismatch:
                self.num_undecodable += 1
                arrived.append(mismatch)
            except WireError as error:
                self.num_undecodable += 1
                logger.warning("dropped a control message: %s", error)
        return arrived

    def forget(self, address: str) -> None:
        """After what is still in the outbox has been sent."""
        self.flush()
        self._channel.forget(address)
