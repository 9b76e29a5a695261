"""Errors that only `tcp` can make: the receiver's own check, and the effect of its refusal on later writes."""

import errno
import socket
import sys
import threading

import msgspec
import numpy as np
import pytest

from splitserve._native import tables
from splitserve.core.errors import OptionError
from splitserve.core.machine import Sharing
from splitserve.transfer import transports
from splitserve.transfer.copies import copy_table
from splitserve.transfer.transports import pool_sharing_of, same_host, sharing_of, tcp
from splitserve.transfer.transports.backend import Memory
from splitserve.transfer.transports.base import WriteState, is_direct
from splitserve.transfer.transports.frames import receive_reply, send_reply
from splitserve.transfer.transports.sockets import Deadline
from splitserve.transfer.transports.tcp import DirectTcpIncoming, SessionInfo, TcpBackend, TcpOutgoing
from support.transfer_peer import End

DEADLINE = 60.0
MIB = 1 << 20
# A sender that takes a region for so long sends what its receiver must refuse.
LIE = 64 * MIB


@pytest.fixture
def ends(monkeypatch):
    """Sender and receiver of 4 MiB each; the sender believes the receiver to have more. Writes of 1 MiB do not join."""
    monkeypatch.setattr(tcp, "decode_session_info", lambda decoder, session_info: SessionInfo([LIE]))
    monkeypatch.setattr(TcpBackend, "joined_bytes", MIB)
    src, dst = End("tcp", [4 * MIB]), End("tcp", [4 * MIB])
    src.memory[0][:] = np.random.default_rng(0).integers(1, 256, 4 * MIB, dtype=np.uint8)
    yield src, dst
    src.close()
    dst.close()


@pytest.fixture
def write_all(ends, monkeypatch):
    """Write these, all offered before the first is sent: how each ended."""
    src, dst = ends
    all_offered = threading.Event()
    write = TcpOutgoing.write

    def write_when_all_are_offered(self, *args):
        assert all_offered.wait(DEADLINE)
        return write(self, *args)

    monkeypatch.setattr(TcpOutgoing, "write", write_when_all_are_offered)

    def write_all(*rows):
        peer = dst.transport.open_session()
        tickets = [src.transport.write(peer, copy_table([row])) for row in rows]
        all_offered.set()
        return [src.outcome(ticket) for ticket in tickets]

    return write_all


def test_the_receiver_refuses_what_the_sender_did_not_and_takes_nothing_of_it(ends, write_all):
    (status,) = write_all((0, 0, 0, 4 * MIB - 8, 16))
    assert status.state is WriteState.FAILED
    assert "out of bounds of region 0 of 4194304 bytes" in status.error
    assert not ends[1].memory[0].any()


@pytest.mark.parametrize("behind", [MIB, MIB // 4, 16])
def test_what_came_behind_a_refusal_goes_again(ends, write_all, behind):
    src, dst = ends
    statuses = write_all(
        (0, 0, 0, 0, MIB), (0, 0, 0, 4 * MIB, MIB), (0, MIB, 0, MIB, behind), (0, 2 * MIB, 0, 2 * MIB, MIB)
    )
    done = WriteState.DONE
    assert [status.state for status in statuses] == [done, WriteState.FAILED, done, done]
    expected = src.memory[0].copy()
    expected[MIB + behind : 2 * MIB] = expected[3 * MIB :] = 0
    assert (dst.memory[0] == expected).all()


def test_a_refused_part_fails_its_write_and_no_other(ends, write_all, monkeypatch):
    monkeypatch.setattr(tcp, "PART_BYTES", MIB)
    monkeypatch.setattr(tcp, "CALL_BYTES", MIB)
    # The second and third of its parts lie outside.
    statuses = write_all((0, 0, 0, 3 * MIB, 3 * MIB), (0, MIB, 0, 0, MIB))
    assert [status.state for status in statuses] == [WriteState.FAILED, WriteState.DONE]
    assert (ends[1].memory[0][:MIB] == ends[0].memory[0][MIB : 2 * MIB]).all()
    assert not ends[1].memory[0][MIB : 3 * MIB].any()


@pytest.mark.parametrize("part_bytes", [tcp.PART_BYTES, MIB // 4])
@pytest.mark.parametrize("is_native", [True, False])
def test_a_large_write_goes_in_the_order_of_its_sources(monkeypatch, part_bytes, is_native):
    monkeypatch.setattr(tables, "ORDERED_BYTES", MIB)
    monkeypatch.setattr(tcp, "PART_BYTES", part_bytes)
    if not is_native:
        monkeypatch.setattr(tcp, "_library", None)
    order, send_copies = [], tcp.send_copies

    def record(sock, copies, *args, **head):
        order.extend(copies["src_offset"].tolist())
        send_copies(sock, copies, *args, **head)

    monkeypatch.setattr(tcp, "send_copies", record)
    src, dst = End("tcp", [2 * MIB]), End("tcp", [2 * MIB])
    try:
        random = np.random.default_rng(1)
        src.memory[0][:] = random.integers(1, 256, 2 * MIB, dtype=np.uint8)
        pages, places = random.permutation(512)[:300].tolist(), random.permutation(512).tolist()
        rows = [(0, page * 4096, 0, place * 4096, 4096) for page, place in zip(pages, places, strict=False)]
        assert src.outcome(src.transport.write(dst.transport.open_session(), copy_table(rows))).error is None
        for _, source, _, target, n in rows:
            assert (dst.memory[0][target : target + n] == src.memory[0][source : source + n]).all()
    finally:
        src.close()
        dst.close()
    if tables.is_built:
        assert order == [source for _, source, *_ in sorted(rows, key=lambda row: row[1])]


def test_a_reply_that_is_there_is_not_late():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        send_reply(theirs, 7)
        receive_reply(ours, 7, Deadline(-1.0))
        with pytest.raises(TimeoutError):
            receive_reply(ours, 8, Deadline(-1.0))


@pytest.fixture
def direct_ends():
    src, dst = End("tcp-direct", [64]), End("tcp-direct", [64])
    src.memory[0][:] = 7
    yield src, dst
    src.close()
    dst.close()


def sending_ends(monkeypatch) -> list[str]:
    """Return the kinds of sending ends that are connected from now on."""
    kinds, connect = [], TcpBackend.connect

    def connect_and_record(self, *args):
        end = connect(self, *args)
        kinds.append(type(end).__name__)
        return end

    monkeypatch.setattr(TcpBackend, "connect", connect_and_record)
    return kinds


def send(src, dst) -> str:
    """Write 16 bytes. Return the path that the status has."""
    status = src.outcome(src.transport.write(dst.transport.open_session(), copy_table([(0, 0, 0, 8, 16)])))
    assert status.state is WriteState.DONE
    assert dst.memory[0].tolist() == [0] * 8 + [7] * 16 + [0] * 40
    return status.path


def test_memory_that_can_be_mapped_is_written_directly_on_one_host(direct_ends, monkeypatch):
    kinds = sending_ends(monkeypatch)
    assert send(*direct_ends) == "direct"
    assert kinds == ["ShmOutgoing"]


def test_a_receiver_without_memory_that_can_be_mapped_gets_bytes_by_the_socket(direct_ends, monkeypatch):
    kinds = sending_ends(monkeypatch)
    dst = End("tcp", [64])
    assert send(direct_ends[0], dst) == "socket"
    dst.close()
    assert kinds == ["TcpOutgoing"]


def test_a_sender_on_another_host_uses_the_socket(direct_ends, monkeypatch):
    kinds = sending_ends(monkeypatch)
    # Only the receiver calls `this_host` then.
    monkeypatch.setattr(same_host, "this_host", lambda: same_host.KernelIdentity("elsewhere", "a boot"))
    send(*direct_ends)
    assert kinds == ["TcpOutgoing"]


@pytest.mark.parametrize(
    ("owner", "name", "error", "reason"),
    [
        (same_host, "open_file", PermissionError(errno.EACCES, "Permission denied"), "Permission denied"),
        # After the memory was mapped.
        (same_host, "GateKey", OSError(errno.EMFILE, "Too many open files"), "Too many open files"),
        (same_host, "boot_id", FileNotFoundError(errno.ENOENT, "No such file"), "No such file"),
        (same_host.Arena, "attach", OSError(errno.EINVAL, "cannot map a file of 0 bytes"), "cannot map"),
        (same_host, "GateKey", ValueError("cannot mmap an empty file"), "empty file"),
    ],
    ids=["open", "gate", "boot id", "map", "empty gate"],
)
def test_a_sender_that_cannot_open_the_memory_uses_the_socket(
    direct_ends, monkeypatch, caplog, owner, name, error, reason
):
    def refuse(*args, **options):
        raise error

    kinds, here = sending_ends(monkeypatch), same_host.this_host()
    # The receiver knows its host.
    monkeypatch.setattr(same_host, "this_host", lambda: here)
    monkeypatch.setattr(owner, name, refuse)
    with caplog.at_level("INFO"):
        send(*direct_ends)
    assert kinds == ["TcpOutgoing"]
    assert "direct writes failed, a socket is used peer_pid=" in caplog.text
    assert reason in caplog.text


def test_a_sender_opens_no_file_with_a_name(direct_ends, monkeypatch, tmp_path, caplog):
    kinds, (src, dst) = sending_ends(monkeypatch), direct_ends
    session = dst.transport.open_session()
    described = DirectTcpIncoming(Memory([dst._arenas[0].region()]))._direct
    with (tmp_path / "file").open("w+b") as file:
        file.truncate(64)
        forged = msgspec.structs.replace(described, regions=[(same_host.file_ref(file.fileno()), 0, 64)])
        monkeypatch.setattr(DirectTcpIncoming, "_direct", property(lambda self: forged, lambda self, value: None))
        with caplog.at_level("INFO"):
            ticket = src.transport.write(dst.transport.open_session(), copy_table([(0, 0, 0, 8, 16)]))
            assert src.outcome(ticket).state is WriteState.DONE
        assert kinds == ["TcpOutgoing"]
        assert "it is no anonymous memory" in caplog.text
        assert file.read() == bytes(64)
    dst.transport.drain(session.session_id)


def test_a_receiver_without_a_gate_gets_bytes_by_the_socket(direct_ends, monkeypatch, caplog):
    def refuse():
        raise OSError(errno.EMFILE, "Too many open files")

    kinds = sending_ends(monkeypatch)
    monkeypatch.setattr(same_host, "WriteGate", refuse)
    send(*direct_ends)
    assert kinds == ["TcpOutgoing"]
    assert "KV is received through sockets, direct writes failed" in caplog.text


def test_direct_writes_can_be_turned_off():
    assert is_direct({}) == (sys.platform == "linux")
    assert not is_direct({"direct": "false"})
    with pytest.raises(OptionError, match="give true or false"):
        is_direct({"direct": "maybe"})


@pytest.mark.parametrize("has_huge_pages", [True, False])
def test_memory_for_tcp_is_shareable_if_that_costs_no_huge_pages(monkeypatch, has_huge_pages):
    monkeypatch.setattr(transports, "shares_huge_pages", lambda: has_huge_pages)
    monkeypatch.setattr(transports, "is_direct", lambda extra: not extra)
    assert pool_sharing_of("tcp", {}) is (Sharing.WITH_HUGE_PAGES if has_huge_pages else Sharing.NONE)
    assert pool_sharing_of("tcp", {"direct": "false"}) is Sharing.NONE
    assert sharing_of("shm", {}) is Sharing.ALWAYS
    assert sharing_of("nixl", {}) is Sharing.NONE
