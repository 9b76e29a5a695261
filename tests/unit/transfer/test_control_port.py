"""The control port among connections that do not hold the token: they deliver nothing, and do not stay."""

import contextlib
import socket
import time

import pytest
import zmq

from splitserve.transfer import control
from splitserve.transfer.control import MAX_CONNECTIONS, ZmqChannel

DEADLINE = 60.0
TOKEN = b"the token of this cluster"


@pytest.fixture
def channel():
    made = []

    def make(token=TOKEN):
        made.append(ZmqChannel("127.0.0.1", token))
        return made[-1]

    yield make
    for one in made:
        one.close()


def address_of(channel):
    host, port = channel.address.removeprefix("tcp://").split(":")
    return host, int(port)


def received(channel):
    """The next frames; none if nothing arrives in time."""
    channel.pull_socket.poll(DEADLINE * 1000)
    return channel.receive()


@pytest.mark.parametrize("token", [TOKEN, b""])
def test_silent_connections_keep_no_peer_out(channel, token):
    here, peer = channel(token), channel(token)
    with contextlib.ExitStack() as silent:
        for _ in range(300):
            silent.enter_context(socket.create_connection(address_of(here)))
        peer.send(here.address, b"frame")
        assert received(here) == [b"frame"]


@pytest.fixture
def short_handshakes(monkeypatch):
    """Let a handshake have less time, in tests that wait until it is over."""
    monkeypatch.setattr(control, "HANDSHAKE_SECONDS", 0.3)


def test_a_silent_connection_is_closed(short_handshakes, channel):
    with socket.create_connection(address_of(channel()), timeout=DEADLINE) as silent:
        while silent.recv(1000):
            # The listener's greeting.
            pass


def test_a_peer_that_does_not_hold_the_token_delivers_nothing(short_handshakes, channel):
    here = channel()
    channel(b"another token").send(here.address, b"other")
    with zmq.Context() as context, context.socket(zmq.PUSH) as plain:
        plain.setsockopt(zmq.LINGER, 0)
        plain.connect(here.address)
        with contextlib.suppress(zmq.Again):
            plain.send(b"plain", zmq.NOBLOCK)
        # Both have had their time when a frame behind them has arrived and their handshakes are over.
        limit = time.monotonic() + 1.5 * control.HANDSHAKE_SECONDS
        while time.monotonic() < limit:
            assert not here.pull_socket.poll(100)
    channel().send(here.address, b"good")
    assert received(here) == [b"good"]


def test_a_channel_replaces_its_oldest_connections(channel, monkeypatch, caplog):
    monkeypatch.setattr("splitserve.transfer.control.MAX_CONNECTIONS", 4)
    sender = channel()
    receivers = [channel() for _ in range(8)]
    for receiver in receivers:
        sender.send(receiver.address, b"frame")
    assert [received(receiver) for receiver in receivers] == [[b"frame"]] * 8
    assert "dropped" not in caplog.text


def test_a_channel_may_have_as_many_sockets_as_it_keeps_and_closes(channel):
    assert channel()._context.get(zmq.MAX_SOCKETS) > 2 * MAX_CONNECTIONS
