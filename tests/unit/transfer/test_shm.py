"""What `shm` alone can get wrong: the wrong host, the wrong memory, and a write that is cut into parts."""

import os
import socket
import threading
import time

import msgspec
import numpy as np
import pytest

from splitserve.core.errors import ConfigError
from splitserve.core.layout import Region
from splitserve.core.machine import Arena
from splitserve.transfer.copies import copy_table
from splitserve.transfer.transports import create_transport, same_host, shm
from splitserve.transfer.transports.backend import Memory
from splitserve.transfer.transports.base import TransportOptions, WriteRefused, WriteState
from splitserve.transfer.transports.frames import ProtocolError
from splitserve.transfer.transports.same_host import PART_BYTES
from splitserve.transfer.transports.shm import ShmBackend, ShmIncoming, ShmOutgoing
from splitserve.transfer.transports.sockets import Deadline
from support.transfer_peer import End

DEADLINE = 60.0


def arena_of(length):
    arena = Arena(length, shareable=True)
    return arena, np.frombuffer(arena.buffer, dtype=np.uint8)


def session_info_of(*arenas):
    incoming = ShmIncoming(Memory([a.region() for a in arenas]))
    return incoming, msgspec.msgpack.decode(incoming.session_info(), type=shm.SharedMemoryTarget)


# An idle connection.
IDLE, OTHER_END = socket.socketpair()


@pytest.fixture(scope="module", autouse=True)
def close_idle():
    yield
    IDLE.close()
    OTHER_END.close()


def test_private_memory_is_refused_with_the_remedy():
    with pytest.raises(ConfigError, match=r"Arena\(..., shareable=True\)"):
        ShmBackend().register(Memory([Arena(8).region()]))


def test_a_receiver_on_another_host_is_refused_and_both_are_named(monkeypatch):
    src, dst = End("shm", [8]), End("shm", [8])
    session = dst.transport.open_session()
    here = same_host.this_host()
    hosts = iter([same_host.KernelIdentity("receiver.example", "a-boot"), here])
    monkeypatch.setattr(same_host, "this_host", lambda: next(hosts))
    status = src.outcome(src.transport.write(session, copy_table([(0, 0, 0, 0, 8)])))
    assert status.state is WriteState.FAILED
    assert "'receiver.example' (a-boot)" in status.error
    assert f"{here.name!r} ({here.boot_id})" in status.error
    src.close()
    dst.close()


def test_a_file_that_is_not_the_announced_one_is_not_written_to():
    arena, _ = arena_of(8)
    _, session_info = session_info_of(arena)
    file, offset, length = session_info.regions[0]
    forged = msgspec.structs.replace(file, inode=file.inode + 1)
    with pytest.raises(ProtocolError, match="another one"):
        ShmOutgoing(IDLE, Memory(), msgspec.structs.replace(session_info, regions=[(forged, offset, length)]))


def test_a_process_that_cannot_be_looked_into_names_what_it_takes():
    arena, _ = arena_of(8)
    _, session_info = session_info_of(arena)
    with pytest.raises(ProtocolError, match="process namespace"):
        ShmOutgoing(IDLE, Memory(), msgspec.structs.replace(session_info, pid=2**22 + 1))


@pytest.mark.parametrize(("offset", "length"), [(0, 9), (8, 1), (-1, 2)])
def test_a_region_that_its_file_does_not_hold_is_refused(offset, length):
    arena, _ = arena_of(8)
    _, session_info = session_info_of(arena)
    region = (session_info.regions[0][0], offset, length)
    with pytest.raises(ProtocolError, match="in a file of 8 bytes"):
        ShmOutgoing(IDLE, Memory(), msgspec.structs.replace(session_info, regions=[region]))


def test_regions_that_share_a_file_are_told_apart():
    arena, memory = arena_of(100)
    incoming = ShmIncoming(Memory([arena.region(0, 50), arena.region(50, 50)]))
    source, bytes_here = arena_of(50)
    bytes_here[:] = 7
    outgoing = ShmOutgoing(
        IDLE, Memory([source.region()]), msgspec.msgpack.decode(incoming.session_info(), type=shm.SharedMemoryTarget)
    )
    outgoing.write(0, copy_table([(0, 0, 1, 10, 20)]), Deadline(10))
    assert (memory[60:80] == 7).all()
    assert memory.sum() == 20 * 7
    outgoing.close()


def test_pieces_of_every_size_around_a_part_arrive_whole():
    sizes = [1, PART_BYTES - 1, PART_BYTES, 0, PART_BYTES + 1, 3 * PART_BYTES + 5, 17]
    total = sum(sizes)
    source, here = arena_of(total)
    target, there = arena_of(total)
    here[:] = np.random.default_rng(0).integers(0, 256, total, dtype=np.uint8)
    _, session_info = session_info_of(target)
    outgoing = ShmOutgoing(IDLE, Memory([source.region()]), session_info)
    ends = np.cumsum(sizes).tolist()
    rows = [(0, end - n, 0, total - end, n) for end, n in zip(ends, sizes, strict=True)]
    outgoing.write(0, copy_table(rows), Deadline(10))
    for _, first, _, placed, n in rows:
        assert (there[placed : placed + n] == here[first : first + n]).all()
    outgoing.close()


def test_a_gate_that_closes_in_the_middle_of_a_write_ends_it_at_the_next_part(monkeypatch):
    total = 4 * PART_BYTES
    source, here = arena_of(total)
    target, there = arena_of(total)
    here[:] = 1
    incoming, session_info = session_info_of(target)
    outgoing = ShmOutgoing(IDLE, Memory([source.region()]), session_info)
    advance = shm.ScatterCopy.advance

    def advance_and_revoke(copy, max_bytes):
        advance(copy, max_bytes)
        incoming.revoke()
        assert not incoming.is_fenced()

    monkeypatch.setattr(shm.ScatterCopy, "advance", advance_and_revoke)
    with pytest.raises(WriteRefused, match="drained"):
        outgoing.write(0, copy_table([(0, 0, 0, 0, total)]), Deadline(10))
    assert incoming.is_fenced()
    assert there.sum() == PART_BYTES
    outgoing.close()


def test_an_interrupted_write_ends_at_the_next_part():
    source, _ = arena_of(8)
    target, there = arena_of(8)
    _, session_info = session_info_of(target)
    outgoing = ShmOutgoing(IDLE, Memory([source.region()]), session_info)
    outgoing.interrupt()
    with pytest.raises(WriteRefused):
        outgoing.write(0, copy_table([(0, 0, 0, 0, 8)]), Deadline(10))
    assert not there.any()
    outgoing.close()


def test_nothing_stays_open_when_sessions_and_senders_are_gone():
    def open_files():
        return len(os.listdir("/proc/self/fd"))

    def write_and_drain():
        session = dst.transport.open_session()
        ticket = src.transport.write(session, copy_table([(0, 0, 0, 0, 64)]))
        assert src.outcome(ticket).state is WriteState.DONE
        src.transport.drain(session.session_id)
        dst.transport.drain(session.session_id)
        assert dst.transport.is_fenced(session.session_id)

    src, dst = End("shm", [64]), End("shm", [64])
    # After the first session the listener's thread has opened what it keeps.
    write_and_drain()
    before = open_files()
    for _ in range(10):
        write_and_drain()
    # The thread of a connection closes it after the session is fenced.
    deadline = time.monotonic() + DEADLINE
    while open_files() > before:
        assert time.monotonic() < deadline, f"{open_files()} files are open, {before} before"
        time.sleep(0.001)
    src.close()
    dst.close()


def test_another_system_than_linux_is_refused_with_another_backend(monkeypatch):
    monkeypatch.setattr(shm.sys, "platform", "darwin")
    with pytest.raises(ConfigError, match="choose 'tcp'"):
        create_transport("shm", TransportOptions())


def test_a_target_region_that_was_never_announced_is_refused():
    source, _ = arena_of(8)
    incoming = ShmIncoming(Memory())
    session_info = msgspec.msgpack.decode(incoming.session_info(), type=shm.SharedMemoryTarget)
    outgoing = ShmOutgoing(IDLE, Memory([Region(source.address, 8, 0)]), session_info)
    with pytest.raises(WriteRefused, match="region 0 is not registered"):
        outgoing.write(0, copy_table([(0, 0, 0, 0, 8)]), Deadline(10))
    outgoing.close()


@pytest.fixture
def shared(monkeypatch):
    """Source and target of six parts, and the two ends of a session. Two threads share its writes."""
    monkeypatch.setattr(shm, "SHARED_BYTES", 2 * PART_BYTES)
    source, here = arena_of(6 * PART_BYTES)
    target, there = arena_of(6 * PART_BYTES)
    here[:] = np.random.default_rng(1).integers(1, 256, here.size, dtype=np.uint8)
    incoming, session_info = session_info_of(target)
    outgoing = ShmOutgoing(IDLE, Memory([source.region()]), session_info, num_threads=2)
    yield here, there, incoming, outgoing
    outgoing.close()


def meet(monkeypatch, then):
    """`then` is called once two threads are inside the gate at the same time, before either copies a byte."""
    barrier = threading.Barrier(2, then)
    advance = shm.ScatterCopy.advance
    threads = set()

    def advance_after_meeting(copy, max_bytes):
        if threading.get_ident() not in threads:
            threads.add(threading.get_ident())
            barrier.wait(DEADLINE)
        advance(copy, max_bytes)

    monkeypatch.setattr(shm.ScatterCopy, "advance", advance_after_meeting)
    return threads


def test_threads_share_a_large_write(shared, monkeypatch):
    here, there, incoming, outgoing = shared
    threads = meet(monkeypatch, lambda: None)
    outgoing.write(0, copy_table([(0, 0, 0, 0, here.size)]), Deadline(DEADLINE))
    assert len(threads) == 2
    assert (there == here).all()
    incoming.revoke()
    assert incoming.is_fenced()


def test_a_small_write_is_one_threads(shared, monkeypatch):
    _, there, _, outgoing = shared
    advance, threads = shm.ScatterCopy.advance, []

    def noted(copy, max_bytes):
        threads.append(threading.get_ident())
        advance(copy, max_bytes)

    monkeypatch.setattr(shm.ScatterCopy, "advance", noted)
    outgoing.write(0, copy_table([(0, 0, 0, 0, 2 * PART_BYTES - 1)]), Deadline(DEADLINE))
    assert threads == [threading.get_ident()] * 2
    assert np.count_nonzero(there) == 2 * PART_BYTES - 1


def test_the_fence_of_a_shared_write_waits_for_each_of_its_threads(shared, monkeypatch):
    here, there, incoming, outgoing = shared
    advance, check, caller = shm.ScatterCopy.advance, ShmOutgoing._check, threading.get_ident()
    both_are_inside = threading.Barrier(2, incoming.revoke)
    checks, caller_is_out, fenced = [], threading.Event(), []

    def advance_last(copy, max_bytes):
        both_are_inside.wait(DEADLINE)
        if threading.get_ident() != caller:
            assert caller_is_out.wait(DEADLINE)
            fenced.append(incoming.is_fenced())
        advance(copy, max_bytes)

    def note_check(self, deadline):
        if threading.get_ident() == caller:
            checks.append(None)
            # At the beginning, before its first part, and now that it has left that.
            if len(checks) == 3:
                caller_is_out.set()
        check(self, deadline)

    # The gate closes while both are inside; then the caller leaves, and the other stays.
    monkeypatch.setattr(shm.ScatterCopy, "advance", advance_last)
    monkeypatch.setattr(ShmOutgoing, "_check", note_check)
    with pytest.raises(WriteRefused, match="drained"):
        outgoing.write(0, copy_table([(0, 0, 0, 0, here.size)]), Deadline(DEADLINE))
    assert fenced == [False]
    # The parts that both were in, and none after them.
    assert incoming.is_fenced()
    assert np.count_nonzero(there) == 2 * PART_BYTES


@pytest.mark.parametrize("is_caller", [True, False])
def test_an_error_of_either_thread_fails_a_shared_write_once_both_are_out(shared, monkeypatch, is_caller):
    here, _, incoming, outgoing = shared
    meet(monkeypatch, lambda: None)
    advance, caller = shm.ScatterCopy.advance, threading.get_ident()

    def fail(copy, max_bytes):
        advance(copy, max_bytes)
        if (threading.get_ident() == caller) == is_caller:
            raise OSError("no more")

    monkeypatch.setattr(shm.ScatterCopy, "advance", fail)
    with pytest.raises(OSError, match="no more"):
        outgoing.write(0, copy_table([(0, 0, 0, 0, here.size)]), Deadline(DEADLINE))
    incoming.revoke()
    assert incoming.is_fenced()


def test_a_wrong_number_of_threads_is_refused_by_name():
    for wrong in ("0", "65", "two", ""):
        with pytest.raises(ConfigError, match=f"threads={wrong}: a number from 1 to 64"):
            create_transport("shm", TransportOptions(extra={"threads": wrong}))
    create_transport("shm", TransportOptions(extra={"threads": "64"})).close()
