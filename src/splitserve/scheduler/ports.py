"""Inputs and outputs of a scheduler: messages of its front end, tokens, one final message per request, KV events."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import msgspec
import zmq

from splitserve.cache.kv_events import BlockRecord
from splitserve.core.clock import Clock
from splitserve.core.errors import RequestAbortedError, SplitserveError
from splitserve.core.messages import (
    FromScheduler,
    SpeculationStats,
    StepOutputs,
    TokenOutput,
    ToScheduler,
    TransferStats,
    decode_to_scheduler,
    encode,
)
from splitserve.core.request import FinishReason, FinishType, Request
from splitserve.observe.events.publisher import EventPublisher, NullEventPublisher
from splitserve.observe.events.schema import IndexSnapshot
from splitserve.process.threads import Waker

logger = logging.getLogger(__name__)


class FrontEndPipe:
    """Messages from and to the front end. Only the scheduler's thread uses it; other threads may use `waker`."""

    def __init__(self, to_scheduler: str, from_scheduler: str) -> None:
        self._context = zmq.Context()
        self._pull = self._context.socket(zmq.PULL)
        self._push = self._context.socket(zmq.PUSH)
        for socket in (self._pull, self._push):
            # Unbounded on purpose: the front end bounds its open requests, and tokens must never be dropped.
            socket.set_hwm(0)
            socket.linger = 1000
        self._pull.connect(to_scheduler)
        self._push.connect(from_scheduler)
        self.waker = Waker()
        self._poller = zmq.Poller()
        self._poller.register(self._pull, zmq.POLLIN)
        self._poller.register(self.waker.fileno(), zmq.POLLIN)

    def drain(self) -> list[ToScheduler]:
        messages: list[ToScheduler] = []
        while True:
            try:
                frame = self._pull.recv(zmq.NOBLOCK)
            except zmq.Again:
                return messages
            try:
                messages.append(decode_to_scheduler(frame))
            except msgspec.DecodeError as error:
                logger.error("dropped a message of the front end that is none of ours: %s", error)

    def wait(self, timeout: float) -> None:
        self._poller.poll(int(timeout * 1000))
        self.waker.clear()

    def send(self, message: FromScheduler) -> None:
        self._push.send(encode(message))

    def close(self) -> None:
        self._pull.close()
        self._push.close()
        self._context.term()
        self.waker.close()


class Outbox:
    """Collector of a step's outputs, which it sends as one message."""

    def __init__(self, send: Callable[[FromScheduler], None], clock: Clock) -> None:
        self._send = send
        self._clock = clock
        self._outputs: list[TokenOutput] = []
        # rid -> output tokens sent to the front end; a request is open from `open` to its final message.
        self._num_sent: dict[str, int] = {}
        self.num_finished = 0
        self.num_output_tokens = 0

    def open(self, request: Request) -> None:
        self._num_sent[request.rid] = request.num_given_tokens

    def is_open(self, rid: str) -> bool:
        return rid in self._num_sent

    def send(self, request: Request, transfer: TransferStats | None = None) -> None:
        """Send the new tokens of this request; its last message if it is finished."""
        num_sent = self._num_sent[request.rid]
        new = request.output_ids[num_sent:]
        self.num_output_tokens += len(new)
        finish = request.finish
        if finish is None:
            if not new:
                return
            self._num_sent[request.rid] = num_sent + len(new)
        first = num_sent == request.num_given_tokens and bool(new) and request.logprob_start is not None
        logprobs = request.output_logprobs[num_sent - request.num_given_tokens :] if request.return_logprob else []
        self._outputs.append(
            TokenOutput(
                rid=request.rid,
                token_ids=new,
                logprobs=logprobs,
                input_logprobs=request.input_logprobs if first else None,
                num_cached_tokens=request.num_cached_tokens,
                finish=finish,
                timeline=self._close(request) if finish else None,
                transfer=transfer,
                speculation=_speculation_of(request) if finish else None,
            )
        )

    def fail(self, request: Request, error: SplitserveError | None) -> None:
        """End the request with `error`; its stage and id are part of the message.

        None: end it without a message, as the front end requested.
        """
        if error is None:
            request.finish = FinishReason(FinishType.ABORT, reason=RequestAbortedError.reason)
            self._close(request)
            return
        stage = error.stage or request.timeline.stage
        message = f"request {request.rid} ended in stage '{stage}': {error.message}"
        request.finish = FinishReason(
            FinishType.ABORT, message=message, status_code=error.http_status, reason=error.reason, param=error.param
        )
        self.send(request)

    def reply(self, message: FromScheduler) -> None:
        """Reply to a call at once, after the outputs before it."""
        self.flush()
        self._send(message)

    def flush(self) -> None:
        if self._outputs:
            self._send(StepOutputs(outputs=self._outputs))
            self._outputs = []

    def _close(self, request: Request) -> dict[str, float]:
        del self._num_sent[request.rid]
        self.num_finished += 1
        request.timeline.enter("finished", self._clock.now())
        return request.timeline.seconds_since_first()


def _speculation_of(request: Request) -> SpeculationStats | None:
    if request.num_verify_steps == 0:
        return None
    return SpeculationStats(
        num_verify_steps=request.num_verify_steps,
        num_proposed_tokens=request.num_proposed_tokens,
        num_accepted_tokens=request.num_accepted_tokens,
    )


class KVEventFeed:
    """Publisher of changes of the cache. `record`: None if there is no subscriber; then nothing is recorded or sent."""

    def __init__(self, record: BlockRecord | None = None, publisher: EventPublisher | None = None) -> None:
        self.record = record
        self._publisher = publisher or NullEventPublisher()

    def publish(self) -> None:
        """Publish what has changed since the last call, in one batch; called once a turn. Never waits."""
        if self.record is not None:
            self._publisher.publish(self.record.take_news())

    def snapshot(self) -> bytes:
        """Return the whole index as JSON of an IndexSnapshot. An index that loads it continues with the next batch."""
        self.publish()
        events = self.record.whole() if self.record is not None else []
        return msgspec.json.encode(IndexSnapshot(self._publisher.next_sequence, time.time(), events))


class Inbox(Protocol):
    """Source of the scheduler's messages."""

    def drain(self) -> list[ToScheduler]:
        """Return the messages that have arrived, without waiting."""
        ...

    def wait(self, timeout: float) -> None:
        """Return when a message arrives, when the transfer layer makes progress, or after `timeout` seconds."""
        ...


@dataclass(frozen=True, slots=True)
class SchedulerPorts:
    """Inputs and outputs of a scheduler."""

    inbox: Inbox
    outbox: Outbox
    kv_events: KVEventFeed
    clock: Clock
