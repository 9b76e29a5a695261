"""DecodeManager: the manager of a decode rank, with prefill peers (lookup, handshake, heartbeat) and rooms to receive.

It decides which pages prefill may write to: those of an announced room, until each source sends TransferStatus or is
fenced. `_lose` sets the fence: a drained and fenced session lets no more writes through, and a prefill that is still
alive must register for a new session. A prefill is lost as a whole, with all its ranks. Its announced rooms then fail.
So do paired rooms that wait for pages. Others look the prefill up again and find its successor without a restart.
"""

from __future__ import annotations

import itertools
import logging

from splitserve.core.errors import CapacityError, IncompatiblePeerError, PeerLostError, WorkerUnavailableError
from splitserve.core.request import FAKE_BACKEND, BootstrapInfo, RoomKey
from splitserve.transfer import wire
from splitserve.transfer.manager import KVManager
from splitserve.transfer.peers import (
    Backoff,
    BootstrapAddress,
    Directory,
    LookupFailure,
    PeerState,
    PrefillPeer,
    Source,
    sources_among,
)
from splitserve.transfer.receiver import KVReceiver
from splitserve.transfer.room import Context, Room
from splitserve.transfer.state import RoomState
from splitserve.transfer.transports.base import PeerAddress

logger = logging.getLogger(__name__)


class DecodeManager(KVManager[KVReceiver]):
    """Rooms and peers of one decode rank. `directory`: lookup of prefill workers."""

    def __init__(self, context: Context, directory: Directory) -> None:
        super().__init__(context)
        self._directory = directory
        self._peers: dict[BootstrapAddress, PrefillPeer] = {}
        self._backoff = Backoff()
        # Drained sessions that may have a write in flight -> rooms that keep their pages until the session is fenced.
        self._fencing: dict[str, list[KVReceiver]] = {}
        # Session of the link over which fake rooms arrive. None: they arrive at once.
        self._link: PeerAddress | None = None
        if context.config.transfer_backend == FAKE_BACKEND:
            self._link = context.transport.open_session()
        # Starts at a random number, so that two decode workers never use the same one.
        self._attempts = itertools.count(context.mailbox.epoch >> 1)

    def receiver(self, rid: str, bootstrap: BootstrapInfo, attempt: int | None = None) -> KVReceiver:
        """Open the receiving end of a room. Raises DuplicateRoomError, CapacityError.

        `attempt`: the driver's number of this use of the room. None: choose one.
        """
        with self._context.lock:
            if bootstrap.is_fake:
                peer = PrefillPeer(BootstrapAddress(bootstrap.host, bootstrap.port), PeerState.READY)
            else:
                self._check_room(rid, bootstrap.key)
                peer = self._peer_of(bootstrap)
            number = next(self._attempts) if attempt is None else attempt
            receiver = KVReceiver(self._context, bootstrap, rid, number, peer, self._close, self._link)
            if bootstrap.is_fake:
                self._fakes.add(receiver)
            else:
                self._rooms[bootstrap.key] = receiver
            receiver.pair_if_ready()
            self._context.group.open(receiver, bootstrap, number)
        self._context.wake()
        return receiver

    def is_ready(self, bootstrap: BootstrapInfo) -> bool:
        """Return whether this rank would pair a new room of this prefill at once. Followers may have to look it up."""
        with self._context.lock:
            peer = self._peers.get(self._address_of(bootstrap))
            return bootstrap.is_fake or (peer is not None and peer.is_ready)

    def _close(self, room: Room) -> None:
        # A fake room may still have its write in flight. `_advance` forgets it.
        if self._rooms.get(room.key) is room:
            del self._rooms[room.key]

    def _handle(self, mail: wire.Mail) -> None:
        sources = [(peer, source) for peer in self._peers.values() for source in peer.sources]
        for peer, source in [(p, s) for p, s in sources if s.info.control_address == mail.sender]:
            if source.info.epoch != mail.epoch:
                self._lose(peer, "it was restarted", at=source, is_replaced=True)
            else:
                source.has_answered, source.misses = True, 0
                self._pair_rooms(peer)
        match mail.body:
            case wire.RegisterReply() as body:
                self._on_register_reply(mail, body)
            case wire.TransferStatus() as body:
                if room := self._room_of(mail, body.key, body.attempt):
                    room[0].take_status(room[1], body)
            case wire.AbortRoom() as body:
                if room := self._room_of(mail, body.key, body.attempt):
                    # The sender needs no abort; its TransferStatus follows. If that is lost, our repeated abort
                    # requests it again.
                    room[0].fail(body.cause.to_error(body.key), informed=room[1])
            case wire.Unregistered(session_id=session_id, why=why):
                if lost := self._source_of_session(session_id):
                    self._lose(lost[0], why, at=lost[1])
            case _:
                pass

    def _handle_mismatch(self, mismatch: wire.VersionMismatch) -> None:
        for peer in list(self._peers.values()):
            if any(source.info.control_address == mismatch.envelope.sender for source in peer.sources):
                self._reject(peer, str(mismatch))

    def _on_register_reply(self, mail: wire.Mail, body: wire.RegisterReply) -> None:
        found = self._source_of_session(body.session_id)
        if found is None or found[1].info.epoch != mail.epoch:
            return
        peer, source = found
        if body.refusal is not None:
            self._reject(peer, f"prefill refuses: {body.refusal}")
            return
        source.is_registered = True
        if all(other.is_registered for other in peer.sources):
            peer.state = PeerState.READY
            self._pair_rooms(peer)

    def _room_of(self, mail: wire.Mail, key: RoomKey, attempt: int) -> tuple[KVReceiver, Source] | None:
        """Return the announced room that a message concerns, and its source. None for another attempt of the room."""
        receiver = self._rooms.get(key)
        if receiver is None or receiver.attempt != attempt or receiver.announced_at is None:
            return None
        return next(((receiver, source) for source in receiver.peer.sources if source.info.epoch == mail.epoch), None)

    def _advance(self, now: float) -> None:
        for session_id in list(self._fencing):
            self._settle_if_fenced(session_id)
        for peer in list(self._peers.values()):
            if peer.state is PeerState.WAITING:
                self._look_up_if_due(peer)
            elif peer.state is PeerState.RESOLVING:
                self._look_up(peer)
            else:
                self._heartbeat(peer, now)
        for receiver in (*self._rooms.values(), *self._fakes):
            receiver.step(now)
        self._fakes = {receiver for receiver in self._fakes if not receiver.is_over}

    def _look_up_if_due(self, peer: PrefillPeer) -> None:
        if self._context.clock.now() >= peer.retry_at:
            peer.state = PeerState.RESOLVING
            self._directory.request(peer.address, self._context.config.bootstrap_timeout)

    def _look_up(self, peer: PrefillPeer) -> None:
        match self._directory.result(peer.address):
            case list() as infos:
                self._resolved(peer, infos)
            case LookupFailure(message=message, is_definitive=definitive):
                del self._peers[peer.address]
                error = WorkerUnavailableError(f"{peer} was not found: {message}")
                logger.warning("%s", error.message)
                if not definitive:
                    self._look_again(peer)
                    return
                for receiver in self._rooms_of(peer):
                    if receiver.state is RoomState.BOOTSTRAPPING:
                        receiver.fail(error)
            case None:
                pass

    def _heartbeat(self, peer: PrefillPeer, now: float) -> None:
        config = self._context.config
        for source in peer.sources:
            if not source.beat(now, config.heartbeat_interval):
                continue
            if source.misses >= config.heartbeat_misses:
                seconds = config.heartbeat_interval * config.heartbeat_misses
                self._lose(peer, f"it did not answer for {seconds:g} s", at=source)
                return
            if source.is_registered:
                source.post(self._context.mailbox, wire.Ping(session_id=source.session_id))
            else:
                self._register(source)

    def _peer_of(self, bootstrap: BootstrapInfo) -> PrefillPeer:
        """Return the data parallel rank that serves a room. Request a lookup if it is not known yet.

        Raises CapacityError.
        """
        address = self._address_of(bootstrap)
        peer = self._peers.get(address)
        if peer is None:
            if len(self._peers) >= self._context.limits.max_peers:
                raise CapacityError(f"{len(self._peers)} prefill workers are known, and there is no room for another")
            retry_at = self._backoff.retry_at(address, self._context.clock.now())
            peer = self._peers[address] = PrefillPeer(address, retry_at=retry_at)
            self._look_up_if_due(peer)
        return peer

    def _address_of(self, bootstrap: BootstrapInfo) -> BootstrapAddress:
        """Return the address of the data parallel rank that serves a room. Rank 0 while their number is unknown."""
        host, port = bootstrap.host, bootstrap.port
        sizes = (p.dp_size for p in self._peers.values() if p.address[:2] == (host, port))
        dp_size = next((size for size in sizes if size), 1)
        return BootstrapAddress(host, port, bootstrap.prefill_rank(dp_size))

    def _resolved(self, peer: PrefillPeer, infos: list[wire.PrefillInfo]) -> None:
        try:
            peer.sources = sources_among(infos, self._context.args, self._context.group_args)
        except ValueError as error:
            peer.sources = [Source(info) for info in infos]
            self._send_waiting(peer)
            self._reject(peer, str(error))
            return
        self._send_waiting(peer)
        peer.state = PeerState.REGISTERING
        for source in peer.sources:
            source.session = self._context.transport.open_session()
            source.next_beat_at = self._context.clock.now() + self._context.config.heartbeat_interval
            self._register(source)
        if infos[0].args.rank.dp_size > 1:
            self._look_again(peer)

    def _send_waiting(self, peer: PrefillPeer) -> None:
        """Send the aborts that waited for an address, each to the rank of its room."""
        for bootstrap, abort in peer.unsent_aborts:
            try:
                rank = self._peer_of(bootstrap)
            except CapacityError:
                # Prefill's own deadline ends the room.
                continue
            if not rank.sources:
                rank.unsent_aborts.append((bootstrap, abort))
            for source in rank.sources:
                source.post(self._context.mailbox, abort)
        peer.unsent_aborts.clear()

    def _register(self, source: Source) -> None:
        assert source.session is not None
        args = self._context.args
        body = wire.KVArgsRegisterInfo(
            args=args, session=source.session, pairs=source.pairs, num_targets=source.num_targets
        )
        source.post(self._context.mailbox, body)

    def _reject(self, peer: PrefillPeer, why: str) -> None:
        """Fail the rooms of an incompatible prefill. The next room looks it up again: it may have been replaced."""
        logger.warning("%s cannot be used: %s", peer, why)
        self._fence(peer)
        for receiver in self._rooms_of(peer):
            receiver.fail(IncompatiblePeerError(receiver.key.room, f"{peer}: {why}"))
        self._forget(peer)

    def _lose(self, peer: PrefillPeer, why: str, *, at: Source | None = None, is_replaced: bool = False) -> None:
        """Fence a prefill that was lost at one of its ranks (`at`) or as a whole.

        Paired rooms fail. The others look for its successor, at once if there is one.
        """
        name = str(peer) if at is None else peer.name_of(at)
        for source in peer.sources:
            if source.session is not None:
                source.post(self._context.mailbox, wire.Unregistered(session_id=source.session_id, why=why))
        if not is_replaced:
            self._backoff.lost(peer.address, self._context.clock.now())
        self._fence(peer)
        for receiver in self._rooms_of(peer):
            if receiver.state is not RoomState.BOOTSTRAPPING:
                # The prefill may still be alive and wait for pages announced through the lost sessions: abort once.
                receiver.fail(PeerLostError(receiver.key.room, f"{name} was lost: {why}"))
                receiver.abort_again_at = None
        self._forget(peer)
        self._look_again(peer)

    def _fence(self, peer: PrefillPeer) -> None:
        """Fence a prefill. Its rooms settle when the fence is proven: at once, or when the last write has ended."""
        self._peers.pop(peer.address, None)
        for source in peer.sources:
            if source.session is not None:
                self._context.transport.drain(source.session_id)
                # Rooms that announced nothing have no pages on loan, so they are left out.
                self._fencing[source.session_id] = [r for r in self._rooms_of(peer) if r.announced_at is not None]
                self._settle_if_fenced(source.session_id)

    def _settle_if_fenced(self, session_id: str) -> None:
        if self._context.transport.is_fenced(session_id):
            for receiver in self._fencing.pop(session_id):
                receiver.end_loan(session_id)

    def _forget(self, peer: PrefillPeer) -> None:
        for source in peer.sources:
            self._context.mailbox.forget(source.info.control_address)

    def _look_again(self, peer: PrefillPeer) -> None:
        """Look up the prefill again for rooms that waited for this peer. Their deadlines are unchanged."""
        for receiver in self._rooms_of(peer):
            if receiver.state is not RoomState.BOOTSTRAPPING:
                continue
            try:
                receiver.peer = self._peer_of(receiver.bootstrap)
            except CapacityError as error:
                receiver.fail(error)
            else:
                receiver.pair_if_ready()

    def _pair_rooms(self, peer: PrefillPeer) -> None:
        if peer.is_ready:
            for receiver in self._rooms_of(peer):
                receiver.pair_if_ready()

    def _rooms_of(self, peer: PrefillPeer) -> list[KVReceiver]:
        return [receiver for receiver in self._rooms.values() if receiver.peer is peer]

    def _source_of_session(self, session_id: str) -> tuple[PrefillPeer, Source] | None:
        everyone = ((peer, source) for peer in self._peers.values() for source in peer.sources if source.session)
        return next(((peer, source) for peer, source in everyone if source.session_id == session_id), None)
