"""Writes that are sent behind others before those are proven: how many, in which order, and what a failure takes along.

The receiver is a model: it takes the sent bytes when the proof is requested, and after a refusal nothing more.
"""

import socket
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitserve.transfer.copies import copy_table
from splitserve.transfer.transports import sending
from splitserve.transfer.transports.base import PeerAddress, Ticket, TransportOptions, WriteRefused, WriteState
from splitserve.transfer.transports.sending import MAX_UNPROVEN_WRITES, Sender, Write

DEADLINE = 60.0
JOINED = 1000
# Where a write fails: refused before it is sent; refused by the receiver; while it is sent; while it is proven.
HOWS = ["refused here", "refused there", "breaks", "breaks later"]
DONE, FAILED, LOST = WriteState.DONE, WriteState.FAILED, WriteState.LOST


class Backend:
    """Lengths of copies select how they fail. Every write waits for `go_on`."""

    brief_bytes = 0
    joined_bytes = JOINED

    def __init__(self, failures=None):
        self.failures = failures or {}
        self.go_on = threading.Event()
        self.connections = []
        # What a connection must never see. An assertion there would end as a lost write.
        self.violations = []
        # Lengths of which a failure took the proof.
        self.at_risk = set()
        # Called at the beginning of each write.
        self.on_write = lambda lengths: None

    def connect(self, sock, session_info, deadline):
        self.connections.append(Connection(self))
        return self.connections[-1]

    @property
    def landed(self):
        return [length for connection in self.connections for length in connection.landed]

    @property
    def most_unproven(self):
        return max(connection.most_unproven for connection in self.connections)


class Connection:
    path = ""

    def __init__(self, backend):
        self.backend = backend
        self.sent, self.landed, self.most_unproven = [], [], 0
        self.is_open = True

    def expect(self, is_true, what):
        if not is_true:
            self.backend.violations.append(what)

    def write(self, ticket_id, copies, deadline):
        lengths = copies["length"].tolist()
        self.expect(self.is_open, f"{lengths} written over a closed connection")
        self.expect(self.backend.go_on.wait(DEADLINE), "the test did not go on")
        self.backend.on_write(lengths)
        hows = {self.backend.failures.get(length) for length in lengths}
        if "refused here" in hows:
            raise WriteRefused("not this one")
        if "breaks" in hows:
            self.backend.at_risk.update(lengths)
            raise ConnectionError("gone")
        self.sent.append(lengths)
        self.most_unproven = max(self.most_unproven, len(self.sent))
        return lambda: self.prove(lengths, hows)

    def prove(self, lengths, hows):
        self.expect(self.is_open, f"{lengths} proven over a closed connection")
        self.expect(self.sent[:1] == [lengths], f"{lengths} proven before {self.sent}")
        self.sent.remove(lengths)
        if "refused there" in hows:
            self.sent.clear()
            raise WriteRefused("not this one")
        if "breaks later" in hows:
            self.backend.at_risk.update(lengths, *self.sent)
            raise TimeoutError("late")
        self.landed += lengths

    def is_alive(self):
        return self.is_open

    def interrupt(self):
        self.backend.go_on.set()

    def close(self):
        self.is_open = False


class World:
    """One sender over a backend; how each of its writes ended, in the order in which they did."""

    def __init__(self, backend):
        self.backend, self.ends, self.pairs = backend, [], []
        self.progress = threading.Condition()
        options = TransportOptions(write_timeout=DEADLINE)
        self.sender = Sender(backend, options, PeerAddress("session", "nowhere:1"), self.finish)

    def connect(self, *args):
        self.pairs.append(socket.socketpair())
        return self.pairs[-1][0]

    def patch(self, patch):
        """No listener, only connections."""
        patch.setattr(sending, "connect", self.connect)
        patch.setattr(sending, "initiate", lambda *args: b"")

    def finish(self, tickets, status):
        with self.progress:
            self.ends.extend((ticket.id, status) for ticket in tickets)
            self.progress.notify_all()

    def offer(self, lengths):
        for i, length in enumerate(lengths):
            assert self.sender.offer(Write(Ticket(i), copy_table([(0, 0, 0, 0, length)]), length))
            self.sender.go_on()

    def until(self, count):
        with self.progress:
            assert self.progress.wait_for(lambda: len(self.ends) >= count, DEADLINE)

    def close(self):
        self.sender.stop("the end")
        for pair in self.pairs:
            for end in pair:
                end.close()
        assert self.backend.violations == []
        assert [i for i, _ in self.ends] == list(range(len(self.ends)))

    @property
    def states(self):
        return [status.state for _, status in self.ends]


def run(backend, lengths):
    """Write these: how each ended."""
    with pytest.MonkeyPatch.context() as patch:
        world = World(backend)
        world.patch(patch)
        world.offer(lengths)
        backend.go_on.set()
        world.until(len(lengths))
        world.close()
    return world


def test_the_next_is_sent_before_the_one_before_is_proven_and_no_more_than_the_bound():
    backend = Backend()
    assert run(backend, [JOINED] * 6).states == [DONE] * 6
    assert backend.landed == [JOINED] * 6
    assert backend.most_unproven == MAX_UNPROVEN_WRITES > 1
    assert len(backend.connections) == 1


def test_a_large_write_is_not_sent_behind_another_whose_end_it_would_put_off():
    backend = Backend()
    unproven = {}
    backend.on_write = lambda lengths: unproven.update({lengths[0]: len(backend.connections[0].sent)})
    assert run(backend, [JOINED, JOINED + 1, JOINED - 1]).states == [DONE] * 3
    assert unproven == {JOINED: 0, JOINED + 1: 0, JOINED - 1: 1}


def test_what_the_receiver_refuses_fails_and_what_came_behind_goes_again():
    backend = Backend({900: "refused there"})
    world = run(backend, [JOINED, 900, 999, 998])
    assert world.states == [DONE, FAILED, DONE, DONE]
    assert "refused the write: not this one" in world.ends[1][1].error
    assert backend.landed == [JOINED, 999, 998]


def test_of_several_that_went_as_one_a_refusal_fails_the_one_at_fault():
    backend = Backend({302: "refused there"})
    assert run(backend, [JOINED, 301, 302, 303, 999]).states == [DONE, DONE, FAILED, DONE, DONE]
    assert backend.landed == [JOINED, 301, 303, 999]


def test_what_is_refused_before_it_is_sent_takes_nothing_along():
    backend = Backend({900: "refused here"})
    assert run(backend, [JOINED, 900, 999]).states == [DONE, FAILED, DONE]
    assert backend.landed == [JOINED, 999]


def test_a_connection_that_breaks_under_a_write_keeps_the_proof_of_the_one_before():
    world = run(Backend({900: "breaks"}), [JOINED, 900, 999, 998])
    assert world.states == [DONE, LOST, DONE, DONE]
    assert "broke: gone" in world.ends[1][1].error
    assert len(world.backend.connections) == 2


def test_a_connection_that_breaks_behind_a_refusal_is_no_loss():
    world = run(Backend({900: "refused there", 999: "breaks"}), [900, 999, 998])
    # It was not taken, went again, and broke again.
    assert world.states == [FAILED, LOST, DONE]
    assert len(world.backend.connections) == 3


def test_a_proof_that_does_not_come_loses_what_was_sent_behind_it_as_well():
    world = run(Backend({900: "breaks later"}), [JOINED, 900, 999, 998])
    assert world.states == [DONE, LOST, LOST, DONE]
    assert "did not take a write of 900 bytes within 60 s" in world.ends[1][1].error
    assert "broke: late" in world.ends[2][1].error
    assert len(world.backend.connections) == 2


@pytest.mark.parametrize("stop_at", [JOINED, 999])
def test_a_stop_ends_what_is_unproven_and_what_waits(stop_at):
    backend = Backend()
    stopper = threading.Thread(target=lambda: world.sender.stop("enough"))

    def stop(lengths):
        if lengths == [stop_at]:
            stopper.start()
            while world.sender._stopped is None:
                pass

    backend.on_write = stop
    with pytest.MonkeyPatch.context() as patch:
        world = World(backend)
        world.patch(patch)
        world.offer([JOINED, 999, 998, 997])
        backend.go_on.set()
        world.until(4)
        stopper.join(DEADLINE)
        world.close()
    # The model's receiver continues: what was sent is proven.
    num_done = 1 + (stop_at == 999)
    assert world.states == [DONE] * num_done + [FAILED] * (4 - num_done)
    assert {status.error for _, status in world.ends[num_done:]} == {"enough"}


def test_a_stop_between_two_writes_takes_no_proof_along(monkeypatch):
    backend = Backend()
    take_behind = Sender._take_behind

    def stop_once_taken(sender):
        taken = take_behind(sender)
        if taken:
            stopper.start()
            while sender._stopped is None:
                pass
        return taken

    monkeypatch.setattr(Sender, "_take_behind", stop_once_taken)
    world = World(backend)
    world.patch(monkeypatch)
    stopper = threading.Thread(target=lambda: world.sender.stop("enough"))
    world.offer([JOINED, 999, 998])
    backend.go_on.set()
    world.until(3)
    stopper.join(DEADLINE)
    world.close()
    assert world.states == [DONE, FAILED, FAILED]
    assert [i for i, _ in world.ends] == [0, 1, 2]


@given(
    lengths=st.lists(st.integers(1, 700), min_size=1, max_size=12, unique=True),
    hows=st.lists(st.sampled_from([*HOWS, None, None, None]), min_size=12, max_size=12),
)
def test_every_write_is_final_once_in_order_and_truly(lengths, hows):
    failures = dict(zip(lengths, hows, strict=False))
    backend = Backend({length: how for length, how in failures.items() if how})
    world = run(backend, lengths)
    assert len(world.ends) == len(lengths)
    for i, status in world.ends:
        length = lengths[i]
        if status.state is DONE:
            assert failures[length] is None
            assert backend.landed.count(length) == 1
        elif status.state is FAILED:
            assert failures[length] in ("refused here", "refused there")
            assert length not in backend.landed
        else:
            assert length in backend.at_risk
            assert length not in backend.landed
    assert backend.most_unproven <= MAX_UNPROVEN_WRITES
