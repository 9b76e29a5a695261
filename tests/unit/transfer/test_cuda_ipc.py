"""What `cuda_ipc` alone can get wrong, on a GPU that lies in the CPU's memory; how writes are cut for a real one."""

import subprocess
import sys

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitserve.core.errors import ConfigError
from splitserve.core.layout import Region
from splitserve.core.machine import Arena, Sharing
from splitserve.transfer import transports
from splitserve.transfer.copies import copy_table
from splitserve.transfer.transports import cuda_ipc, missing, needs_shareable_memory, pool_sharing_of
from splitserve.transfer.transports.backend import Memory
from splitserve.transfer.transports.base import WriteRefused, WriteState
from splitserve.transfer.transports.cuda_ipc import (
    ROW_BYTES,
    CudaIpcBackend,
    CudaIpcOutgoing,
    DeviceGate,
    DeviceKey,
    rows_of,
)
from splitserve.transfer.transports.frames import ProtocolError
from splitserve.transfer.transports.sockets import Deadline
from support.fake_gpu import FAKE_CUDA_IPC, FakeGpu
from support.transfer_peer import End, PeerProcess, digest

PIECES = st.lists(st.integers(0, ROW_BYTES), max_size=12)


@given(lengths=PIECES, unit=st.sampled_from([1, 8]))
def test_rows_are_the_pieces_in_words(lengths, unit):
    sizes = [n // unit * unit for n in lengths]
    begins = [ROW_BYTES * i for i in range(len(sizes))]
    copies = copy_table((1, begin, 0, begin + 64, size) for begin, size in zip(begins, sizes, strict=True))
    ours, theirs = (Memory([Region(base, 1 << 30), Region(base + (1 << 30), 1 << 30)]) for base in (1 << 40, 1 << 41))
    rows = rows_of(copies, ours, theirs)
    assert rows.word_bytes == (8 if all(size % 8 == 0 for size in sizes) else 1)
    assert rows.table[0].tolist() == [(1 << 41) + 64 + begin for begin in begins]
    assert rows.table[1].tolist() == [(1 << 40) + (1 << 30) + begin for begin in begins]
    assert (rows.table[2] * rows.word_bytes).tolist() == sizes


def arena_of(length):
    arena = Arena(length, shareable=True)
    return arena, np.frombuffer(arena.buffer, dtype=np.uint8)


def backend_of(*arenas, on_host=()):
    backend = CudaIpcBackend(FakeGpu(frozenset(a.address for a in on_host)))
    backend.register(Memory([a.region() for a in arenas]))
    return backend


def session_info_of(backend):
    incoming = backend.receive()
    return incoming, msgspec.msgpack.decode(incoming.session_info(), type=cuda_ipc._SessionInfo)


def test_pages_of_the_gpu_and_a_row_of_the_cpu_go_with_one_write():
    (pool, pages), (row, values) = arena_of(100), arena_of(20)
    (source, here), (told, mine) = arena_of(100), arena_of(20)
    here[:], mine[:] = 7, 9
    receiver, sender = backend_of(pool, row, on_host=[row]), backend_of(source, told, on_host=[told])
    incoming, session_info = session_info_of(receiver)
    outgoing = CudaIpcOutgoing(None, sender, session_info)
    outgoing.write(0, copy_table([(0, 0, 0, 50, 50), (1, 0, 1, 5, 10)]), Deadline(10))
    assert (pages[50:] == 7).all()
    assert not pages[:50].any()
    assert (values[5:15] == 9).all()
    assert sender.gpu.num_copies == 1
    with pytest.raises(WriteRefused, match="between a GPU and a CPU"):
        outgoing.write(1, copy_table([(0, 0, 1, 0, 8)]), Deadline(10))
    incoming.revoke()
    assert incoming.is_fenced()
    with pytest.raises(WriteRefused, match="drained"):
        outgoing.write(2, copy_table([(0, 0, 0, 0, 8)]), Deadline(10))
    outgoing.close()


def test_a_gate_that_closes_in_the_middle_of_a_write_ends_it_at_the_next_part(monkeypatch):
    monkeypatch.setattr(cuda_ipc, "ROW_BYTES", 50)
    monkeypatch.setattr(cuda_ipc, "LAUNCH_ROWS", 1)
    monkeypatch.setattr(cuda_ipc, "LAUNCHES", 2)
    (pool, pages), (source, here) = arena_of(400), arena_of(400)
    here[:] = 1
    receiver, sender = backend_of(pool), backend_of(source)
    incoming, session_info = session_info_of(receiver)
    outgoing = CudaIpcOutgoing(None, sender, session_info)
    start = sender.gpu.start

    def start_and_revoke(rows):
        wait = start(rows)
        incoming.revoke()

        def finish():
            assert not incoming.is_fenced()
            wait()

        return finish

    monkeypatch.setattr(sender.gpu, "start", start_and_revoke)
    with pytest.raises(WriteRefused, match="drained"):
        outgoing.write(0, copy_table([(0, 0, 0, 0, 400)]), Deadline(10))
    assert incoming.is_fenced()
    assert pages.sum() == 100
    outgoing.close()


def test_a_launch_that_fails_does_not_keep_the_session_from_being_fenced(monkeypatch):
    monkeypatch.setattr(cuda_ipc, "LAUNCH_ROWS", 1)
    monkeypatch.setattr(cuda_ipc, "ROW_BYTES", 50)
    (pool, _), (source, _) = arena_of(100), arena_of(100)
    receiver, sender = backend_of(pool), backend_of(source)
    incoming, session_info = session_info_of(receiver)
    outgoing = CudaIpcOutgoing(None, sender, session_info)
    start, waited = sender.gpu.start, []

    def start_once(rows):
        if sender.gpu.num_copies:
            raise MemoryError("no page-locked memory")
        start(rows)
        return lambda: waited.append(1)

    monkeypatch.setattr(sender.gpu, "start", start_once)
    with pytest.raises(MemoryError):
        outgoing.write(0, copy_table([(0, 0, 0, 0, 100)]), Deadline(10))
    incoming.revoke()
    assert waited == [1]
    assert incoming.is_fenced()
    outgoing.close()


def test_an_allocation_of_another_process_is_opened_once_a_connection_and_closed_with_it():
    with PeerProcess(FAKE_CUDA_IPC, [64, 64]) as peer:
        src = End(FAKE_CUDA_IPC, [64, 64])
        for memory in src.memory:
            memory[:] = 5
        session = peer.open_session()
        for _ in range(2):
            ticket = src.transport.write(session, copy_table([(0, 0, 0, 0, 64), (1, 0, 1, 0, 64)]))
            assert src.outcome(ticket).state is WriteState.DONE
        assert len(src.transport.backend.gpu.opened) == 2
        assert peer.ask("digest", region=1) == digest(src.memory[1])
        src.transport.drain(session.session_id)
        assert not src.transport.backend.gpu.opened
        src.close()


def test_memory_without_a_gpu_is_refused_with_the_option():
    row, _ = arena_of(8)
    with pytest.raises(ConfigError, match="--device cuda"):
        backend_of(row, on_host=[row])


def test_private_memory_of_the_cpu_is_refused_with_the_remedy():
    (pool, _), row = arena_of(8), Arena(8)
    with pytest.raises(ConfigError, match=r"Arena\(..., shareable=True\)"):
        backend_of(pool, row, on_host=[row])


@pytest.mark.parametrize(("offset", "length"), [(0, 9), (8, 1), (-1, 2)])
def test_a_region_that_its_allocation_does_not_hold_is_refused(offset, length):
    pool, _ = arena_of(8)
    backend = backend_of(pool)
    _, session_info = session_info_of(backend)
    region = msgspec.structs.replace(session_info.regions[0], offset=offset, length=length)
    with pytest.raises(ProtocolError, match="in an allocation of 8 bytes"):
        CudaIpcOutgoing(None, backend, msgspec.structs.replace(session_info, regions=[region]))


def test_another_host_is_refused(monkeypatch):
    pool, _ = arena_of(8)
    backend = backend_of(pool)
    _, session_info = session_info_of(backend)
    elsewhere = msgspec.structs.replace(session_info.host, name="receiver.example", boot_id="a-boot")
    with pytest.raises(ProtocolError, match=r"'receiver.example' \(a-boot\).*'cuda_ipc' works inside one host"):
        CudaIpcOutgoing(None, backend, msgspec.structs.replace(session_info, host=elsewhere))


def test_rows_of_the_cpu_must_be_shareable_and_the_pool_need_not():
    assert needs_shareable_memory("cuda_ipc")
    assert pool_sharing_of("cuda_ipc", {}) is Sharing.NONE
    assert pool_sharing_of("shm", {}) is Sharing.ALWAYS


HOLDER = """
import contextlib, os, sys
from splitserve.transfer.transports.cuda_ipc import DeviceKey
key = DeviceKey(int(sys.argv[1]))
with contextlib.suppress(ZeroDivisionError), key.held():
    1 / 0
print("out", flush=True)
sys.stdin.read()
"""


def test_who_went_without_waiting_for_its_gpu_is_waited_for_until_its_process_has_ended():
    gate = DeviceGate()
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(gate.fd)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        pass_fds=[gate.fd],
        text=True,
    )
    with holder:
        assert holder.stdout.readline() == "out\n"
        gate.close_for_good()
        # The lock is free, and yet.
        assert not gate.is_closed()
        assert not gate.is_closed()
        holder.kill()
    assert gate.is_closed()


def test_who_has_finished_is_not_waited_for():
    gate = DeviceGate()
    key = DeviceKey(gate.fd)
    with key.held():
        gate.close_for_good()
        assert not gate.is_closed()
    assert gate.is_closed()
    key.close()


def test_without_a_gpu_it_says_what_is_missing():
    problem = missing("cuda_ipc")
    assert problem is None or "'cuda_ipc' needs" in problem


@pytest.mark.parametrize(
    ("visible", "lack", "nodes", "expected"),
    [
        (None, None, ["nvidia0", "nvidiactl"], True),
        ("1", None, ["nvidia1"], True),
        ("", None, ["nvidia0"], False),
        (None, "a torch that is built with CUDA", ["nvidia0"], False),
        (None, None, ["nvidiactl"], False),
    ],
)
def test_a_gpu_is_found_without_its_driver(visible, lack, nodes, expected, tmp_path, monkeypatch):
    monkeypatch.setattr(transports, "missing_of_cuda", lambda built_with: lack)
    monkeypatch.setattr(transports, "_DEVICE_FILES", tmp_path)
    monkeypatch.setattr("ctypes.CDLL", lambda name: pytest.fail("the driver was loaded"))
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    for name in nodes:
        (tmp_path / name).touch()
    assert transports.has_gpu() is expected
