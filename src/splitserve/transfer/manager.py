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

from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from splitserve.core.errors import CapacityError, DuplicateRoomError, SplitserveError, WorkerUnavailableError
from splitserve.core.request import RoomKey
from splitserve.transfer.metadata import MetadataBuffers, ReqToMetadataIdxAllocator
from splitserve.transfer.room import Context, Room
from splitserve.transfer.wire import Mail, PrefillInfo, Unregistered, VersionMismatch

AnyRoom = TypeVar("AnyRoom", bound=Room)


class KVManager(Generic[AnyRoom]):
    """KV transfers of one rank. The scheduler uses the driver's, and through it those of all ranks.

    Base of `PrefillManager` and `DecodeManager`, which open the rooms and handle messages.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._mailbox = context.mailbox
        # Rooms with a request.
        self._rooms: dict[RoomKey, AnyRoom] = {}
        # Rooms without a peer. Their keys may repeat, and no message refers to them.
        self._fakes: set[AnyRoom] = set()
        self._peers: dict[Any, Any] = {}

    @property
    def num_rooms(self) -> int:
        return len(self._rooms)

    @property
    def num_peers(self) -> int:
        return len(self._peers)

    @property
    def num_undecodable(self) -> int:
        """Number of dropped control frames: of another cluster, repeated, or unreadable."""
        return self._mailbox.num_undecodable

    def prefill_info(self) -> PrefillInfo:
        """Return what a prefill rank registers with its bootstrap server."""
        return PrefillInfo(
            epoch=self._mailbox.epoch,
            instance=self._context.instance,
            control_address=self._mailbox.channel.address,
            args=self._context.args,
        )

    def tick(self) -> bool:
        """Run one tick. Return True if a room's state changed since the last tick."""
        context = self._context
        with context.lock:
            for arrived in self._mailbox.collect():
                if isinstance(arrived, VersionMismatch):
                    self._handle_mismatch(arrived)
                elif self._is_for_us(arrived):
                    self._handle(arrived)
            self._advance(context.clock.now())
            self._mailbox.flush()
            changed, context.changed = context.changed, False
            return changed

    def collect_reports(self) -> bool:
        """Apply the reports of followers. Return True if a room's state may have changed. Call if a link has frames."""
        with self._context.lock:
            return self._context.group.collect()

    def fail_all(self, error: SplitserveError) -> None:
        with self._context.lock:
            for room in (*self._rooms.values(), *self._fakes):
                room.fail(error)
            self._mailbox.flush()

    def close(self) -> None:
        """Fail every room, notify every peer, and end every session. Idempotent."""
        with self._context.lock:
            self.fail_all(WorkerUnavailableError("this worker is shutting down: retry on another"))
            for peer in list(self._peers.values()):
                self._lose(peer, "it is shutting down")
            self._mailbox.flush()

    # The rest is called under the lock.

    def _check_room(self, rid: str, key: RoomKey) -> None:
        if key in self._rooms:
            raise DuplicateRoomError(f"request {rid}: room {key} is being served already", param="bootstrap_room")
        if len(self._rooms) >= self._context.limits.max_rooms:
            raise CapacityError(f"request {rid}: {len(self._rooms)} KV transfers are open, retry later")

    def _handle(self, mail: Mail) -> None:
        raise NotImplementedError

    def _handle_mismatch(self, mismatch: VersionMismatch) -> None:
        raise NotImplementedError

    def _advance(self, now: float) -> None:
        """Advance rooms and peers to the time `now`."""
        raise NotImplementedError

    def _lose(self, peer: Any, why: str) -> None:
        """End the sessions with a peer, and the rooms that depend on them."""
        raise NotImplementedError

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


AnyManager = TypeVar("AnyManager", bound=KVManager[Any])


@dataclass(frozen=True, slots=True)
class TransferKit(Generic[AnyManager]):
    """Parts that a prefill or decode worker has and a colocated worker does not. Used by one role."""

    manager: AnyManager
    metadata: MetadataBuffers
    slots: ReqToMetadataIdxAllocator
