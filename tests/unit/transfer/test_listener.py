"""The data port among silent, slow and hostile connections: a peer that holds the token connects all the same."""

import contextlib
import errno
import logging
import os
import socket
import struct
import subprocess
import sys
import threading
import time

import pytest

from splitserve.process.authentication import ResponderHandshake
from splitserve.transfer import pending
from splitserve.transfer.copies import copy_table
from splitserve.transfer.transports.backend import Incoming
from splitserve.transfer.transports.base import WriteState
from splitserve.transfer.transports.frames import DATA_PROTOCOL, initiate
from splitserve.transfer.transports.listener import DataListener
from splitserve.transfer.transports.sending import MAX_HANDSHAKES
from splitserve.transfer.transports.sockets import Deadline
from support.transfer_peer import End

DEADLINE = 60.0
TOKEN = b"a token of the cluster"


class Session(Incoming):
    """Its info is its id. It is served until its connection ends."""

    def session_info(self):
        return b"session"

    def serve(self, sock):
        while sock.recv(1):
            pass


def listener_of(token):
    made = DataListener("127.0.0.1", token)
    made.open("session", Session())
    return made


@pytest.fixture(params=[b"", TOKEN], ids=["without a token", "with a token"])
def listener(request):
    made = listener_of(request.param)
    yield made
    made.close()


@pytest.fixture
def short_handshakes(monkeypatch):
    """Let a handshake have less time, in tests that wait until it is over."""
    monkeypatch.setattr(pending, "HANDSHAKE_SECONDS", 0.3)


def address_of(listener):
    host, port = listener.endpoint.split(":")
    return host, int(port)


def authenticated(listener):
    """Return a connection after its handshake. On a busy machine one may be late, so it has a sender's attempts."""
    for attempts_left in reversed(range(MAX_HANDSHAKES)):
        sock = socket.create_connection(address_of(listener), timeout=DEADLINE)
        try:
            assert initiate(sock, "session", listener._token, Deadline(DEADLINE)) == b"session"
            return sock
        except ConnectionError:
            sock.close()
            if not attempts_left:
                raise
    raise AssertionError


def until(is_true):
    limit = time.monotonic() + DEADLINE
    while not is_true():
        assert time.monotonic() < limit, "it never became true"
        time.sleep(0.001)


# Opens connections one after the other, as fast as it can, until its standard input ends; each sends `hello` at most.
FLOOD = """
import collections, contextlib, select, socket, sys
port, hello = int(sys.argv[1]), bytes.fromhex(sys.argv[2])
opened = collections.deque(maxlen=300)
while not select.select([sys.stdin], [], [], 0)[0]:
    with contextlib.suppress(OSError):
        opened.append(socket.create_connection(("127.0.0.1", port), timeout=20))
        opened[-1].sendall(hello)
"""


@contextlib.contextmanager
def flood(listener, hello=b""):
    """A process that floods the listener. In a thread it would hold the lock that the listener needs."""
    words = [sys.executable, "-c", FLOOD, str(address_of(listener)[1]), hello.hex()]
    with subprocess.Popen(words, stdin=subprocess.PIPE) as process:
        try:
            yield
        finally:
            process.stdin.close()
            process.wait(DEADLINE)


def test_silent_connections_beyond_the_limit_keep_no_peer_out(listener):
    with contextlib.ExitStack() as silent:
        for _ in range(2 * pending.MAX_PENDING_PER_ADDRESS):
            silent.enter_context(socket.create_connection(address_of(listener)))
        authenticated(listener).close()
        assert len(listener.pending) <= pending.MAX_PENDING_PER_ADDRESS


@pytest.mark.parametrize("is_hello_sent", [False, True])
def test_a_flood_that_fills_the_table_all_the_time_keeps_no_peer_out(listener, caplog, is_hello_sent):
    hello = struct.pack("<4sH16sH", DATA_PROTOCOL.magic, DATA_PROTOCOL.version, bytes(16), 3) + b"abc"
    threads_before = threading.active_count()
    with caplog.at_level(logging.WARNING), flood(listener, hello if is_hello_sent else b""):
        until(lambda: len(listener.pending) == pending.MAX_PENDING_PER_ADDRESS)
        # The flood may fill the table within one handshake.
        for _ in range(20):
            authenticated(listener).close()
        # Those of the peers end with their connections.
        until(lambda: threading.active_count() <= threads_before)
    assert len([r for r in caplog.records if "unauthenticated" in r.getMessage()]) == 1


def test_a_silent_connection_is_closed_after_its_time(listener, short_handshakes):
    began = time.monotonic()
    with socket.create_connection(address_of(listener), timeout=DEADLINE) as sock:
        assert sock.recv(1) == b""
        assert pending.HANDSHAKE_SECONDS / 2 < time.monotonic() - began < DEADLINE
    assert len(listener.pending) == 0


def test_a_connection_that_sends_a_byte_at_a_time_has_no_longer(listener):
    with socket.create_connection(address_of(listener), timeout=DEADLINE) as sock:
        began = time.monotonic()
        with contextlib.suppress(OSError):
            while time.monotonic() - began < DEADLINE:
                sock.sendall(DATA_PROTOCOL.magic[:1])
                if sock.recv(0, socket.MSG_DONTWAIT) == b"" and len(listener.pending) == 0:
                    break
        assert time.monotonic() - began < DEADLINE
    authenticated(listener).close()


def test_a_peer_that_has_authenticated_is_not_pending_and_may_be_idle(listener, short_handshakes):
    with authenticated(listener) as sock:
        sock.settimeout(2 * pending.HANDSHAKE_SECONDS)
        assert len(listener.pending) == 0
        with pytest.raises(TimeoutError):
            sock.recv(1)


def test_where_no_descriptors_are_left_the_oldest_pending_one_gives_its_own(listener, monkeypatch):
    accept, failures = socket.socket.accept, iter([OSError(errno.EMFILE, os.strerror(errno.EMFILE))])
    with socket.create_connection(address_of(listener), timeout=DEADLINE) as silent:
        until(lambda: len(listener.pending) == 1)

        def accept_later(sock):
            if error := next(failures, None):
                raise error
            return accept(sock)

        monkeypatch.setattr(socket.socket, "accept", accept_later)
        authenticated(listener).close()
        assert silent.recv(1) == b""


def test_the_listener_closes_among_pending_and_authenticated_connections():
    here = listener_of(TOKEN)
    with authenticated(here) as peer, socket.create_connection(address_of(here), timeout=DEADLINE) as silent:
        until(lambda: len(here.pending) == 1)
        here.close()
        for sock in (silent, peer):
            with contextlib.suppress(ConnectionResetError):
                assert sock.recv(1) == b""
    assert not here.connections


def test_a_sender_whose_handshake_was_dropped_tries_again(monkeypatch):
    src, dst = End("tcp", [8]), End("tcp", [8])
    feed, drops = ResponderHandshake.feed, iter([True, True])

    def feed_or_drop(self, data):
        if next(drops, False):
            self.problem = "a newer connection needed its place"
            return b""
        return feed(self, data)

    monkeypatch.setattr(ResponderHandshake, "feed", feed_or_drop)
    try:
        ticket = src.transport.write(dst.transport.open_session(), copy_table([(0, 0, 0, 0, 8)]))
        assert src.outcome(ticket).state is WriteState.DONE
        assert next(drops, None) is None
    finally:
        src.close()
        dst.close()


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_a_handshake_comes_in_pieces_of_any_size(size):
    ours, theirs = socket.socketpair()
    with ours, theirs:
        received = ResponderHandshake(DATA_PROTOCOL, TOKEN)
        failures = []

        def send():
            try:
                initiate(ours, "a session", TOKEN, Deadline(DEADLINE))
            except ConnectionError as error:
                failures.append(error)

        sender = threading.Thread(target=send)
        sender.start()
        while not received.is_over:
            theirs.sendall(received.feed(theirs.recv(min(size, received.wanted))))
        theirs.shutdown(socket.SHUT_RDWR)
        sender.join(DEADLINE)
    assert received.peer_name == "a session"
    assert len(failures) == 1
