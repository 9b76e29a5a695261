"""Prefill half of a manager: registered decode peers, rooms to send, and messages that arrive too early or too late.

The request and the announcements of a room arrive in any order. Each decode rank to write to announces separately:
1. Request first (`open`): the sender waits for a TransferInfo from all ranks, or an AbortRoom from one.
2. TransferInfo or AbortRoom first: kept in `_early` until the request arrives or a deadline passes.
3. Either one after the room was closed: answered from `_closed` with the room's result.

TransferStatus proves to a decode rank that prefill writes no more for the room. It is therefore sent only when the
room's tickets are final and none is LOST. A LOST write ends the whole session: both peers fence it and repeat the
handshake.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from dataclasses import dataclass, field

import msgspec

from splitserve.core.errors import (
    CapacityError,
    DeadlineExceededError,
    DuplicateRoomError,
    KVTransferError,
    PeerLostError,
    SplitserveError,
)
from splitserve.core.request import RoomKey
from splitserve.transfer.ports import AskedPrompt
from splitserve.transfer.room import Context
from splitserve.transfer.sender import DecodePeer, KVSender
from splitserve.transfer.state import KVPoll
from splitserve.transfer.transports.base import WriteState
from splitserve.transfer.wire import (
    AbortRoom,
    KVArgsRegisterInfo,
    Mail,
    Ping,
    Pong,
    RegisterReply,
    RoomFailureCause,
    TransferInfo,
    TransferStatus,
    Unregistered,
    VersionMismatch,
)

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Early:
    """Messages about a room that has no request yet: its targets so far, or an abort from decode."""

    attempt: int
    expires_at: float
    # Announcements by session id.
    announced: dict[str, tuple[Mail, TransferInfo]] = field(default_factory=dict)
    abort: AbortRoom | None = None


@dataclass(frozen=True, slots=True)
class _Closed:
    """Result of a closed room. `attempt` is None if it failed before decode announced it."""

    attempt: int | None
    verdict: TransferStatus
    expires_at: float
    # Decode instances that lost their session before the result was known -> that session's id. The result proves
    # nothing to them.
    lost: dict[int, str]


class PrefillSide:
    def __init__(self, context: Context) -> None:
        self._context = context
        self._rooms: dict[RoomKey, KVSender] = {}
        self._peers: dict[str, DecodePeer] = {}
        self._early: OrderedDict[RoomKey, _Early] = OrderedDict()
        self._closed: OrderedDict[RoomKey, _Closed] = OrderedDict()
        # Prompts without a request, for the scheduler to take. Their rooms are in `_early`.
        self._asked: list[AskedPrompt] = []

    @property
    def num_rooms(self) -> int:
        return len(self._rooms)

    @property
    def num_peers(self) -> int:
        return len(self._peers)

    # -- rooms ----------------------------------------------------------------------------------------------------

    def open(self, rid: str, key: RoomKey) -> KVSender:
        if key in self._rooms:
            raise DuplicateRoomError(f"request {rid}: room {key} is being served already", param="bootstrap_room")
        if len(self._rooms) >= self._context.limits.max_rooms:
            raise CapacityError(f"request {rid}: {len(self._rooms)} hand-overs are open, retry later")
        self._closed.pop(key, None)
        sender = self._rooms[key] = KVSender(self, self._context, key, rid)
        if early := self._early.pop(key, None):
            sender.attempt = early.attempt
            if early.abort is not None:
                sender.fail(early.abort.cause.to_error(key))
            for _, info in early.announced.values():
                # The peer exists: `_lose` removes the announcements of a lost session.
                self._pair(sender, self._peers[info.session_id], info)
        return sender

    @property
    def has_asked(self) -> bool:
        """True if `take_asked` has prompts to return. Needs no lock."""
        return bool(self._asked)

    def take_asked(self) -> list[AskedPrompt]:
        """Return the prompts to open a room for, each once. Prompts of lost decode ranks are left out."""
        asked, self._asked = self._asked, []
        return [prompt for prompt in asked if prompt.key in self._early and self._early[prompt.key].announced]

    def fail(self, sender: KVSender, error: SplitserveError) -> None:
        """Fail a room. Decode receives the cause now, and the TransferStatus when the room is settled."""
        if not sender.fail(error):
            return
        sender.drop_unsent()
        if not sender.settled:
            for part in sender.untold:
                self._post(
                    part.peer, AbortRoom(key=sender.key, attempt=part.info.attempt, cause=RoomFailureCause.of(error))
                )
        self._tell(sender)

    def fail_all(self, error: SplitserveError) -> None:
        for sender in list(self._rooms.values()):
            self.fail(sender, error)

    def remove(self, sender: KVSender) -> None:
        if self._rooms.pop(sender.key, None) is None:
            return
        verdict = self._verdict(sender, sender.attempt or 0)
        expires_at = self._context.clock.now() + self._context.config.bootstrap_timeout
        self._closed[sender.key] = _Closed(sender.attempt, verdict, expires_at, sender.lost)
        if len(self._closed) > self._context.limits.max_closed:
            self._closed.popitem(last=False)

    # -- messages -------------------------------------------------------------------------------------------------

    def handle(self, mail: Mail) -> None:
        match mail.body:
            case KVArgsRegisterInfo() as body:
                self._on_register(mail, body)
            case TransferInfo() as body:
                self._on_transfer_info(mail, body)
            case AbortRoom() as body:
                self._on_abort(mail, body)
            case Ping(session_id=session_id):
                if peer := self._known(mail, session_id):
                    self._post(peer, Pong(session_id=session_id))
            case Unregistered(session_id=session_id, why=why):
                if peer := self._peers.get(session_id):
                    self._lose(peer, why, tell=False)
            case _:
                pass

    def handle_mismatch(self, mismatch: VersionMismatch) -> None:
        envelope = mismatch.envelope
        reply = RegisterReply(session_id="", refusal=str(mismatch))
        self._context.mailbox.post(envelope.sender, envelope.epoch, reply)

    def _on_register(self, mail: Mail, body: KVArgsRegisterInfo) -> None:
        for peer in [p for p in self._peers.values() if p.control_address == mail.sender and p.epoch != mail.epoch]:
            self._lose(peer, "it was restarted", tell=False)
        refusal = self._context.args.difference(body.args, body.pairs)
        if refusal is None and len(self._peers) >= self._context.limits.max_peers:
            refusal = f"{len(self._peers)} decode ranks are registered, and there is no room for another"
        session_id = body.session.session_id
        if refusal is None and session_id not in self._peers:
            now = self._context.clock.now()
            self._peers[session_id] = DecodePeer(
                body.session, mail.sender, mail.epoch, body.args, body.pairs, body.num_targets, last_heard=now
            )
        if refusal is not None:
            logger.warning("refused the decode worker at %s: %s", mail.sender, refusal)
        self._context.mailbox.reply(mail, RegisterReply(session_id=session_id, refusal=refusal))

    def _on_transfer_info(self, mail: Mail, info: TransferInfo) -> None:
        peer = self._known(mail, info.session_id)
        if peer is None:
            return
        sender = self._rooms.get(info.key)
        if sender is None:
            self._remember_or_answer(mail, info)
        elif sender.is_announced and sender.attempt != info.attempt:
            self._refuse(mail, info, DuplicateRoomError(f"room {info.key} is being served to another decode"))
        elif sender.is_announced_by(peer):
            pass
        elif sender.is_final:
            self._context.mailbox.reply(mail, self._verdict(sender, info.attempt))
        else:
            self._pair(sender, peer, info)

    def _on_abort(self, mail: Mail, abort: AbortRoom) -> None:
        """Fail a room that decode aborted. Reply with TransferStatus: at once, or when the room is settled."""
        key, answer = abort.key, TransferStatus(key=abort.key, attempt=abort.attempt, failure=abort.cause)
        sender, closed = self._rooms.get(key), self._closed.get(key)
        if sender is not None and (not sender.is_announced or sender.attempt == abort.attempt):
            sender.attempt = abort.attempt
            self.fail(sender, abort.cause.to_error(key))
            if sender.settled:
                self._answer(mail, self._verdict(sender, abort.attempt), sender.lost)
        elif sender is None and closed is not None and closed.attempt == abort.attempt:
            self._answer(mail, closed.verdict, closed.lost)
        else:
            if sender is None and not (closed is not None and closed.attempt is None):
                self._keep_abort(abort)
            self._context.mailbox.reply(mail, answer)

    def _answer(self, mail: Mail, verdict: TransferStatus, lost: dict[int, str]) -> None:
        """Reply with a room's result, or with Unregistered after a lost session: its bytes may still be in flight."""
        session_id = lost.get(mail.epoch)
        if session_id is None:
            self._context.mailbox.reply(mail, verdict)
        else:
            self._context.mailbox.reply(mail, Unregistered(session_id=session_id, why="the session has ended"))

    def _keep_abort(self, abort: AbortRoom) -> None:
        """Keep an abort until the request arrives. Ranks that already announced the room are notified now."""
        early = self._early.get(abort.key)
        if early is not None and early.announced and early.attempt != abort.attempt:
            # The room belongs to another decode, so later announcements of this attempt are refused.
            return
        self._early.pop(abort.key, None)
        if kept := self._new_early(abort.key, abort.attempt):
            kept.abort = abort
        for mail, info in early.announced.values() if early else ():
            failure = abort.cause
            self._context.mailbox.reply(mail, TransferStatus(key=info.key, attempt=info.attempt, failure=failure))

    def _remember_or_answer(self, mail: Mail, info: TransferInfo) -> None:
        """Keep a TransferInfo that arrived before its request, or answer it if the room is already closed."""
        closed, early = self._closed.get(info.key), self._early.get(info.key)
        if closed is not None and closed.attempt in (None, info.attempt):
            self._context.mailbox.reply(mail, msgspec.structs.replace(closed.verdict, attempt=info.attempt))
        elif early is not None and early.abort is not None and early.attempt == info.attempt:
            status = TransferStatus(key=info.key, attempt=info.attempt, failure=early.abort.cause)
            self._context.mailbox.reply(mail, status)
        elif early is not None and early.announced and early.attempt != info.attempt:
            self._refuse(mail, info, DuplicateRoomError(f"room {info.key} was announced by another decode"))
        else:
            self._keep_info(mail, info, early)

    def _keep_info(self, mail: Mail, info: TransferInfo, early: _Early | None) -> None:
        if early is None or not early.announced:
            self._early.pop(info.key, None)
            early = self._new_early(info.key, info.attempt)
        if early is None:
            self._refuse(mail, info, CapacityError(f"room {info.key}: {len(self._early)} rooms wait for their request"))
            return
        early.announced[info.session_id] = mail, info
        if info.prompt_ids:
            self._asked.append(AskedPrompt(info.rid, info.key, info.prompt_ids))
            self._context.changed = True

    def _new_early(self, key: RoomKey, attempt: int) -> _Early | None:
        """Create the entry of a room; return None if the table is full. The caller has removed the previous entry."""
        if len(self._early) >= self._context.limits.max_early:
            return None
        expires_at = self._context.clock.now() + self._context.config.bootstrap_timeout
        early = self._early[key] = _Early(attempt, expires_at)
        return early

    # -- time -----------------------------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        for sender in list(self._rooms.values()):
            self._move(sender, now)
        config = self._context.config
        silence = config.heartbeat_interval * (config.heartbeat_misses + 1)
        for peer in [p for p in self._peers.values() if now - p.last_heard > silence]:
            self._lose(peer, f"no word from it for {silence:g} s")
        self._expire(now)

    def close(self, why: str) -> None:
        for peer in list(self._peers.values()):
            self._lose(peer, why)

    def _move(self, sender: KVSender, now: float) -> None:
        """Advance a room: submit new writes, collect finished ones, check its deadline."""
        try:
            if sender.poll() is KVPoll.TRANSFERRING:
                sender.submit()
        except ValueError as error:
            self.fail(sender, KVTransferError(sender.key.room, f"room {sender.key}: {error}"))
        for part, state, cause in sender.poll_tickets():
            if state is WriteState.LOST:
                self._lose(part.peer, f"a write of room {sender.key} was lost half-way: {cause}")
            else:
                self.fail(sender, KVTransferError(sender.key.room, f"writing room {sender.key} failed: {cause}"))
        if not sender.is_final:
            sender.complete_if_done()
        if not sender.is_final:
            self._check_deadline(sender, now)
        self._tell(sender)

    def _check_deadline(self, sender: KVSender, now: float) -> None:
        config = self._context.config
        if not sender.is_paired:
            if now - sender.opened_at > config.bootstrap_timeout:
                stage = "waiting for a decode worker to announce its pages"
                if sender.is_announced:
                    stage = "waiting for all ranks of a decode worker to announce their pages"
                self.fail(sender, sender.deadline_error(stage, config.bootstrap_timeout, "bootstrap_timeout"))
        elif now - sender.paired_at > config.transfer_timeout:
            stage = "computing and sending its KV cache"
            self.fail(sender, sender.deadline_error(stage, config.transfer_timeout, "transfer_timeout"))

    def _expire(self, now: float) -> None:
        """Remove expired entries and refuse their announcements. Both tables are in order of their deadlines."""
        while self._closed and next(iter(self._closed.values())).expires_at < now:
            self._closed.popitem(last=False)
        while self._early and (early := next(iter(self._early.values()))).expires_at < now:
            self._early.popitem(last=False)
            for mail, info in early.announced.values():
                seconds = self._context.config.bootstrap_timeout
                text = f"room {info.key} of request {info.rid}: its request did not reach prefill within"
                error = DeadlineExceededError(f"{text} {seconds:g} s: see whether the router sends to both workers")
                self._refuse(mail, info, error)

    # -- peers ----------------------------------------------------------------------------------------------------

    def _known(self, mail: Mail, session_id: str) -> DecodePeer | None:
        """Return the peer of a session. If it is unknown, reply that the sender must repeat the handshake."""
        peer = self._peers.get(session_id)
        if peer is None or peer.epoch != mail.epoch:
            why = "this prefill does not know the session"
            self._context.mailbox.reply(mail, Unregistered(session_id=session_id, why=why))
            return None
        peer.last_heard = self._context.clock.now()
        return peer

    def _lose(self, peer: DecodePeer, why: str, *, tell: bool = True) -> None:
        """End a session: fail its rooms and end its writes. Decode fences it with or without a notification."""
        session_id = peer.session.session_id
        if self._peers.pop(session_id, None) is None:
            return
        for sender in [s for s in self._rooms.values() if s.is_announced_by(peer)]:
            sender.lose(peer)
            self.fail(sender, PeerLostError(sender.key.room, f"the session with decode ended: {why}"))
        self._context.transport.drain(session_id)
        for key, early in list(self._early.items()):
            if early.announced.pop(session_id, None) and not early.announced:
                del self._early[key]
        if tell:
            self._post(peer, Unregistered(session_id=peer.session.session_id, why=why))
        if all(p.control_address != peer.control_address for p in self._peers.values()):
            self._context.mailbox.forget(peer.control_address)

    def _pair(self, sender: KVSender, peer: DecodePeer, info: TransferInfo) -> None:
        if error := sender.pair(peer, info):
            self.fail(sender, error)

    def _tell(self, sender: KVSender) -> None:
        """Send the final status of a room to all its targets, once it is final and settled."""
        if not (sender.untold and sender.quiescent()):
            return
        verdict = self._verdict(sender, sender.attempt or 0)
        for part in sender.untold:
            self._post(part.peer, msgspec.structs.replace(verdict, checksum=part.checksum))
        sender.untold.clear()

    def _verdict(self, sender: KVSender, attempt: int) -> TransferStatus:
        """Return the status without the checksum, which differs per target."""
        failure = RoomFailureCause.of(sender.failure()) if sender.poll() is KVPoll.FAILED else None
        return TransferStatus(key=sender.key, attempt=attempt, stats=sender.stats(), failure=failure)

    def _refuse(self, mail: Mail, info: TransferInfo, error: SplitserveError) -> None:
        status = TransferStatus(key=info.key, attempt=info.attempt, failure=RoomFailureCause.of(error))
        self._context.mailbox.reply(mail, status)

    def _post(self, peer: DecodePeer, body: AbortRoom | TransferStatus | Pong | Unregistered) -> None:
        self._context.mailbox.post(peer.control_address, peer.epoch, body)
