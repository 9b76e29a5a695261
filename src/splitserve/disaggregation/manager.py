"""KVManager: one rank's part in handing KV caches over. No sockets and no threads in it; `tick` makes it move.

A tick, in this order:
1. read what peers said (before any deadline is looked at: a paused process must not blame its peers);
2. move every room: writes, completions, heartbeats, deadlines, all by the injected clock;
3. send what there is to say.

Whoever owns the manager calls `tick` when the channel, the transport or a call from the scheduler gives reason to, and
a few times a second anyway. One lock guards it: the ports it hands out may be used from another thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from splitserve.cache.shared_pages import SharedPages
from splitserve.clock import Clock
from splitserve.config import DisaggregationConfig
from splitserve.core.request import BootstrapInfo, DisaggregationMode
from splitserve.disaggregation.arrival import Arrivals
from splitserve.disaggregation.checksum import Checksums
from splitserve.disaggregation.decode_side import DecodeSide
from splitserve.disaggregation.fake_room import FAKE_BOOTSTRAP_HOST, FakeKVReceiver, FakeKVSender
from splitserve.disaggregation.mail import ControlChannel, Mailbox
from splitserve.disaggregation.metadata import MetadataBuffers
from splitserve.disaggregation.peers import Directory
from splitserve.disaggregation.ports import AskedPrompt, RankReceiver, RankSender
from splitserve.disaggregation.prefill_side import PrefillSide
from splitserve.disaggregation.room import Context, Limits
from splitserve.disaggregation.staging import Staging
from splitserve.disaggregation.transports.base import Transport
from splitserve.disaggregation.wire import (
    KVArgs,
    Mail,
    PrefillInfo,
    Unregistered,
    VersionMismatch,
    new_epoch,
)
from splitserve.errors import SplitserveError, WorkerUnavailableError


def _nobody_to_wake() -> None:
    """For owners that tick by themselves."""


class KVManager:
    """Implements ManagerPort, and RankManager for a worker of several ranks. `directory` is decode's.

    `group_args`: decode's, the KVArgs of all ranks of this worker in order of `rank.index`, this one's among them; none
    for a worker of one rank. `instance`: prefill's, drawn by the driver for all ranks of this start of the worker.
    `staging` is prefill's, where it can convert KV; `arrivals` decode's, where KV travels in a narrower dtype.
    The transport's regions are those of the layout, the metadata's, and then the staging memory's.
    """

    def __init__(
        self,
        role: DisaggregationMode,
        *,
        clock: Clock,
        channel: ControlChannel,
        transport: Transport,
        args: KVArgs,
        metadata: MetadataBuffers,
        config: DisaggregationConfig,
        directory: Directory | None = None,
        staging: Staging | None = None,
        arrivals: Arrivals | None = None,
        checksums: Checksums | None = None,
        shared: SharedPages | None = None,
        group_args: Sequence[KVArgs] = (),
        instance: int = 0,
        limits: Limits | None = None,
        epoch: int | None = None,
        wake: Callable[[], None] = _nobody_to_wake,
    ) -> None:
        self.lock = threading.RLock()
        self._channel = channel
        self._mailbox = Mailbox(channel, new_epoch() if epoch is None else epoch, config.cluster_token.secret)
        self._metadata = metadata
        self._context = Context(
            clock=clock,
            mailbox=self._mailbox,
            transport=transport,
            args=args,
            group_args=list(group_args) or [args],
            config=config,
            staging=staging,
            arrivals=arrivals,
            checksums=checksums,
            shared=shared,
            limits=limits or Limits(),
            lock=self.lock,
            wake=wake,
        )
        self._instance = instance
        self._prefill = PrefillSide(self._context) if role is DisaggregationMode.PREFILL else None
        self._decode: DecodeSide | None = None
        if role is DisaggregationMode.DECODE:
            if directory is None:
                raise ValueError("the decode role needs a directory to find prefill workers")
            self._decode = DecodeSide(self._context, directory)

    @property
    def num_rooms(self) -> int:
        return self._side.num_rooms

    @property
    def num_peers(self) -> int:
        return self._side.num_peers

    @property
    def num_undecodable(self) -> int:
        """Control frames dropped: not of this cluster, repeated, or unreadable."""
        return self._mailbox.num_undecodable

    def prefill_info(self) -> PrefillInfo:
        """What a prefill rank registers with its bootstrap server."""
        return PrefillInfo(
            epoch=self._mailbox.epoch,
            instance=self._instance,
            control_address=self._mailbox.address,
            args=self._context.args,
        )

    # -- ManagerPort ----------------------------------------------------------------------------------------------

    def sender(self, rid: str, bootstrap: BootstrapInfo) -> RankSender:
        if self._prefill is None:
            raise ValueError("only the prefill role sends")
        if bootstrap.host == FAKE_BOOTSTRAP_HOST:
            return FakeKVSender(self._context, bootstrap.key, rid)
        with self.lock:
            sender = self._prefill.open(rid, bootstrap.key)
        self._context.wake()
        return sender

    def receiver(self, rid: str, bootstrap: BootstrapInfo, attempt: int | None = None) -> RankReceiver:
        """`attempt`: the number that the driver's rank drew for this use of the room; None: draw one."""
        if self._decode is None:
            raise ValueError("only the decode role receives")
        if bootstrap.host == FAKE_BOOTSTRAP_HOST:
            return FakeKVReceiver(self._context, bootstrap.key, rid, self._metadata)
        with self.lock:
            receiver = self._decode.open(rid, bootstrap, attempt)
        self._context.wake()
        return receiver

    def take_asked_prompts(self) -> list[AskedPrompt]:
        # Asked every step, and hardly ever answered: no waiting for a tick under way.
        if self._prefill is None or not self._prefill.has_asked:
            return []
        with self.lock:
            return self._prefill.take_asked()

    # -- for the owner --------------------------------------------------------------------------------------------

    def tick(self) -> bool:
        """Go on. True where a room's state changed since the last tick."""
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

    def fail_all(self, error: SplitserveError) -> None:
        """Give every open room up."""
        with self.lock:
            self._side.fail_all(error)
            self._mailbox.flush()

    def close(self) -> None:
        """Give every room up, tell every peer, and cut every session off. Idempotent."""
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
        """False for a message to whoever had our address before us; its sender is told that that one is gone."""
        if mail.to_epoch == self._mailbox.epoch:
            return True
        if not isinstance(mail.body, Unregistered):
            session = getattr(mail.body, "session", None)
            session_id = session.session_id if session else getattr(mail.body, "session_id", "")
            why = "it was restarted and does not know the session"
            self._mailbox.reply(mail, Unregistered(session_id=session_id, why=why))
        return False
