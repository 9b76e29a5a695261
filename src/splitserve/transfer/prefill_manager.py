"""PrefillManager: the manager of a prefill rank, with decode peers, rooms to send, early and late messages.

The request and the announcements of a room arrive in any order. Each decode rank to write to announces separately:
1. Request first (`sender`): the sender waits for a TransferInfo from all ranks, or an AbortRoom from one.
2. TransferInfo or AbortRoom first: a sender in state Early or Refused, until the request arrives or a deadline passes.
3. Either one after the room was closed: answered with its result, until a deadline passes.

TransferStatus proves to a decode rank that prefill writes no more for the room. It is therefore sent only when the
room's tickets are final and none is LOST. A LOST write ends the whole session: both peers fence it and repeat the
handshake.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from splitserve.core.errors import (
    CapacityError,
    DeadlineExceededError,
    DuplicateRoomError,
    PeerLostError,
    SplitserveError,
)
from splitserve.core.request import FAKE_BACKEND, BootstrapInfo, RoomKey
from splitserve.transfer import wire
from splitserve.transfer.manager import KVManager
from splitserve.transfer.outgoing import DecodePeer
from splitserve.transfer.room import Context, Room
from splitserve.transfer.sender import KVSender
from splitserve.transfer.sink import sink_announcement, sink_peer

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RequestedPrompt:
    """Tokens for which a decode worker requests the KV, in a room with pages that it has announced."""

    rid: str
    key: RoomKey
    token_ids: list[int]


class PrefillManager(KVManager[KVSender]):
    """Rooms and peers of one prefill rank."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        # Session id -> decode rank.
        self._peers: dict[str, DecodePeer] = {}
        # Rooms without a request yet, and results of closed rooms. Both in order of their deadlines.
        self._early: dict[RoomKey, KVSender] = {}
        self._closed: dict[RoomKey, KVSender] = {}
        # Prompts without a request, for the scheduler to take. Their rooms are in `_early`.
        self._requested: list[RequestedPrompt] = []
        # Target of rooms without a peer. None: their KV is not sent.
        self._sink: DecodePeer | None = None
        if context.config.transfer_backend == FAKE_BACKEND:
            self._sink = sink_peer(context.args, context.transport.open_session(), context.clock.now())

    def sender(self, rid: str, bootstrap: BootstrapInfo, num_tokens: int = 0) -> KVSender:
        """Open the sending end of a room. Raises DuplicateRoomError, CapacityError.

        `num_tokens`: tokens of the prompt. Only a sink needs it.
        """
        key, is_fake = bootstrap.key, bootstrap.is_fake
        with self._context.lock:
            sender: KVSender | None = None
            if not is_fake:
                self._check_room(rid, key)
                self._closed.pop(key, None)
                sender = self._early.pop(key, None)
            sender = sender or KVSender(self._context, key, self._close)
            if not is_fake:
                self._rooms[key] = sender
            sink = self._sink if is_fake else None
            if is_fake:
                self._fakes.add(sender)
            sender.open(rid, is_fake=is_fake and sink is None)
            if sink is not None:
                sender.add_target(sink, sink_announcement(sink.args, sink.session, key, rid, num_tokens))
            self._context.group.open(sender, bootstrap, num_tokens=num_tokens)
        self._context.wake()
        return sender

    def take_requested_prompts(self) -> list[RequestedPrompt]:
        """Return prompts that decode workers requested since the last call. Open a sender for each.

        Prompts of lost decode ranks are left out. Only drivers get prompts; followers keep announcements until the
        room is opened.
        """
        # Called every step and almost always empty: do not wait for a tick in progress.
        if not self._requested:
            return []
        with self._context.lock:
            prompts, self._requested = self._requested, []
            return [p for p in prompts if p.key in self._early and self._early[p.key].targets]

    def refuse_requested(self, key: RoomKey, error: SplitserveError) -> None:
        """Notify decode that a requested prompt gets no sender, instead of at the deadline."""
        with self._context.lock:
            if (early := self._early.pop(key, None)) is not None:
                early.fail(error)

    def _close(self, room: Room) -> None:
        """Keep the result of a cleared room. No message requests that of a fake room."""
        sender = self._rooms.get(room.key)
        if sender is not room:
            self._fakes.discard(room)
            return
        del self._rooms[room.key]
        sender.forget_pages()
        self._keep(sender, self._closed)
        if len(self._closed) > self._context.limits.max_closed:
            del self._closed[next(iter(self._closed))]

    def _keep(self, sender: KVSender, table: dict[RoomKey, KVSender]) -> None:
        sender.expires_at = self._context.clock.now() + self._context.config.bootstrap_timeout
        table[sender.key] = sender

    def _handle(self, mail: wire.Mail) -> None:
        match mail.body:
            case wire.KVArgsRegisterInfo() as body:
                self._on_register(mail, body)
            case wire.TransferInfo() as body:
                if peer := self._known(mail, body.session_id):
                    self._on_transfer_info(mail, peer, body)
            case wire.AbortRoom() as body:
                self._on_abort(mail, body)
            case wire.Ping(session_id=session_id):
                if peer := self._known(mail, session_id):
                    self._post(peer, wire.Pong(session_id=session_id))
            case wire.Unregistered(session_id=session_id, why=why):
                if peer := self._peers.get(session_id):
                    self._lose(peer, why, notify=False)
            case _:
                pass

    def _handle_mismatch(self, mismatch: wire.VersionMismatch) -> None:
        envelope = mismatch.envelope
        reply = wire.RegisterReply(session_id="", refusal=str(mismatch))
        self._context.mailbox.post(envelope.sender, envelope.epoch, reply)

    def _on_register(self, mail: wire.Mail, body: wire.KVArgsRegisterInfo) -> None:
        for peer in [p for p in self._peers.values() if p.control_address == mail.sender and p.epoch != mail.epoch]:
            self._lose(peer, "it was restarted", notify=False)
        refusal = self._context.args.difference(body.args, body.pairs)
        if refusal is None and len(self._peers) >= self._context.limits.max_peers:
            refusal = f"{len(self._peers)} decode ranks are registered, and there is no room for another"
        session_id = body.session.session_id
        if refusal is None and session_id not in self._peers:
            now = self._context.clock.now()
            self._peers[session_id] = DecodePeer(
                body.session, mail.sender, mail.epoch, body.args, body.pairs, body.num_targets, last_message_at=now
            )
        if refusal is not None:
            logger.warning("refused the decode worker at %s: %s", mail.sender, refusal)
        self._context.mailbox.reply(mail, wire.RegisterReply(session_id=session_id, refusal=refusal))

    def _on_transfer_info(self, mail: wire.Mail, peer: DecodePeer, info: wire.TransferInfo) -> None:
        sender, closed = self._rooms.get(info.key), self._closed.get(info.key)
        if sender is None and closed is not None and closed.attempt in (None, info.attempt):
            self._context.mailbox.reply(mail, closed.status(info.attempt))
            return
        is_early = sender is None
        if sender is None:
            sender = self._early_room(info.key, info.attempt)
        if sender is None:
            error = CapacityError(f"room {info.key}: {len(self._early)} rooms wait for their request")
            self._refuse(mail, info, error)
        elif sender.targets and sender.attempt != info.attempt:
            self._refuse(mail, info, DuplicateRoomError(f"room {info.key} is being served to another decode"))
        elif sender.is_announced_by(peer):
            pass
        elif sender.is_final:
            self._context.mailbox.reply(mail, sender.status(info.attempt))
        else:
            sender.add_target(peer, info)
            if is_early and info.prompt_ids:
                self._requested.append(RequestedPrompt(info.rid, info.key, info.prompt_ids))
                self._context.changed = True

    def _on_abort(self, mail: wire.Mail, abort: wire.AbortRoom) -> None:
        """Fail a room that decode aborted. Reply with TransferStatus: at once, or when the room is settled."""
        key, error = abort.key, abort.cause.to_error(abort.key)
        sender, closed = self._rooms.get(key), self._closed.get(key)
        if sender is not None and (not sender.targets or sender.attempt == abort.attempt):
            sender.attempt = abort.attempt
            sender.fail(error)
            if sender.state in sender.free_states:
                self._answer(mail, sender)
        elif sender is None and closed is not None and closed.attempt == abort.attempt:
            self._answer(mail, closed)
        else:
            if sender is None and not (closed is not None and closed.attempt is None):
                early = self._early_room(key, abort.attempt)
                # Another decode worker may have announced the room with an attempt of its own, which stays.
                if early is not None and not (early.targets and early.attempt != abort.attempt):
                    early.attempt = abort.attempt
                    early.fail(error)
            answer = wire.TransferStatus(key=key, attempt=abort.attempt, failure=abort.cause)
            self._context.mailbox.reply(mail, answer)

    def _answer(self, mail: wire.Mail, sender: KVSender) -> None:
        """Reply with a room's result, or with Unregistered after a lost session: its bytes may still be in flight."""
        session_id = sender.lost.get(mail.epoch)
        if session_id is None:
            self._context.mailbox.reply(mail, sender.status(sender.attempt or 0))
        else:
            self._context.mailbox.reply(mail, wire.Unregistered(session_id=session_id, why="the session has ended"))

    def _early_room(self, key: RoomKey, attempt: int) -> KVSender | None:
        """Return the room of a message that arrived before its request. None: there are too many.

        A room that an earlier attempt aborted is replaced.
        """
        early = self._early.get(key)
        if early is not None and (early.targets or early.attempt == attempt):
            return early
        self._early.pop(key, None)
        if len(self._early) >= self._context.limits.max_early:
            return None
        early = KVSender(self._context, key, self._close)
        self._keep(early, self._early)
        return early

    def _advance(self, now: float) -> None:
        for sender in (*self._rooms.values(), *self._fakes):
            for peer, why in sender.step(now):
                self._lose(peer, why)
        config = self._context.config
        silence = config.heartbeat_interval * (config.heartbeat_misses + 1)
        for peer in [p for p in self._peers.values() if now - p.last_message_at > silence]:
            self._lose(peer, f"no message from it for {silence:g} s")
        # Forget rooms past their deadline. Refuse the announcements of those without a request.
        while self._closed and (closed := next(iter(self._closed.values()))).expires_at < now:
            del self._closed[closed.key]
        while self._early and (early := next(iter(self._early.values()))).expires_at < now:
            del self._early[early.key]
            if early.targets:
                seconds, rid = self._context.config.bootstrap_timeout, early.targets[0].info.rid
                text = f"room {early.key} of request {rid}: its request did not reach prefill within {seconds:g} s"
                early.fail(DeadlineExceededError(f"{text}: see whether the router sends to both workers"))

    def _known(self, mail: wire.Mail, session_id: str) -> DecodePeer | None:
        """Return the peer of a session. If it is unknown, reply that the sender must repeat the handshake."""
        peer = self._peers.get(session_id)
        if peer is None or peer.epoch != mail.epoch:
            why = "this prefill does not know the session"
            self._context.mailbox.reply(mail, wire.Unregistered(session_id=session_id, why=why))
            return None
        peer.last_message_at = self._context.clock.now()
        return peer

    def _lose(self, peer: DecodePeer, why: str, *, notify: bool = True) -> None:
        """End a session: fail its rooms and end its writes. Decode fences it with or without a notification."""
        session_id = peer.session.session_id
        if self._peers.pop(session_id, None) is None:
            return
        for sender in [s for s in self._rooms.values() if s.is_announced_by(peer)]:
            sender.lose(peer)
            sender.fail(PeerLostError(sender.key.room, f"the session with decode ended: {why}"))
        self._context.transport.drain(session_id)
        for early in [s for s in self._early.values() if s.is_announced_by(peer)]:
            early.lose(peer)
            if not early.targets:
                del self._early[early.key]
        if notify:
            self._post(peer, wire.Unregistered(session_id=session_id, why=why))
        if all(p.control_address != peer.control_address for p in self._peers.values()):
            self._context.mailbox.forget(peer.control_address)

    def _refuse(self, mail: wire.Mail, info: wire.TransferInfo, error: SplitserveError) -> None:
        status = wire.TransferStatus(key=info.key, attempt=info.attempt, failure=wire.RoomFailureCause.of(error))
        self._context.mailbox.reply(mail, status)

    def _post(self, peer: DecodePeer, body: wire.Pong | wire.Unregistered) -> None:
        self._context.mailbox.post(peer.control_address, peer.epoch, body)
