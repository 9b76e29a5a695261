"""Writes that are sent behind others before those are proven: how many, in which order, and what a failure takes along.

The receiver is a model: it takes what was sent when the proof is asked for, and after a refusal nothing more.
"""

import socket
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitserve.disaggregation.copies import copy_table
from splitserve.disaggregation.transports import sending
from splitserve.disaggregation.transports.base import PeerAddress, Ticket, TransportOptions, WriteRefused, WriteState
from splitserve.disaggregation.transports.sending import MAX_UNPROVEN_WRITES, Sender, Write

DEADLINE = 20.0
# Where a write fails: refused before it is sent; refused by the receiver; while it is sent; while it is proven.
HOWS = ["refused here", "refused there", "breaks", "breaks later"]


class Backend:
    """Lengths of copies say how they fail. Every write waits for `go_on`."""

    brief_bytes = 0
    joined_bytes = 1000

    def __init__(self, failures=None):
        self.failures = failures or {}
        self.go_on = threading.Event()
        self.connections = []

    def connect(self, sock, welcome, deadline):
        self.connections.append(Connection(self))
        return self.connections[-1]

    @property
    def landed(self):
        return [length for connection in self.connections for length in connection.landed]

    @property
    def most_unproven(self):
        return max(connection.most_unproven for connection in self.connections)


class Connection:
    def __init__(self, backend):
        self.backend = backend
        self.sent, self.landed, self.most_unproven = [], [], 0
        self.is_open = True

    def write(self, ticket_id, copies, deadline):
        assert self.is_open
        assert self.backend.go_on.wait(DEADLINE)
        lengths = copies["length"].tolist()
        hows = {self.backend.failures.get(length) for length in lengths}
        if "refused here" in hows:
            raise WriteRefused("not this one")
        if "breaks" in hows:
            raise ConnectionError("gone")
        self.sent.append(lengths)
        self.most_unproven = max(self.most_unproven, len(self.sent))
        return lambda: self.prove(lengths, hows)

    def prove(self, lengths, hows):
        assert self.is_open
        assert self.sent.pop(0) == lengths
        if "refused there" in hows:
            self.is_open = False
            raise WriteRefused("not this one")
        if "breaks later" in hows:
            raise TimeoutError("late")
        self.landed += lengths

    def is_alive(self):
        return self.is_open

    def interrupt(self):
        self.backend.go_on.set()

    def close(self):
        self.is_open = False


def run(backend, lengths):
    """Write these, the first joined with none; how each ended, in the order in which they did."""
    pairs, ends, all_final = [], [], threading.Event()

    def knock(*args):
        pairs.append(socket.socketpair())
        return pairs[-1][0], b""

    def finish(tickets, status):
        ends.extend((ticket.id, status) for ticket in tickets)
        if len(ends) == len(lengths):
            all_final.set()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sending, "knock", knock)
        sender = Sender(backend, TransportOptions(write_timeout=3.0), PeerAddress("session", "nowhere:1"), finish)
        for i, length in enumerate(lengths):
            assert sender.offer(Write(Ticket(i), copy_table([(0, 0, 0, 0, length)]), length))
            sender.go_on()
        backend.go_on.set()
        assert all_final.wait(DEADLINE)
        sender.stop("the end")
    for pair in pairs:
        for end in pair:
            end.close()
    return ends


def states(ends):
    return [status.state for _, status in ends]


def test_the_next_is_sent_before_the_one_before_is_proven_and_no_more_than_the_bound():
    backend = Backend()
    ends = run(backend, [1000] * 6)
    assert [i for i, _ in ends] == list(range(6))
    assert set(states(ends)) == {WriteState.DONE}
    assert backend.landed == [1000] * 6
    assert backend.most_unproven == MAX_UNPROVEN_WRITES > 1
    assert len(backend.connections) == 1


def test_what_the_receiver_refuses_fails_and_what_came_behind_goes_again():
    backend = Backend({900: "refused there"})
    ends = run(backend, [1000, 900, 999, 998])
    assert states(ends) == [WriteState.DONE, WriteState.FAILED, WriteState.DONE, WriteState.DONE]
    assert "refused the write: not this one" in ends[1][1].error
    assert backend.landed == [1000, 999, 998]


def test_what_is_refused_before_it_is_sent_takes_nothing_along():
    backend = Backend({900: "refused here"})
    ends = run(backend, [1000, 900, 999])
    assert states(ends) == [WriteState.DONE, WriteState.FAILED, WriteState.DONE]
    assert backend.landed == [1000, 999]


@pytest.mark.parametrize(("how", "why"), [("breaks", "broke: gone"), ("breaks later", "did not take a write of")])
def test_a_broken_connection_loses_what_is_unproven_and_the_next_is_written_over_another(how, why):
    backend = Backend({900: how})
    ends = run(backend, [1000, 900, 999, 998])
    lost = states(ends).index(WriteState.LOST)
    assert states(ends)[-1] is WriteState.DONE
    assert [i for i, _ in ends] == list(range(4))
    assert all(why in status.error for status in (s for _, s in ends) if status.state is WriteState.LOST)
    assert lost <= 1
    assert len(backend.connections) == 2


@given(
    lengths=st.lists(st.integers(1, 700), min_size=1, max_size=12, unique=True),
    hows=st.lists(st.sampled_from([*HOWS, None, None, None]), min_size=12, max_size=12),
)
def test_every_write_is_final_once_in_order_and_truly(lengths, hows):
    failures = dict(zip(lengths, hows, strict=False))
    backend = Backend({length: how for length, how in failures.items() if how})
    ends = run(backend, lengths)
    assert [i for i, _ in ends] == list(range(len(lengths)))
    landed = backend.landed
    for i, status in ends:
        length = lengths[i]
        if status.state is WriteState.DONE:
            assert failures[length] is None
            assert landed.count(length) == 1
        elif status.state is WriteState.FAILED:
            assert failures[length] in ("refused here", "refused there")
            assert length not in landed
        else:
            assert any(how in ("breaks", "breaks later") for how in failures.values())
    assert backend.most_unproven <= MAX_UNPROVEN_WRITES
