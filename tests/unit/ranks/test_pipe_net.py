"""Pipes between hosts: real sockets of this process, which strangers try to use."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, suppress

import pytest
import zmq

from splitserve.ranks.rank_channel import Context, Listeners, PipeNet, RankLinkEnd, open_pull, open_push

TOKEN, OTHER_TOKEN = b"a token of this cluster", b"another token of a cluster"
DEADLINE_MS = 60_000
FAILURES = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL


class Pipes:
    """Ends of pipes, as processes of one start of a worker have them."""

    def __init__(self, closing: ExitStack) -> None:
        self._closing = closing
        self.context: Context = zmq.Context()
        closing.callback(self.context.term)
        self.listeners = Listeners("127.0.0.1")
        closing.callback(self.listeners.close)

    def net(self, *endpoints: str, token: bytes = TOKEN, instance: int = 7) -> PipeNet:
        """`endpoints`: to listen on."""
        # As a process has them that was started with them: its own.
        inherited = {e: os.dup(fd) for e, fd in self.listeners.descriptors(endpoints).items()}
        return PipeNet.of(token, instance, inherited)

    def pull(self, endpoint: str, token: bytes = TOKEN) -> zmq.Socket[bytes]:
        return self._kept(open_pull(self.context, endpoint, 10, self.net(endpoint, token=token)))

    def push(self, endpoint: str, net: PipeNet | None) -> zmq.Socket[bytes]:
        found = self._kept(open_push(self.context, endpoint, 10, net))
        found.linger = 0
        return found

    def link(self, *, hears: str, says: str) -> RankLinkEnd:
        found = RankLinkEnd(self.context, hears=hears, says=says, net=self.net(hears))
        self._closing.callback(found.close)
        return found

    def saw(self, socket: zmq.Socket[bytes], events: int) -> zmq.Socket[bytes]:
        """A socket that has something to read when that has happened."""
        monitor: zmq.Socket[bytes] = socket.get_monitor_socket(events)
        self._closing.callback(monitor.close)
        self._closing.callback(socket.disable_monitor)
        return monitor

    def _kept(self, socket: zmq.Socket[bytes]) -> zmq.Socket[bytes]:
        self._closing.callback(socket.close)
        return socket


@pytest.fixture
def pipes() -> Iterator[Pipes]:
    with ExitStack() as closing:
        yield Pipes(closing)


def test_what_is_said_before_the_other_end_is_there_waits_for_it(pipes):
    endpoint = pipes.listeners.open()
    push = pipes.push(endpoint, pipes.net())
    for i in range(5):
        push.send(b"%d" % i, zmq.NOBLOCK)
    pull = pipes.pull(endpoint)
    assert [pull.recv() for _ in range(5) if pull.poll(DEADLINE_MS)] == [b"%d" % i for i in range(5)]


@pytest.mark.parametrize("stranger", [{"token": OTHER_TOKEN}, {"instance": 8}, None], ids=str)
def test_who_has_another_token_or_none_or_is_of_another_start_is_not_heard(pipes, stranger):
    endpoint = pipes.listeners.open()
    pull = pipes.pull(endpoint)
    refused = pipes.saw(pull, FAILURES | zmq.EVENT_DISCONNECTED)
    theirs = pipes.push(endpoint, None if stranger is None else pipes.net(**stranger))
    # Where the refusal has come already, it has no pipe.
    with suppress(zmq.Again):
        theirs.send(b"evil", zmq.NOBLOCK)
    assert refused.poll(DEADLINE_MS)
    pipes.push(endpoint, pipes.net()).send(b"good", zmq.NOBLOCK)
    assert pull.poll(DEADLINE_MS)
    assert pull.recv() == b"good"
    assert not pull.poll(0)


def test_a_listener_with_another_token_gets_nothing(pipes):
    endpoint = pipes.listeners.open()
    pull = pipes.pull(endpoint, OTHER_TOKEN)
    # Watched from before there is a connection: it may have ended before another line of this is run.
    refused = pipes.saw(pull, FAILURES | zmq.EVENT_DISCONNECTED)
    push = pipes.push(endpoint, pipes.net())
    with suppress(zmq.Again):
        push.send(b"for one peer", zmq.NOBLOCK)
    assert refused.poll(DEADLINE_MS)
    assert not pull.poll(0)


def test_a_pipe_that_broke_takes_nothing_any_more_instead_of_losing_some(pipes):
    endpoint, other = pipes.listeners.open(), pipes.listeners.open()
    link = pipes.link(hears=other, says=endpoint)
    pull = pipes.pull(endpoint)
    link.send(b"first")
    assert pull.recv() == b"first"
    ended = pipes.saw(link._push, zmq.EVENT_DISCONNECTED)
    pull.close()
    assert ended.poll(DEADLINE_MS)
    # ZMQ takes the pipe down in a thread of its own: soon.
    for _ in range(1_000_000):
        link.send(b"lost")
        if not link.is_open:
            break
    assert not link.is_open


def test_keys_are_those_of_a_token_and_a_start():
    nets = [PipeNet.of(token, instance, {}) for token, instance in ((TOKEN, 7), (TOKEN, 8), (OTHER_TOKEN, 7))]
    assert PipeNet.of(TOKEN, 7, {}) == nets[0]
    secrets = {net.listener.secret for net in nets} | {net.caller.secret for net in nets}
    assert len(secrets) == 6
    assert not any(secret.decode() in repr(nets) for secret in secrets)


def test_ports_are_taken_from_the_start():
    one, other = Listeners("127.0.0.1"), Listeners("127.0.0.1")
    endpoints = {one.open(), one.open(), other.open()}
    assert len(endpoints) == 3
    assert one.descriptors(endpoints).keys() | other.descriptors(endpoints).keys() == endpoints
    one.close()
    one.close()
    assert one.descriptors(endpoints) == {}
    other.close()
    with pytest.raises(OSError, match="assign"):
        Listeners("192.0.2.1").open()
