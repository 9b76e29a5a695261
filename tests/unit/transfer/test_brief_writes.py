"""Writes that the caller carries out itself, because they never wait for the peer: turn, order, drain, connections."""

import dataclasses
import threading
import time

import pytest

from splitserve.transfer.copies import copy_table
from splitserve.transfer.transports import backend, same_host, sending, shm
from splitserve.transfer.transports.base import WriteState
from splitserve.transfer.transports.shm import BRIEF_BYTES
from support.transfer_peer import End

DEADLINE = 60.0
LONG = BRIEF_BYTES + 1


@pytest.fixture
def ends():
    pair = End("shm", [LONG]), End("shm", [LONG])
    yield pair
    for end in pair:
        end.close()


@pytest.fixture
def writers(monkeypatch):
    """The threads that copied bytes, in order; of short writes also those that only looked how long a write is."""
    threads = []

    def note(copy):
        def noted(*args):
            threads.append(threading.get_ident())
            return copy(*args)

        return noted

    monkeypatch.setattr(shm.ScatterCopy, "advance", note(shm.ScatterCopy.advance))
    monkeypatch.setattr(backend, "copy_few", note(backend.copy_few))
    return threads


def write(end, peer, length, target=0):
    return end.transport.write(peer, copy_table([(0, 0, 0, target, length)]))


def connect(src, dst):
    """A session over which a write by the caller's own thread was sent."""
    peer = dst.transport.open_session()
    me, limit = threading.get_ident(), time.monotonic() + DEADLINE
    enders = []

    def progress():
        enders.append(threading.get_ident())
        src.progress.set()

    src.transport.options = dataclasses.replace(src.transport.options, on_progress=progress)
    while me not in enders:
        assert time.monotonic() < limit, "the caller never had a turn"
        assert src.outcome(write(src, peer, 1)).state is WriteState.DONE
    # Before it waits, the sender's thread may take the next write, too.
    while not src.transport._senders[peer.session_id]._ready._waiters:
        assert time.monotonic() < limit, "the sender's thread never waits"
    return peer


def test_a_brief_write_is_done_by_the_caller_before_it_returns(ends, writers):
    src, dst = ends
    peer = connect(src, dst)
    src.memory[0][:BRIEF_BYTES] = 5
    writers.clear()
    assert src.transport.poll(write(src, peer, BRIEF_BYTES)).state is WriteState.DONE
    assert writers == [threading.get_ident()]
    assert (dst.memory[0][:BRIEF_BYTES] == 5).all()


def test_a_longer_write_is_never_carried_out_by_the_caller(ends, writers):
    src, dst = ends
    peer = connect(src, dst)
    writers.clear()
    assert src.outcome(write(src, peer, BRIEF_BYTES + 1)).state is WriteState.DONE
    assert threading.get_ident() not in writers


def test_a_brief_write_waits_for_its_turn_behind_a_long_one(ends, monkeypatch):
    src, dst = ends
    peer = connect(src, dst)
    me, inside, go_on = threading.get_ident(), threading.Event(), threading.Event()
    advance = shm.ScatterCopy.advance

    def stopped(copy, max_bytes):
        if threading.get_ident() != me:
            inside.set()
            assert go_on.wait(DEADLINE)
        advance(copy, max_bytes)

    monkeypatch.setattr(shm.ScatterCopy, "advance", stopped)
    src.memory[0][:] = 1
    src.memory[0][0] = 9
    long = write(src, peer, LONG)
    assert inside.wait(DEADLINE)
    brief = write(src, peer, 1, target=LONG - 1)
    assert src.transport.poll(brief).state is WriteState.PENDING
    go_on.set()
    assert all(src.outcome(ticket).state is WriteState.DONE for ticket in (long, brief))
    assert dst.memory[0][LONG - 1] == 9


def test_a_drain_waits_for_the_write_that_a_caller_is_inside_of(ends, monkeypatch):
    src, dst = ends
    peer = connect(src, dst)
    interrupted, drained, too_early = threading.Event(), threading.Event(), []
    monkeypatch.setattr(shm.ShmOutgoing, "interrupt", lambda outgoing: interrupted.set())
    copy_few = backend.copy_few

    def slowly(*args):
        assert interrupted.wait(DEADLINE)
        too_early.append(drained.wait(0.2))
        return copy_few(*args)

    def drain():
        src.transport.drain(peer.session_id)
        drained.set()

    monkeypatch.setattr(backend, "copy_few", slowly)
    drainer = threading.Thread(target=drain)

    def drain_once_inside(key):
        drainer.start()
        return held(key)

    held = same_host.GateKey.held
    monkeypatch.setattr(same_host.GateKey, "held", drain_once_inside)
    ticket = write(src, peer, 1)
    drainer.join(DEADLINE)
    assert too_early == [False]
    assert drained.is_set()
    assert src.transport.poll(ticket).state is WriteState.DONE


def test_a_caller_never_waits_for_a_new_connection(ends, monkeypatch):
    src, dst = ends
    peer = connect(src, dst)
    connecting = []
    connect_to = sending.connect

    def noted(*args):
        connecting.append(threading.get_ident())
        return connect_to(*args)

    monkeypatch.setattr(sending, "connect", noted)
    dst.transport.close()
    assert src.outcome(write(src, peer, 1)).state is WriteState.FAILED
    assert connecting
    assert threading.get_ident() not in connecting
