"""The control plane of one manager: typed messages out and in, over a channel of raw frames.

1. `post` numbers and seals a message and puts it into the outbox; any thread that holds the manager's lock may.
2. `flush` sends the outbox, `collect` returns what arrived; only the manager's tick calls them.
Frames that are not of this cluster, are repeated or cannot be read are counted and dropped. Knows nothing of rooms.
"""

from __future__ import annotations

import itertools
import logging
from collections import deque
from typing import Protocol

from splitserve.disaggregation.seal import Numbers, SealError, control_key, seal, unseal
from splitserve.disaggregation.wire import (
    PROTOCOL_VERSION,
    AnyBody,
    Mail,
    VersionMismatch,
    WireError,
    decode,
    encode,
)

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
        """The frames that have arrived, as many as are to be handled before anything else is."""
        ...

    def forget(self, address: str) -> None:
        """The peer there is gone: free what was kept to reach it."""
        ...


class Mailbox:
    """`token`: the cluster's. Its holders' messages get in, and no others."""

    def __init__(self, channel: ControlChannel, epoch: int, token: bytes = b"") -> None:
        self._channel = channel
        self.epoch = epoch
        self._key = control_key(token)
        self._numbers = itertools.count(1)
        self._taken = Numbers()
        self._outbox: deque[tuple[str, bytes]] = deque()
        # Frames dropped because they are not of this cluster, are repeated, or could not be read.
        self.num_undecodable = 0

    @property
    def address(self) -> str:
        return self._channel.address

    def post(self, address: str, to_epoch: int, body: AnyBody) -> None:
        number = next(self._numbers)
        envelope = encode(body, epoch=self.epoch, to_epoch=to_epoch, sender=self._channel.address, number=number)
        self._outbox.append((address, seal(self._key, PROTOCOL_VERSION, address, envelope)))

    def reply(self, mail: Mail, body: AnyBody) -> None:
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
        """Raises SealError, VersionMismatch, WireError."""
        version, envelope = unseal(self._key, self._channel.address, frame)
        mail = decode(envelope, version)
        # What was meant for a predecessor is none of our business: it takes no place in the table.
        if mail.to_epoch == self.epoch and not self._taken.take(mail.epoch, mail.number):
            raise WireError(f"message {mail.number} from {mail.sender} has come already")
        return mail

    def _count(self, error: ValueError) -> None:
        """Log the 1st, 2nd, 4th, 8th ...: nobody fills the log by sending."""
        self.num_undecodable += 1
        if self.num_undecodable.bit_count() == 1:
            logger.warning("dropped %d control messages so far, the last: %s", self.num_undecodable, error)

    def forget(self, address: str) -> None:
        """After what is still in the outbox has been sent."""
        self.flush()
        self._channel.forget(address)
