"""One contract, every transport: what `transports/base.py` promises, with real memory on both sides.

The first part has both ends in this process. In the second the other end is a process that is stopped and killed.
A backend without its library is skipped with its own message.
"""

import contextlib
import errno
import os
import random
import select
import socket
import struct
import threading
import time

import msgspec
import numpy as np
import pytest
import torch

from splitserve.core.errors import CapacityError, ConfigError
from splitserve.process.authentication import ResponderHandshake
from splitserve.tools.bench.second_process import VARIANTS
from splitserve.transfer.copies import copy_table
from splitserve.transfer.transports import (
    USER_BACKENDS,
    TransferBackend,
    check_options,
    create_transport,
    listener,
    missing,
    sockets,
)
from splitserve.transfer.transports import tcp as tcp_backend
from splitserve.transfer.transports.base import PeerAddress, TransportOptions, WriteState
from splitserve.transfer.transports.frames import DATA_PROTOCOL
from splitserve.transfer.transports.sending import MAX_PENDING_WRITES, MAX_UNPROVEN_WRITES
from splitserve.transfer.transports.sockets import Deadline
from splitserve.transfer.transports.tcp import SessionInfo, TcpIncoming
from support.fake_gpu import FAKE_CUDA_IPC
from support.transfer_peer import (
    FAKE_MOONCAKES,
    IN_PROCESS,
    End,
    PeerProcess,
    TensorBytes,
    close_quickly,
    digest,
    random_bytes,
    thread_states,
)

DEADLINE = 60.0
# Senders write into the peer's memory by themselves: a stopped peer is no obstacle.
ONE_SIDED = {"shm", "tcp-direct", "nixl", "cuda_ipc", FAKE_CUDA_IPC}
TOKEN = b"a token of the cluster"

# They move memory of GPUs only: tests/gpu has more of them.
ON_GPUS = (TransferBackend.NCCL, TransferBackend.CUDA_IPC)
BACKENDS = [
    IN_PROCESS,
    # The fake one has no peer: tests/unit/transfer/test_fake_transport.py.
    *USER_BACKENDS,
    FAKE_CUDA_IPC,
    *FAKE_MOONCAKES,
    *VARIANTS,
]


def library_of(backend):
    return "mooncake" if backend in FAKE_MOONCAKES else backend


def present(backend):
    library = VARIANTS[backend][0] if backend in VARIANTS else library_of(backend)
    if backend not in (FAKE_CUDA_IPC, IN_PROCESS) and (problem := missing(library)):
        pytest.skip(problem)
    return backend


def place(backend, number):
    """Where the memory of an end lies, counted from 0, of those that move a GPU's."""
    if backend not in ON_GPUS:
        return {}
    # NCCL requires one for each member of a group.
    gpu = number if backend == TransferBackend.NCCL else 0
    if gpu >= torch.cuda.device_count():
        pytest.skip(f"{backend} takes {gpu + 1} GPUs here, and there are {torch.cuda.device_count()}")
    return {"device": f"cuda:{gpu}"}


@pytest.fixture(params=BACKENDS)
def world(request):
    """Makes ends of one backend in this process, and closes them all."""
    backend = present(request.param)
    ends = []

    def end(*lengths, **options):
        ends.append(End(backend, lengths, **{"token": TOKEN, **place(backend, len(ends)), **options}))
        return ends[-1]

    end.backend = backend
    yield end
    close_quickly(ends)


def test_bytes_of_a_gpu_are_used_here_as_an_array_is():
    tensor = torch.zeros(10, dtype=torch.uint8)
    memory, array = TensorBytes(tensor), np.zeros(10, np.uint8)
    for bytes_ in (memory, array):
        bytes_[2:5] = 7
        bytes_[8] = 1
    assert tensor.tolist() == array.tolist()
    assert (memory == array).all()
    assert (memory[::-1] == array[::-1]).all()
    assert (memory.any(), memory[:2].any(), memory.size) == (True, False, 10)
    assert digest(memory) == digest(array)


def write(end, peer, copies):
    return end.transport.write(peer, copy_table(copies))


def fill(array, seed):
    array[:] = random_bytes(array.size, seed)


def test_contiguous_bytes_arrive_exactly_and_nothing_around_them_changes(world):
    src, dst = world(1000), world(1000)
    fill(src.memory[0], 1)
    ticket = write(src, dst.transport.open_session(), [(0, 100, 0, 300, 500)])
    assert src.outcome(ticket).state is WriteState.DONE
    assert (dst.memory[0][300:800] == src.memory[0][100:600]).all()
    assert not dst.memory[0][:300].any()
    assert not dst.memory[0][800:].any()


def test_ten_thousand_small_pages_scatter_over_several_regions(world):
    page, n = 48, 10_000
    src, dst = world(page * n, page * n), world(page * n, page * n)
    for i, m in enumerate(src.memory):
        fill(m, i)
    places = list(range(n))
    random.Random(0).shuffle(places)
    copies = [(i % 2, i * page, i % 2, places[i] * page, page) for i in range(n)]
    ticket = write(src, dst.transport.open_session(), copies)
    assert src.outcome(ticket).state is WriteState.DONE
    for i in range(n):
        target = dst.memory[i % 2][places[i] * page :][:page]
        assert (target == src.memory[i % 2][i * page :][:page]).all()


# The larger size is above the largest limit of any backend: `shm.SHARED_BYTES`, 128 MiB.
@pytest.mark.parametrize("n", [64 << 20, 160 << 20], ids=["64 MiB", "160 MiB"])
def test_one_large_write(world, n):
    if world.backend in (*FAKE_MOONCAKES, IN_PROCESS) and n > 64 << 20:
        pytest.skip("64 MiB take every path that it has")
    src, dst = world(n), world(n)
    fill(src.memory[0], 3)
    ticket = write(src, dst.transport.open_session(), [(0, 0, 0, 0, n)])
    assert src.outcome(ticket).state is WriteState.DONE
    assert (dst.memory[0] == src.memory[0]).all()


def test_many_writes_to_one_session_all_land_and_become_final_in_order(world):
    src, dst = world(200), world(200)
    fill(src.memory[0], 2)
    session = dst.transport.open_session()
    tickets = [write(src, session, [(0, i, 0, 199 - i, 1)]) for i in range(200)]
    assert src.outcome(tickets[-1]).state is WriteState.DONE
    assert all(src.transport.poll(t).state is WriteState.DONE for t in tickets[:-1])
    assert (dst.memory[0] == src.memory[0][::-1]).all()


def test_of_many_writes_a_refused_one_takes_no_other_along(world):
    src, dst = world(200), world(200)
    src.memory[0][:] = 1
    session = dst.transport.open_session()
    # Number 100 is behind the end.
    tickets = [write(src, session, [(0, i, 0, i if i != 100 else 200, 1)]) for i in range(200)]
    states = [src.outcome(ticket).state for ticket in tickets]
    assert [i for i, state in enumerate(states) if state is not WriteState.DONE] == [100]
    assert states[100] is WriteState.FAILED
    assert [i for i in range(200) if not dst.memory[0][i]] == [100]


def test_an_empty_write_and_an_empty_copy_are_done(world):
    src, dst = world(8), world(8)
    session = dst.transport.open_session()
    for copies in ([], [(0, 0, 0, 8, 0)]):
        assert src.outcome(write(src, session, copies)).state is WriteState.DONE


@pytest.mark.parametrize(
    "copy",
    [(0, 0, 0, 60, 8), (0, 0, 3, 0, 8), (0, 0, 0, 1 << 63, 8), (0, 0, 0, 65, 0)],
    ids=["over the end", "unknown region", "huge offset", "empty past the end"],
)
def test_a_target_outside_the_peers_memory_is_refused_and_touches_nothing(world, copy):
    src, dst = world(64), world(64)
    src.memory[0][:] = 7
    session = dst.transport.open_session()
    status = src.outcome(write(src, session, [(0, 0, 0, 0, 8), copy]))
    assert status.state is WriteState.FAILED
    assert "region" in status.error
    assert not dst.memory[0].any()
    again = src.outcome(write(src, session, [(0, 0, 0, 16, 8)]))
    assert again.state is WriteState.DONE


@pytest.mark.parametrize("copy", [(0, 60, 0, 0, 8), (2, 0, 0, 0, 8), (0, -1, 0, 0, 1)])
def test_a_source_outside_our_own_memory_is_an_error_at_once(world, copy):
    src, dst = world(64), world(64)
    with pytest.raises(ValueError, match="source of"):
        write(src, dst.transport.open_session(), [copy])


def test_two_peers_at_once_do_not_mix(world):
    n = 4 << 20
    one, two, dst = world(n), world(n), world(n, n)
    fill(one.memory[0], 1)
    fill(two.memory[0], 2)
    sessions = [dst.transport.open_session() for _ in range(2)]
    first = [write(one, sessions[0], [(0, 0, 0, 0, n)]) for _ in range(4)]
    second = [write(two, sessions[1], [(0, 0, 1, 0, n)]) for _ in range(4)]
    assert all(one.outcome(t).state is WriteState.DONE for t in first)
    assert all(two.outcome(t).state is WriteState.DONE for t in second)
    assert (dst.memory[0] == one.memory[0]).all()
    assert (dst.memory[1] == two.memory[0]).all()


def test_an_unknown_session_is_refused(world):
    src, dst = world(8), world(8)
    forged = PeerAddress("not-a-session", dst.transport.open_session().endpoint)
    status = src.outcome(write(src, forged, [(0, 0, 0, 0, 8)]))
    assert status.state is WriteState.FAILED
    assert "unknown" in status.error


@pytest.mark.parametrize("side", ["receiver", "sender"])
def test_after_a_drain_nothing_is_written_through_the_session(world, side):
    src, dst = world(1 << 20), world(1 << 20)
    session, other = dst.transport.open_session(), dst.transport.open_session()
    fill(src.memory[0], 5)
    assert src.outcome(write(src, session, [(0, 0, 0, 0, 1 << 20)])).state is WriteState.DONE
    (dst if side == "receiver" else src).transport.drain(session.session_id)
    dst.memory[0][:] = 0
    status = src.outcome(write(src, session, [(0, 0, 0, 0, 1 << 20)]))
    assert status.state in (WriteState.FAILED, WriteState.LOST)
    assert "drained" in status.error
    assert not dst.memory[0].any()
    assert src.outcome(write(src, other, [(0, 0, 0, 0, 1 << 20)])).state is WriteState.DONE


@pytest.mark.parametrize("side", ["receiver", "sender"])
def test_a_drain_in_the_middle_of_writes_makes_every_ticket_final_and_fences_the_memory(world, side):
    n = 32 << 20
    src, dst = world(n), world(n)
    src.memory[0][:] = 1
    session = dst.transport.open_session()
    tickets = [write(src, session, [(0, 0, 0, 0, n)]) for _ in range(8)]
    src.outcome(tickets.pop(0))
    if side == "sender":
        src.transport.drain(session.session_id)
    dst.transport.drain(session.session_id)
    until(lambda: dst.transport.is_fenced(session.session_id))
    dst.memory[0][:] = 0
    assert all(src.outcome(t).is_final for t in tickets)
    assert not dst.memory[0].any()


def test_a_closed_peer_fails_what_is_written_to_it(world):
    n = 32 << 20
    src, dst = world(n), world(n)
    session = dst.transport.open_session()
    tickets = [write(src, session, [(0, 0, 0, 0, n)]) for _ in range(8)]
    src.outcome(tickets.pop(0))
    dst.transport.close()
    tickets.append(write(src, session, [(0, 0, 0, 0, 8)]))
    final = [src.outcome(t) for t in tickets]
    assert final[-1].state in (WriteState.FAILED, WriteState.LOST)
    assert all(status.error for status in final if status.state is not WriteState.DONE)


def test_close_twice_and_polling_a_forgotten_ticket(world):
    src, dst = world(8), world(8)
    ticket = write(src, dst.transport.open_session(), [(0, 0, 0, 0, 8)])
    src.outcome(ticket)
    with pytest.raises(KeyError):
        src.transport.poll(ticket)
    src.transport.close()
    src.transport.close()


def test_a_wrong_token_keeps_everybody_out(world):
    if world.backend == IN_PROCESS:
        pytest.skip("it has no connections")
    src, dst = world(8, token=b"another token"), world(8)
    src.memory[0][:] = 1
    status = src.outcome(write(src, dst.transport.open_session(), [(0, 0, 0, 0, 8)]))
    assert status.state is WriteState.FAILED
    assert "token" in status.error
    assert not dst.memory[0].any()


def test_a_sender_without_the_token_is_turned_away_whatever_it_says(world):
    """It skips the check of the receiver's proof, as an attacker would."""
    if world.backend == IN_PROCESS:
        pytest.skip("it has no connections")
    dst = world(8)
    session = dst.transport.open_session()
    host, port = session.endpoint.rsplit(":", 1)
    with socket.create_connection((host, int(port)), timeout=DEADLINE) as stranger:
        name = session.session_id.encode()
        stranger.sendall(
            struct.pack("<4sH16sH", DATA_PROTOCOL.magic, DATA_PROTOCOL.version, bytes(16), len(name)) + name
        )
        stranger.recv(1000)
        stranger.sendall(bytes(32))
        with contextlib.suppress(ConnectionResetError):
            assert stranger.recv(100) == b""


def test_another_version_is_refused_and_both_are_named(world, monkeypatch):
    if world.backend == IN_PROCESS:
        pytest.skip("it has no connections")
    src, dst = world(8), world(8)
    session = dst.transport.open_session()
    host, port = session.endpoint.rsplit(":", 1)
    with socket.create_connection((host, int(port)), timeout=DEADLINE) as other:
        other.sendall(struct.pack("<4sH16sH", DATA_PROTOCOL.magic, 77, bytes(16), 0))
        magic, version = struct.unpack("<4sH", other.recv(6))
        assert (magic, version) == (DATA_PROTOCOL.magic, DATA_PROTOCOL.version)
    with OtherVersion() as receiver:
        status = src.outcome(write(src, receiver.address, [(0, 0, 0, 0, 8)]))
    assert status.state is WriteState.FAILED
    assert f"version {DATA_PROTOCOL.version} against 77" in status.error


class OtherVersion:
    """A receiver of data protocol version 77."""

    def __enter__(self):
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.address = PeerAddress("any", f"127.0.0.1:{self.socket.getsockname()[1]}")
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()
        return self

    def _run(self):
        connection, _ = self.socket.accept()
        with connection:
            connection.recv(4096)
            connection.sendall(struct.pack("<4sH16s32s", DATA_PROTOCOL.magic, 77, bytes(16), bytes(32)))

    def __exit__(self, *args):
        self.thread.join(DEADLINE)
        self.socket.close()


# -- the other end is a process ------------------------------------------------------------------------------------

N = 32 << 20
WHOLE = [(0, 0, 0, 0, N)]


# Seconds, for a machine that has much else to do. For a test that waits until they are over: fewer.
WRITE_TIMEOUT = 15.0
SHORT_WRITE_TIMEOUT = 0.5


@pytest.fixture
def write_timeout():
    return WRITE_TIMEOUT


@pytest.fixture(params=[b for b in BACKENDS if b != IN_PROCESS])
def pair(request, write_timeout):
    """An end here, and one in a process of its own."""
    backend = present(request.param)
    places = [place(backend, number) for number in range(2)]
    end = End(backend, [N], token=TOKEN, write_timeout=write_timeout, **places[0])
    # The peer of a pool on a fake GPU has one in the CPU's memory: the two need not be alike.
    with PeerProcess(library_of(backend), [N], token=TOKEN, **places[1]) as peer:
        yield end, peer
    end.close()


def end_of_begun(end, session, timeout=DEADLINE):
    """Write until a write is not DONE; that status."""
    limit = time.monotonic() + timeout
    while time.monotonic() < limit:
        status = end.outcome(write(end, session, WHOLE))
        if status.state is not WriteState.DONE:
            return status
    raise AssertionError("every write was done")


def test_bytes_reach_another_process(pair):
    here, there = pair
    session = there.open_session()
    fill(here.memory[0], 11)
    assert here.outcome(write(here, session, WHOLE)).state is WriteState.DONE
    assert there.ask("digest", region=0) == digest(here.memory[0])
    there.ask("fill", region=0, seed=12)
    state, error = there.ask("write", peer=here.transport.open_session(), copies=WHOLE)
    assert (state, error) == ("DONE", None)
    assert there.ask("digest", region=0) == digest(here.memory[0])


def test_between_writes_no_thread_of_either_side_is_awake(pair):
    """A library's own thread may look for work all the time: a core of the worker, for nothing."""
    here, there = pair
    session = there.open_session()
    assert here.outcome(write(here, session, WHOLE)).state is WriteState.DONE

    def all_sleep(pid):
        return thread_states(pid).count("R") <= (pid == os.getpid())

    # One that turns round may be seen asleep once.
    until(lambda: all(all_sleep(pid) for pid in [there.pid, os.getpid()] * 50))


def test_a_receiver_killed_in_the_middle_makes_every_ticket_final(pair):
    here, there = pair
    session = there.open_session()
    assert here.outcome(write(here, session, WHOLE)).state is WriteState.DONE
    tickets = [write(here, session, WHOLE) for _ in range(16)]
    there.kill()
    states = [here.outcome(t) for t in tickets]
    assert all(s.is_final for s in states)
    last = here.outcome(write(here, session, WHOLE))
    assert last.state is not WriteState.DONE
    assert last.error


def begin_writing_here(here, there):
    """A session of ours, through which the process writes for ever; its first bytes have landed."""
    session = here.transport.open_session()
    there.ask("set", region=0, value=7)
    there.ask("write_for_ever", peer=session, copies=WHOLE)
    until(lambda: here.memory[0].any())
    return session


def test_a_sender_killed_in_the_middle_leaves_a_session_that_can_be_fenced(pair):
    here, there = pair
    session = begin_writing_here(here, there)
    there.kill()
    here.transport.drain(session.session_id)
    until(lambda: here.transport.is_fenced(session.session_id))


@pytest.mark.parametrize("write_timeout", [SHORT_WRITE_TIMEOUT])
def test_a_stopped_receiver_costs_at_most_the_deadline_of_a_write(pair):
    here, there = pair
    session = there.open_session()
    # A small one. On a busy machine it may miss the short deadline.
    until(lambda: here.outcome(write(here, session, [(0, 0, 0, 0, 4096)])).state is WriteState.DONE)
    there.stop()
    fill(here.memory[0], 21)
    status = here.outcome(write(here, session, WHOLE), timeout=DEADLINE)
    there.go_on()
    # If the sender itself writes into shared memory, a stopped receiver is no obstacle. Other backends cannot decide.
    if status.state is WriteState.DONE:
        assert library_of(here.backend) in ONE_SIDED
        assert there.ask("digest", region=0) == digest(here.memory[0])
    else:
        assert status.error


def test_a_sender_stopped_in_the_middle_cannot_write_after_the_fence(pair):
    here, there = pair
    session = begin_writing_here(here, there)
    there.stop()
    here.transport.drain(session.session_id)
    if not here.transport.is_fenced(session.session_id):
        # It was stopped inside a write to shared memory: the session is fenced when that write ends.
        there.go_on()
        until(lambda: here.transport.is_fenced(session.session_id))
    here.memory[0][:] = 0
    there.go_on()
    # The sender's loop ends by itself: its writes fail.
    assert there.ask("have_writes_ended", timeout=DEADLINE)
    assert not here.memory[0].any()


def test_a_stopped_peer_delays_no_other_and_writes_end_out_of_order(pair):
    here, stopped = pair
    backend = library_of(here.backend)
    with PeerProcess(backend, [N], token=TOKEN, **place(backend, 2)) as healthy:
        first, second = stopped.open_session(), healthy.open_session()
        for session in (first, second):
            assert here.outcome(write(here, session, WHOLE)).state is WriteState.DONE
        stopped.stop()
        early = [write(here, first, WHOLE) for _ in range(4)]
        late = [write(here, second, WHOLE) for _ in range(4)]
        assert all(here.outcome(t).state is WriteState.DONE for t in reversed(late))
        still_pending = [here.transport.poll(t).state is WriteState.PENDING for t in early[-1:]]
        stopped.go_on()
        # Shared memory takes writes of a stopped process as well; everything else waits for it.
        assert still_pending == [True] or backend in ONE_SIDED
        stopped.kill()


def until(is_true):
    limit = time.monotonic() + DEADLINE
    while not is_true():
        assert time.monotonic() < limit, "it never became true"
        time.sleep(0.001)


# -- what only sockets can suffer ---------------------------------------------------------------------------------


def let_in(connection):
    """The receiver's part of the hello, for an empty token."""
    handshake = ResponderHandshake(DATA_PROTOCOL, b"")
    while not handshake.is_over:
        connection.sendall(handshake.feed(connection.recv(handshake.wanted)))
    session_info = msgspec.msgpack.encode(SessionInfo([1 << 30]))
    connection.sendall(struct.pack("<II", 0, len(session_info)) + session_info)


class MutePeer:
    """Accepts connections and any session, then sends nothing and, if so ordered, reads nothing."""

    def __init__(self):
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.accepted = []
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self):
        while True:
            try:
                connection, _ = self.socket.accept()
            except OSError:
                return
            self.accepted.append(connection)
            let_in(connection)

    def address(self):
        return PeerAddress("any", f"127.0.0.1:{self.socket.getsockname()[1]}")

    def close(self):
        self.socket.shutdown(socket.SHUT_RDWR)
        self.thread.join()
        for connection in [*self.accepted, self.socket]:
            connection.close()


@pytest.fixture
def pair_of_sockets():
    pair = socket.socketpair()
    yield pair
    for sock in pair:
        sock.close()


@pytest.fixture
def mute():
    peer = MutePeer()
    yield peer
    peer.close()


@pytest.fixture
def tcp():
    ends = []

    def end(*lengths, **options):
        ends.append(End("tcp", lengths, **options))
        return ends[-1]

    yield end
    for e in ends:
        e.close()


@pytest.mark.parametrize("length", [8, 64 << 20], ids=["never acknowledged", "never read"])
def test_a_peer_that_stops_runs_into_the_deadline_of_the_write(tcp, mute, length):
    src = tcp(length, write_timeout=0.3)
    status = src.outcome(write(src, mute.address(), [(0, 0, 0, 0, length)]))
    assert status.state is WriteState.LOST
    assert "within 0.3 s" in status.error


def test_a_sender_that_waits_for_room_hears_of_a_drain_at_once(tcp, monkeypatch):
    """Reading after a shutdown makes no room: the kernel would let the sender probe for room for a minute."""
    n = 64 << 20
    src, dst = tcp(n), tcp(n)
    session, receive = dst.transport.open_session(), tcp_backend.receive_copies

    def receive_once_shut(sock, *args):
        poller = select.poll()
        poller.register(sock, select.POLLRDHUP)
        assert poller.poll(DEADLINE * 1000)
        receive(sock, *args)

    def is_asking_for_room():
        """Return whether the kernel has found all room taken, and has probed since (`tcpi_backoff`)."""
        outgoing = src.transport._senders[session.session_id]._socket
        return outgoing is not None and outgoing.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 8)[4] > 0

    monkeypatch.setattr(tcp_backend, "receive_copies", receive_once_shut)
    ticket = write(src, session, [(0, 0, 0, 0, n)])
    until(is_asking_for_room)
    dst.transport.drain(session.session_id)
    assert src.outcome(ticket, timeout=DEADLINE).state is WriteState.LOST


def test_a_full_queue_says_so_and_a_drain_empties_it(tcp, mute):
    src = tcp(8)
    tickets = []

    def write_until_refused():
        # Beside those that wait, each batch in flight may have as many, if the sending thread begins late.
        for _ in range((1 + MAX_UNPROVEN_WRITES) * MAX_PENDING_WRITES + 1):
            tickets.append(write(src, mute.address(), [(0, 0, 0, 0, 8)]))

    with pytest.raises(CapacityError):
        write_until_refused()
    src.transport.drain("any")
    states = [src.outcome(t).state for t in tickets]
    # Some were in flight together. Those behind them were never sent.
    assert set(states) <= {WriteState.FAILED, WriteState.LOST}
    assert states[-1] is WriteState.FAILED


def test_nobody_listening_fails_with_the_address(tcp):
    src = tcp(8)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    status = src.outcome(write(src, PeerAddress("s", f"127.0.0.1:{port}"), [(0, 0, 0, 0, 8)]))
    assert status.state is WriteState.FAILED
    assert str(port) in status.error


def test_a_stranger_that_talks_nonsense_is_cut_off_and_harms_nobody(tcp):
    src, dst = tcp(8), tcp(8)
    session = dst.transport.open_session()
    host, port = session.endpoint.split(":")
    with socket.create_connection((host, int(port)), timeout=DEADLINE) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        with contextlib.suppress(ConnectionResetError):
            assert stranger.recv(100) == b""
    assert src.outcome(write(src, session, [(0, 0, 0, 0, 8)])).state is WriteState.DONE


def test_a_stranger_that_says_a_byte_at_a_time_has_no_longer_than_another(pair_of_sockets):
    ours, theirs = pair_of_sockets
    theirs.sendall(b"S")
    with pytest.raises(TimeoutError, match=r"over 0\.05 s"):
        sockets.receive_exactly(ours, 2, Deadline(0.05))


def test_a_system_without_threads_costs_the_connections_of_that_moment_only(tcp, monkeypatch):
    src, dst = tcp(8), tcp(8)
    start, failures = listener.PeerConnection.start, iter([RuntimeError("can't start new thread")])

    def start_later(connection):
        if error := next(failures, None):
            raise error
        start(connection)

    monkeypatch.setattr(listener.PeerConnection, "start", start_later)
    session = dst.transport.open_session()
    # The sender's next handshake finds a thread.
    assert src.outcome(write(src, session, [(0, 0, 0, 0, 8)])).state is WriteState.DONE


def test_a_listener_that_cannot_accept_a_connection_waits_before_it_retries_unless_it_closes(monkeypatch):
    class Exhausted:
        def __init__(self, sock):
            self.sock, self.tries = sock, 0

        def accept(self):
            self.tries += 1
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

        def __getattr__(self, name):
            return getattr(self.sock, name)

    create = socket.create_server
    monkeypatch.setattr(socket, "create_server", lambda *args, **options: Exhausted(create(*args, **options)))
    monkeypatch.setattr(listener, "_PAUSE_SECONDS", 3600.0)
    here = listener.DataListener("127.0.0.1", b"")
    host, port = here.endpoint.split(":")
    waiting = socket.create_connection((host, int(port)))
    until(lambda: here._socket.tries)
    closer = threading.Thread(target=here.close)
    closer.start()
    closer.join(DEADLINE)
    waiting.close()
    assert not closer.is_alive()
    assert here._socket.tries == 1


def test_a_drain_does_not_wait_for_a_receiver_that_lets_nobody_in(tcp):
    """A stopped process accepts connections, because its kernel does, and sends nothing."""
    src = tcp(8, connect_timeout=3600.0)
    with socket.create_server(("127.0.0.1", 0)) as stopped:
        peer = PeerAddress("any", f"127.0.0.1:{stopped.getsockname()[1]}")
        ticket = write(src, peer, [(0, 0, 0, 0, 8)])
        with stopped.accept()[0] as connection:
            # The hello: from here on the sender waits for an answer.
            assert connection.recv(100)
            drain = threading.Thread(target=src.transport.drain, args=(peer.session_id,), daemon=True)
            drain.start()
            drain.join(DEADLINE)
            assert not drain.is_alive()
    status = src.outcome(ticket)
    assert status.state is WriteState.FAILED
    assert "was drained" in status.error


def test_a_network_that_cannot_be_reached_is_named(monkeypatch):
    monkeypatch.setattr(socket.socket, "connect_ex", lambda sock, address: errno.ENETUNREACH)
    with pytest.raises(OSError, match=r"192\.0\.2\.1:9: Network is unreachable"):
        sockets.connect("192.0.2.1:9", Deadline(DEADLINE), lambda: False)


def test_a_session_is_not_fenced_while_its_connection_is_being_ended(tcp, monkeypatch):
    src, dst = tcp(8), tcp(8)
    session, during = dst.transport.open_session(), []
    assert src.outcome(write(src, session, [(0, 0, 0, 0, 8)])).state is WriteState.DONE
    stop = listener.PeerConnection.stop

    def look_and_stop(connection):
        during.append(dst.transport.is_fenced(session.session_id))
        stop(connection)

    monkeypatch.setattr(listener.PeerConnection, "stop", look_and_stop)
    dst.transport.drain(session.session_id)
    assert during == [False]
    assert dst.transport.is_fenced(session.session_id)


def test_a_session_whose_end_fails_half_way_is_fenced_when_nobody_can_write(tcp, monkeypatch):
    def fail(incoming):
        raise RuntimeError("not today")

    dst = tcp(8)
    session = dst.transport.open_session()
    monkeypatch.setattr(TcpIncoming, "revoke", fail)
    with pytest.raises(RuntimeError, match="not today"):
        dst.transport.drain(session.session_id)
    assert dst.transport.is_fenced(session.session_id)


def test_a_broken_connection_is_made_anew_for_the_next_write(tcp):
    src, dst = tcp(8), tcp(8)
    session = dst.transport.open_session()
    assert src.outcome(write(src, session, [(0, 0, 0, 0, 8)])).state is WriteState.DONE
    for connection in dst.transport._listener.connections:
        connection.stop()
    assert src.outcome(write(src, session, [(0, 0, 0, 0, 8)])).state is WriteState.DONE


def test_an_unknown_option_is_refused_with_those_there_are():
    with pytest.raises(ConfigError, match="'tcp' has no option 'device': it takes direct"):
        create_transport("tcp", TransportOptions(extra={"device": "mlx5_0"}))


def test_options_are_checked_before_anything_starts():
    check_options("shm", {"threads": "2"})
    with pytest.raises(ConfigError, match="threads=two: a number"):
        check_options("shm", {"threads": "two"})


def test_an_unknown_backend_names_those_there_are():
    with pytest.raises(ConfigError, match="fake, tcp"):
        create_transport("carrier-pigeon", TransportOptions())
