"""Inputs and outputs of a scheduler: messages of its front end, tokens, one final message per request."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Protocol

import msgspec
import zmq

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
                logger.error("dropped an unknown message of the front end: %s", error)

    def wait(self, timeout: float) -> None:
        # Rounded up: a wait of less than a millisecond must not become a busy loop.
        self._poller.poll(math.ceil(timeout * 1000))
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
        if finish is not None:
            self._close(request)
        elif new:
            self._num_sent[request.rid] = num_sent + len(new)
        else:
            return
        first = num_sent == request.num_given_tokens and bool(new) and request.logprob_start is not None
        logprobs = request.output_logprobs[num_sent - request.num_given_tokens :] if request.return_logprob else []
        states, request.hidden_states = request.hidden_states, []
        speculation = None
        if request.num_verify_steps:
            speculation = SpeculationStats(
                num_verify_steps=request.num_verify_steps,
                num_proposed_tokens=request.num_proposed_tokens,
                num_accepted_tokens=request.num_accepted_tokens,
            )
        self._outputs.append(
            TokenOutput(
                rid=request.rid,
                submission=request.submission,
                token_ids=new,
                logprobs=logprobs,
                hidden_states=states,
                input_logprobs=request.input_logprobs if first else None,
                num_cached_tokens=request.num_cached_tokens,
                finish=finish,
                stages=request.timeline.report(is_last=finish is not None),
                transfer=transfer,
                speculation=speculation,
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
        request.finish = request.failed_with(error)
        self.send(request)

    def reply(self, message: FromScheduler) -> None:
        """Reply to a call at once, after the outputs before it."""
        self.flush()
        self._send(message)

    def flush(self) -> None:
        if self._outputs:
            self._send(StepOutputs(outputs=self._outputs, sent_at=self._clock.now()))
            self._outputs = []

    def _close(self, request: Request) -> None:
        del self._num_sent[request.rid]
        self.num_finished += 1
        request.timeline.enter("finished", self._clock.now())


class Inbox(Protocol):
    """Source of the scheduler's messages."""

    def drain(self) -> list[ToScheduler]:
        """Return the messages that have arrived, without waiting."""
        ...

    def wait(self, timeout: float) -> None:
        """Return when a message arrives, when the transfer layer makes progress, or after `timeout` seconds."""
        ...


# Shortest interval over which a rate is measured, seconds.
_RATE_INTERVAL = 1.0


class GenerationRate:
    """Rate at which a scheduler generates tokens, measured while it is busy."""

    def __init__(self) -> None:
        # Output tokens per second in the last interval. 0: nothing was measured yet.
        self.last = 0.0
        # Clock time at which the interval began. None: the scheduler is idle.
        self._began: float | None = None
        self._num_tokens = 0
        self._is_measured = False

    def add(self, num_tokens: int, now: float) -> None:
        """Count the output tokens of a step that ended at `now`. Those of the first step only open the interval."""
        if self._began is None:
            self._began = now
            return
        self._num_tokens += num_tokens
        if now - self._began >= _RATE_INTERVAL:
            self._close(now)
            self._began = now

    def stop(self, now: float) -> None:
        """End the interval, because the scheduler is idle. A busy time shorter than an interval still gives a rate."""
        if not self._is_measured:
            self._close(now)
        self._began, self._num_tokens, self._is_measured = None, 0, False

    def _close(self, now: float) -> None:
        if self._began is not None and self._num_tokens and now > self._began:
            self.last = self._num_tokens / (now - self._began)
            self._is_measured = True
        self._num_tokens = 0
