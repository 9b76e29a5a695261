"""The scheduler's end of the two ZMQ pipes to its front end."""

from __future__ import annotations

import logging

import msgspec
import zmq

from splitserve.core.messages import FromScheduler, ToScheduler, decode_to_scheduler, encode
from splitserve.transfer.waker import Waker

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
