"""Small writes that wait behind each other are sent as one: which ones, refusals, and the state of each ticket."""

import socket
import threading

import pytest

from splitserve.transfer.copies import copy_table
from splitserve.transfer.transports import sending
from splitserve.transfer.transports.base import PeerAddress, Ticket, TransportOptions, WriteRefused, WriteState
from splitserve.transfer.transports.sending import Sender, Write

DEADLINE = 60.0
PEER = PeerAddress("session", "nowhere:1")


class Backend:
    """Its one connection notes the sizes of what it is given. The first write waits until `go_on` is set."""

    brief_bytes = 0
    joined_bytes = 1000
    path = ""

    def __init__(self):
        self.writes = []
        self.is_inside, self.go_on = threading.Event(), threading.Event()
        # Lengths of copies, or actions, that fail, and how.
        self.failures = {}

    def connect(self, sock, session_info, deadline):
        return self

    def write(self, ticket_id, copies, deadline):
        lengths = copies["length"].tolist()
        self.writes.append(lengths)
        self.is_inside.set()
        assert self.go_on.wait(DEADLINE)
        for length in lengths:
            if length in self.failures:
                raise self.failures[length]

    def call(self, action):
        self.writes.append(action())

    def is_alive(self):
        return True

    def interrupt(self):
        self.go_on.set()

    def close(self):
        pass


@pytest.fixture
def backend():
    return Backend()


@pytest.fixture
def send(backend, monkeypatch):
    """Offer writes of these lengths while the first is in flight; functions are actions. Return their states."""
    pairs = [socket.socketpair() for _ in range(8)]
    free = iter(pairs)
    monkeypatch.setattr(sending, "connect", lambda *args: next(free)[0])
    monkeypatch.setattr(sending, "initiate", lambda *args: b"")
    states, all_final = {}, threading.Event()

    def send(*writes):
        def finish(tickets, status):
            assert not states.keys() & set(tickets)
            states.update(dict.fromkeys(tickets, status.state))
            if len(states) == len(writes):
                all_final.set()

        sender = Sender(backend, TransportOptions(), PEER, finish)
        for i, what in enumerate(writes):
            if callable(what):
                write = Write(Ticket(i), sending.NOTHING, 0, what)
            else:
                write = Write(Ticket(i), copy_table([(0, 0, 0, 0, what)]), what)
            assert sender.offer(write)
            sender.go_on()
            assert backend.is_inside.wait(DEADLINE)
        backend.go_on.set()
        assert all_final.wait(DEADLINE)
        sender.stop("the end")
        return [states[Ticket(i)] for i in range(len(writes))]

    yield send
    for pair in pairs:
        for end in pair:
            end.close()


def test_what_waits_goes_as_one_in_its_order(backend, send):
    assert send(1, 2, 3, 4) == [WriteState.DONE] * 4
    assert backend.writes == [[1], [2, 3, 4]]


def test_no_more_go_together_than_the_bound(backend, send):
    half, twice = backend.joined_bytes // 2, 2 * backend.joined_bytes
    assert set(send(1, half, half, half, twice, 5)) == {WriteState.DONE}
    assert backend.writes == [[1], [half, half], [half], [twice], [5]]


def test_an_action_has_a_turn_of_its_own(backend, send):
    assert send(1, 2, 3, lambda: "action", 4, 5) == [WriteState.DONE] * 6
    assert backend.writes == [[1], [2, 3], "action", [4, 5]]


def test_one_that_is_refused_fails_alone(backend, send):
    backend.failures[3] = WriteRefused("not this one")
    assert send(1, 2, 3, 4) == [WriteState.DONE, WriteState.DONE, WriteState.FAILED, WriteState.DONE]
    assert backend.writes == [[1], [2, 3, 4], [2], [3], [4]]


def test_a_connection_that_breaks_loses_all_that_went_together(backend, send):
    backend.failures[3] = ConnectionError("gone")
    assert send(1, 2, 3, 4) == [WriteState.DONE, WriteState.LOST, WriteState.LOST, WriteState.LOST]
    assert backend.writes == [[1], [2, 3, 4]]


def test_joined_writes_keep_every_row():
    rows = [[(0, 1, 0, 2, 3)], [], [(1, 4, 1, 5, 6), (0, 7, 1, 8, 9)]]
    joined = sending._joined([Write(Ticket(i), copy_table(r), sum(row[4] for row in r)) for i, r in enumerate(rows)])
    assert joined.copies.tolist() == [row for r in rows for row in r]
    assert joined.num_bytes == 18
