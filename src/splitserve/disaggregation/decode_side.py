"""The decode side of a manager: prefill peers (found, shaken hands with, watched) and rooms being received.

Which pages prefill may write to is decided here: those of an announced room, until its TransferStatus or the fence. The
fence is `_lose`: the session's drain returns only when nothing can be written through it any more, and a prefill that
lives on must register for a new one. Losing a prefill costs its announced rooms; rooms that had not announced yet look
for it again, and find its successor without anybody restarting.
"""

from __future__ import annotations

import itertools
import logging

from splitserve.core.request import BootstrapInfo, RoomKey
from splitserve.disaggregation.backoff import Backoff
from splitserve.disaggregation.peers import BootstrapAddress, Directory, LookupFailure, PeerState, PrefillPeer
from splitserve.disaggregation.receiver import KVReceiver, Target
from splitserve.disaggregation.room import Context
from splitserve.disaggregation.state import KVEvent, KVPoll
from splitserve.disaggregation.wire import (
    PROTOCOL_VERSION,
    AbortRoom,
    Cause,
    KVArgsRegisterInfo,
    Mail,
    Ping,
    PrefillInfo,
    RegisterReply,
    TransferInfo,
    TransferStatus,
    Unregistered,
    VersionMismatch,
    version_difference,
)
from splitserve.errors import (
    CapacityError,
    DuplicateRoomError,
    IncompatiblePeerError,
    PeerLostError,
    SplitserveError,
    WorkerUnavailableError,
)

logger = logging.getLogger(__name__)


class DecodeSide:
    def __init__(self, context: Context, directory: Directory) -> None:
        self._context = context
        self._directory = directory
        self._rooms: dict[RoomKey, KVReceiver] = {}
        self._peers: dict[BootstrapAddress, PrefillPeer] = {}
        self._backoff: Backoff[BootstrapAddress] = Backoff()
        # Drained sessions of which a write may still be under way, and the rooms that must keep their pages until then.
        self._fencing: dict[str, list[KVReceiver]] = {}
        # From a random start, so that two decodes never use the same number.
        self._attempts = itertools.count(context.mailbox.epoch >> 1)

    @property
    def num_rooms(self) -> int:
        return len(self._rooms)

    @property
    def num_peers(self) -> int:
        return len(self._peers)

    # -- rooms ----------------------------------------------------------------------------------------------------

    def open(self, rid: str, bootstrap: BootstrapInfo, attempt: int | None = None) -> KVReceiver:
        key = bootstrap.key
        if key in self._rooms:
            raise DuplicateRoomError(f"request {rid}: room {key} is being served already", param="bootstrap_room")
        if len(self._rooms) >= self._context.limits.max_rooms:
            raise CapacityError(f"request {rid}: {len(self._rooms)} hand-overs are open, retry later")
        peer = self._peer_of(bootstrap)
        number = next(self._attempts) if attempt is None else attempt
        receiver = KVReceiver(self, self._context, bootstrap, rid, number, peer)
        self._rooms[key] = receiver
        self._pair_if_ready(receiver)
        return receiver

    def announce(self, receiver: KVReceiver, target: Target) -> None:
        assert receiver.peer.session is not None
        info = TransferInfo(
            session_id=receiver.peer.session.session_id,
            key=receiver.key,
            attempt=receiver.attempt,
            rid=receiver.rid,
            pages=target.pages,
            metadata_index=target.metadata_index,
            num_tokens=target.num_tokens,
            num_held_tokens=target.num_held_tokens,
            prompt_ids=target.prompt_ids,
        )
        self._post(receiver.peer, info)

    def fail(self, receiver: KVReceiver, error: SplitserveError) -> None:
        """Fail a room and tell prefill, as soon as we know where it is."""
        if not receiver.fail(error):
            return
        if receiver.announced_at is not None and not receiver.settled:
            receiver.abort_again_at = self._context.clock.now() + self._context.config.heartbeat_interval
        self._send_abort(receiver)

    def fail_all(self, error: SplitserveError) -> None:
        for receiver in list(self._rooms.values()):
            self.fail(receiver, error)

    def remove(self, receiver: KVReceiver) -> None:
        self._rooms.pop(receiver.key, None)

    # -- messages -------------------------------------------------------------------------------------------------

    def handle(self, mail: Mail) -> None:
        peers = [p for p in self._peers.values() if p.info and p.info.control_address == mail.sender]
        for peer in peers:
            if peer.info and peer.info.epoch != mail.epoch:
                self._lose(peer, "it was restarted", is_replaced=True)
            else:
                peer.speaks()
                self._pair_rooms(peer)
        match mail.body:
            case RegisterReply() as body:
                self._on_register_reply(mail, body)
            case TransferStatus() as body:
                if receiver := self._room_of(mail, body.key, body.attempt):
                    self._on_status(receiver, body)
            case AbortRoom() as body:
                receiver = self._room_of(mail, body.key, body.attempt)
                if receiver is not None and receiver.fail(body.cause.to_error(body.key)):
                    # Prefill knows; its TransferStatus follows. Should that be lost, our repeated abort asks for it.
                    receiver.abort_again_at = self._context.clock.now() + self._context.config.heartbeat_interval
            case Unregistered(session_id=session_id, why=why):
                if lost := self._peer_of_session(session_id):
                    self._lose(lost, why, tell=False)
            case _:
                pass

    def handle_mismatch(self, mismatch: VersionMismatch) -> None:
        for peer in list(self._peers.values()):
            if peer.info and peer.info.control_address == mismatch.envelope.sender:
                self._reject(peer, str(mismatch))

    def _on_register_reply(self, mail: Mail, body: RegisterReply) -> None:
        peer = self._peer_of_session(body.session_id)
        if peer is None or peer.info is None or peer.info.epoch != mail.epoch:
            return
        if body.refusal is not None:
            self._reject(peer, f"prefill refuses: {body.refusal}")
            return
        peer.state = PeerState.READY
        self._pair_rooms(peer)

    def _on_status(self, receiver: KVReceiver, status: TransferStatus) -> None:
        receiver.abort_again_at = None
        self._context.changed = True
        if status.failure is not None:
            receiver.fail(status.failure.to_error(receiver.key))
        elif receiver.poll() is KVPoll.TRANSFERRING:
            receiver.complete(status.checksum)
        receiver.settled = True

    def _room_of(self, mail: Mail, key: RoomKey, attempt: int) -> KVReceiver | None:
        """The announced room a prefill speaks of, if it is still that attempt and that prefill."""
        receiver = self._rooms.get(key)
        if receiver is None or receiver.attempt != attempt or receiver.announced_at is None:
            return None
        info = receiver.peer.info
        return receiver if info is not None and info.epoch == mail.epoch else None

    # -- time -----------------------------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        for session_id in list(self._fencing):
            self._settle_if_fenced(session_id)
        for peer in list(self._peers.values()):
            if peer.state is PeerState.WAITING:
                self._ask_if_due(peer)
            elif peer.state is PeerState.RESOLVING:
                self._look_up(peer)
            else:
                self._heartbeat(peer, now)
        for receiver in list(self._rooms.values()):
            self._check_deadline(receiver, now)
            if receiver.abort_again_at is not None and now >= receiver.abort_again_at:
                receiver.abort_again_at = now + self._context.config.heartbeat_interval
                self._send_abort(receiver)

    def close(self, why: str) -> None:
        for peer in list(self._peers.values()):
            self._lose(peer, why)

    def _ask_if_due(self, peer: PrefillPeer) -> None:
        if self._context.clock.now() >= peer.retry_at:
            peer.state = PeerState.RESOLVING
            self._directory.request(peer.address, self._context.config.bootstrap_timeout)

    def _look_up(self, peer: PrefillPeer) -> None:
        match self._directory.result(peer.address):
            case PrefillInfo() as info:
                self._resolved(peer, info)
            case LookupFailure(message=message, is_definitive=definitive):
                del self._peers[peer.address]
                error = WorkerUnavailableError(f"{peer} was not found: {message}")
                logger.warning("%s", error.message)
                if definitive:
                    self._fail_waiting(peer, error)
                else:
                    self._look_again(peer)
            case None:
                pass

    def _heartbeat(self, peer: PrefillPeer, now: float) -> None:
        config = self._context.config
        if not peer.beat(now, config.heartbeat_interval):
            return
        if peer.misses >= config.heartbeat_misses:
            seconds = config.heartbeat_interval * config.heartbeat_misses
            self._lose(peer, f"it did not answer for {seconds:g} s")
        elif peer.state is PeerState.READY:
            assert peer.session is not None
            self._post(peer, Ping(session_id=peer.session.session_id))
        else:
            self._register(peer)

    def _check_deadline(self, receiver: KVReceiver, now: float) -> None:
        config = self._context.config
        if receiver.is_final:
            return
        if receiver.announced_at is not None:
            if now - receiver.announced_at > config.transfer_timeout:
                stage = "waiting for its KV cache"
                self.fail(receiver, receiver.deadline_error(stage, config.transfer_timeout, "transfer_timeout"))
        elif now - receiver.opened_at > config.bootstrap_timeout:
            is_paired = receiver.poll() is KVPoll.WAITING_FOR_INPUT
            stage = "waiting for free pages" if is_paired else f"reaching the {receiver.peer}"
            self.fail(receiver, receiver.deadline_error(stage, config.bootstrap_timeout, "bootstrap_timeout"))

    # -- peers ----------------------------------------------------------------------------------------------------

    def _peer_of(self, bootstrap: BootstrapInfo) -> PrefillPeer:
        """The prefill rank that serves a room; rank 0 while nobody has said how many there are."""
        host, port = bootstrap.host, bootstrap.port
        infos = (p.info for p in self._peers.values() if p.address[:2] == (host, port))
        dp_size = next((info.args.rank.dp_size for info in infos if info), 1)
        return self._peer_at(BootstrapAddress(host, port, bootstrap.prefill_rank(dp_size)))

    def _peer_at(self, address: BootstrapAddress) -> PrefillPeer:
        """The prefill behind a bootstrap address, looked up where it is not known."""
        peer = self._peers.get(address)
        if peer is None:
            if len(self._peers) >= self._context.limits.max_peers:
                raise CapacityError(f"{len(self._peers)} prefill workers are known, and there is no room for another")
            retry_at = self._backoff.retry_at(address, self._context.clock.now())
            peer = self._peers[address] = PrefillPeer(address, retry_at=retry_at)
            self._ask_if_due(peer)
        return peer

    def _resolved(self, peer: PrefillPeer, info: PrefillInfo) -> None:
        peer.info = info
        self._send_waiting(peer)
        if info.version != PROTOCOL_VERSION:
            self._reject(peer, version_difference(ours=PROTOCOL_VERSION, theirs=info.version))
        elif difference := info.args.difference(self._context.args):
            self._reject(peer, f"prefill and decode differ: {difference}")
        else:
            peer.session = self._context.transport.open_session()
            peer.state = PeerState.REGISTERING
            peer.next_beat_at = self._context.clock.now() + self._context.config.heartbeat_interval
            peer.heard = False
            self._register(peer)
            if info.args.rank.dp_size > 1:
                self._look_again(peer)

    def _send_waiting(self, peer: PrefillPeer) -> None:
        """Aborts that waited for an address, each to the rank of its room."""
        for bootstrap, abort in peer.unsent_aborts:
            try:
                rank = self._peer_of(bootstrap)
            except CapacityError:
                # The deadline of that side ends it.
                continue
            if rank.info is None:
                rank.unsent_aborts.append((bootstrap, abort))
            else:
                self._post(rank, abort)
        peer.unsent_aborts.clear()

    def _register(self, peer: PrefillPeer) -> None:
        assert peer.session is not None
        self._post(peer, KVArgsRegisterInfo(args=self._context.args, session=peer.session))

    def _reject(self, peer: PrefillPeer, why: str) -> None:
        """The two sides do not fit: fail its rooms for good. The next room looks again; it may have been replaced."""
        logger.warning("%s cannot be used: %s", peer, why)
        self._fence(peer)
        for receiver in self._rooms_of(peer):
            self.fail(receiver, IncompatiblePeerError(receiver.key.room, f"{peer}: {why}"))
        self._forget(peer)

    def _lose(self, peer: PrefillPeer, why: str, *, tell: bool = True, is_replaced: bool = False) -> None:
        """Fence a prefill out. Announced rooms fail, the others look for its successor: at once where there is one."""
        if tell and peer.session is not None:
            self._post(peer, Unregistered(session_id=peer.session.session_id, why=why))
        if not is_replaced:
            self._backoff.lost(peer.address, self._context.clock.now())
        self._fence(peer)
        for receiver in self._rooms_of(peer):
            receiver.abort_again_at = None
            lost = PeerLostError(receiver.key.room, f"{peer} was lost: {why}")
            if receiver.poll() is not KVPoll.BOOTSTRAPPING and receiver.fail(lost) and peer.info is not None:
                # It may live on, and wait for pages that were announced through the lost session.
                self._send_abort(receiver)
        self._forget(peer)
        self._look_again(peer)
        self._context.changed = True

    def _fence(self, peer: PrefillPeer) -> None:
        """Keep the prefill out. Its rooms settle when that is proven: at once, or a write that is under way later."""
        self._peers.pop(peer.address, None)
        if peer.session is not None:
            session_id = peer.session.session_id
            self._context.transport.drain(session_id)
            # Not rooms that had not announced anything: they go on with a successor, and owe their quiescence to that.
            self._fencing[session_id] = [r for r in self._rooms_of(peer) if r.announced_at is not None]
            self._settle_if_fenced(session_id)

    def _settle_if_fenced(self, session_id: str) -> None:
        if self._context.transport.is_fenced(session_id):
            for receiver in self._fencing.pop(session_id):
                receiver.settled = True
            self._context.changed = True

    def _forget(self, peer: PrefillPeer) -> None:
        if peer.info is not None:
            self._context.mailbox.forget(peer.info.control_address)

    def _look_again(self, peer: PrefillPeer) -> None:
        """Rooms that were waiting for this prefill look for theirs again, as long as their deadline lets them."""
        for receiver in self._rooms_of(peer):
            if receiver.poll() is not KVPoll.BOOTSTRAPPING:
                continue
            try:
                receiver.peer = self._peer_of(receiver.bootstrap)
            except CapacityError as error:
                receiver.fail(error)
            else:
                self._pair_if_ready(receiver)

    def _fail_waiting(self, peer: PrefillPeer, error: SplitserveError) -> None:
        for receiver in self._rooms_of(peer):
            if receiver.poll() is KVPoll.BOOTSTRAPPING:
                receiver.fail(error)

    def _pair_rooms(self, peer: PrefillPeer) -> None:
        for receiver in self._rooms_of(peer):
            self._pair_if_ready(receiver)

    def _pair_if_ready(self, receiver: KVReceiver) -> None:
        if receiver.peer.is_ready and receiver.poll() is KVPoll.BOOTSTRAPPING:
            receiver.advance(KVEvent.PAIRED)

    def _send_abort(self, receiver: KVReceiver) -> None:
        abort = AbortRoom(key=receiver.key, attempt=receiver.attempt, cause=Cause.of(receiver.failure()))
        if receiver.peer.info is None:
            receiver.peer.unsent_aborts.append((receiver.bootstrap, abort))
        else:
            self._post(receiver.peer, abort)

    def _rooms_of(self, peer: PrefillPeer) -> list[KVReceiver]:
        return [receiver for receiver in self._rooms.values() if receiver.peer is peer]

    def _peer_of_session(self, session_id: str) -> PrefillPeer | None:
        return next((p for p in self._peers.values() if p.session and p.session.session_id == session_id), None)

    def _post(
        self, peer: PrefillPeer, body: KVArgsRegisterInfo | TransferInfo | AbortRoom | Ping | Unregistered
    ) -> None:
        assert peer.info is not None
        self._context.mailbox.post(peer.info.control_address, peer.info.epoch, body)
