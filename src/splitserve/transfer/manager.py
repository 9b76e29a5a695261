"""KVManager: the KV transfers of one rank, and of its whole worker if it is the driver (`room.py`).

It has no sockets and no threads; `tick` does its work.

A tick does this, in order:
1. Read the messages of peers. This precedes all deadlines: after a pause of this process, its peers' messages are
   already there.
2. Advance every room: writes, completions, heartbeats and deadlines, all by the injected clock.
3. Send the queued messages.

The owner calls `tick` after an event of the channel, the transport or the scheduler, and a few times a second anyway.
One lock guards the manager, because its ports may be used from another thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from splitserve.core.clock import Clock
from splitserve.core.config import DisaggregationConfig
from splitserve.core.errors import SplitserveError, WorkerUnavailableError
from splitserve.core.request import BootstrapInfo, DisaggregationMode
from splitserve.transfer.decode_side import DecodeSide
from splitserve.transfer.group_wire import OpenReceiver, OpenSender, RankLink
from splitserve.transfer.mail import ControlChannel, Mailbox
from splitserve.transfer.metadata import MetadataBuffers, ReqToMetadataIdxAllocator
from splitserve.transfer.peers import Directory
from splitserve.transfer.prefill_side import PrefillSide, RequestedPrompt
from splitserve.transfer.receiver import KVReceiver
from splitserve.transfer.room import Context, KVManagerMemory, RankGroup, RoomLimits
from splitserve.transfer.sender import KVSender
from splitserve.transfer.transports.base import Transport
from splitserve.transfer.wire import KVArgs, Mail, PrefillInfo, Unregistered, VersionMismatch, new_epoch


def _no_wake() -> None:
    """Do nothing: the wake function of owners that tick periodically."""


@dataclass(frozen=True, slots=True)
class KVManagerPorts:
    """Connections of a manager to its peers and its owner."""

    clock: Clock
    channel: ControlChannel
    # Its regions are those of the layout, of the metadata and of the staging memory, in this order.
    transport: Transport
    # On decode workers: lookup of prefill workers.
    directory: Directory | None = None
    # Requests a tick soon; called from any thread.
    wake: Callable[[], None] = _no_wake
    # On drivers: one link for each of `followers_of` its rank.
    links: Sequence[RankLink] = ()


@dataclass(frozen=True, slots=True)
class KVManagerIdentity:
    """Values under which peers know a manager."""

    args: KVArgs
    # On decode workers: KVArgs of all ranks of the worker in order of `rank.index`. Empty: the worker has one rank.
    group_args: Sequence[KVArgs] = ()
    # On prefill workers: random number from the driver, the same for all ranks of this start of the worker.
    instance: int = 0
    # None: draw one.
    epoch: int | None = None


class KVManager:
    """KV transfers of one rank. The scheduler uses the driver's, and through it those of all ranks."""

    def __init__(
        self,
        role: DisaggregationMode,
        ports: KVManagerPorts,
        memory: KVManagerMemory,
        identity: KVManagerIdentity,
        config: DisaggregationConfig,
        limits: RoomLimits | None = None,
    ) -> None:
        self.lock = threading.RLock()
        epoch = new_epoch() if identity.epoch is None else identity.epoch
        self._mailbox = Mailbox(ports.channel, epoch)
        self._context = Context(
            clock=ports.clock,
            mailbox=self._mailbox,
            transport=ports.transport,
            args=identity.args,
            group_args=list(identity.group_args) or [identity.args],
            config=config,
            memory=memory,
            limits=limits or RoomLimits(),
            group=RankGroup(identity.args.rank, ports.links) if ports.links else RankGroup(),
            lock=self.lock,
            wake=ports.wake,
        )
        self._instance = identity.instance
        self._prefill = PrefillSide(self._context) if role is DisaggregationMode.PREFILL else None
        self._decode: DecodeSide | None = None
        if role is DisaggregationMode.DECODE:
            if ports.directory is None:
                raise ValueError("the decode role needs a directory to find prefill workers")
            self._decode = DecodeSide(self._context, ports.directory)

    @property
    def num_rooms(self) -> int:
        return self._side.num_rooms

    @property
    def num_peers(self) -> int:
        return self._side.num_peers

    @property
    def num_undecodable(self) -> int:
        """Number of dropped control frames: of another cluster, repeated, or unreadable."""
        return self._mailbox.num_undecodable

    def prefill_info(self) -> PrefillInfo:
        """Return what a prefill rank registers with its bootstrap server."""
        return PrefillInfo(
            epoch=self._mailbox.epoch,
            instance=self._instance,
            control_address=self._mailbox.address,
            args=self._context.args,
        )

    # -- for the scheduler's thread -------------------------------------------------------------------------------

    def sender(self, rid: str, bootstrap: BootstrapInfo) -> KVSender:
        """Open the sending end of a room. Raises DuplicateRoomError, CapacityError."""
        if self._prefill is None:
            raise ValueError("only the prefill role sends")
        with self.lock:
            sender = self._prefill.open(rid, bootstrap)
            self._context.group.open(sender, lambda n: OpenSender(number=n, rid=rid, bootstrap=bootstrap))
        self._context.wake()
        return sender

    def receiver(self, rid: str, bootstrap: BootstrapInfo, attempt: int | None = None) -> KVReceiver:
        """Open the receiving end of a room. Raises DuplicateRoomError, CapacityError.

        `attempt`: the driver's number of this use of the room. None: choose one.
        """
        if self._decode is None:
            raise ValueError("only the decode role receives")
        with self.lock:
            receiver = self._decode.open(rid, bootstrap, attempt)
            number = receiver.attempt
            self._context.group.open(
                receiver, lambda n: OpenReceiver(number=n, rid=rid, bootstrap=bootstrap, attempt=number)
            )
        self._context.wake()
        return receiver

    def take_requested_prompts(self) -> list[RequestedPrompt]:
        """Return prompts that decode workers requested since the last call. Prefill only. Open a sender for each.

        Only drivers get them; followers keep announcements until the room is opened.
        """
        # Called every step and almost always empty: do not wait for a tick in progress.
        if self._prefill is None or not self._prefill.has_requested:
            return []
        with self.lock:
            return self._prefill.take_requested()

    # -- for the owner --------------------------------------------------------------------------------------------

    def tick(self) -> bool:
        """Run one tick. Return True if a room's state changed since the last tick."""
        with self.lock:
            for arrived in self._mailbox.collect():
                if isinstance(arrived, VersionMismatch):
                    self._side.handle_mismatch(arrived)
                elif self._is_for_us(arrived):
                    self._side.handle(arrived)
            self._side.tick(self._context.clock.now())
            self._mailbox.flush()
            changed, self._context.changed = self._context.changed, False
            return changed

    def collect_reports(self) -> bool:
        """Apply the reports of followers. Return True if a room's state may have changed. Call if a link has frames."""
        with self.lock:
            return self._context.group.collect()

    def fail_all(self, error: SplitserveError) -> None:
        """Fail every open room."""
        with self.lock:
            self._side.fail_all(error)
            self._mailbox.flush()

    def close(self) -> None:
        """Fail every room, notify every peer, and end every session. Idempotent."""
        with self.lock:
            self._side.fail_all(WorkerUnavailableError("this worker is shutting down: retry on another"))
            self._side.close("it is shutting down")
            self._mailbox.flush()

    @property
    def _side(self) -> PrefillSide | DecodeSide:
        side = self._prefill or self._decode
        if side is None:
            raise ValueError("a colocated worker has no KV manager")
        return side

    def _is_for_us(self, mail: Mail) -> bool:
        """Return False for a message to an earlier owner of our address; notify its sender that this owner is gone."""
        if mail.to_epoch == self._mailbox.epoch:
            return True
        if not isinstance(mail.body, Unregistered):
            session = getattr(mail.body, "session", None)
            session_id = session.session_id if session else getattr(mail.body, "session_id", "")
            why = "it was restarted and does not know the session"
            self._mailbox.reply(mail, Unregistered(session_id=session_id, why=why))
        return False


@dataclass(frozen=True, slots=True)
class TransferKit:
    """Parts that a prefill or decode worker has and a colocated worker does not. Used by one role."""

    manager: KVManager
    metadata: MetadataBuffers
    slots: ReqToMetadataIdxAllocator
