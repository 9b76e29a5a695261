"""One contract, every transport: what `transports/base.py` promises, with real memory on both sides."""

import contextlib
import random
import socket
import threading
import time

import numpy as np
import pytest

from splitserve.core.layout import Copy, Region
from splitserve.disaggregation.transports import TransferBackend, create_transport
from splitserve.disaggregation.transports.base import PeerAddress, WriteState
from splitserve.disaggregation.transports.fake import FakeNetwork, FakeTransport
from splitserve.disaggregation.transports.tcp import MAX_PENDING_WRITES, TcpTransport
from splitserve.errors import CapacityError, ConfigError

DEADLINE = 20.0


class End:
    """A transport with its own memory, and an event that its progress sets."""

    def __init__(self, make, *lengths, **options):
        self.memory = [np.zeros(n, dtype=np.uint8) for n in lengths]
        self.progress = threading.Event()
        self.transport = make(on_progress=self.progress.set, **options)
        self.transport.register([Region(m.ctypes.data, m.nbytes) for m in self.memory])

    def outcome(self, ticket):
        """The ticket's final status."""
        end = time.monotonic() + DEADLINE
        while time.monotonic() < end:
            self.progress.clear()
            status = self.transport.poll(ticket)
            if status.is_final:
                return status
            self.progress.wait(end - time.monotonic())
        raise AssertionError("the write did not end")


@pytest.fixture(params=[TransferBackend.TCP, TransferBackend.FAKE])
def world(request):
    """Makes ends of one backend, and closes them all."""
    network = FakeNetwork()
    ends = []

    def make(**options):
        if request.param is TransferBackend.FAKE:
            return FakeTransport(network, **options)
        return TcpTransport("127.0.0.1", **options)

    def end(*lengths, **options):
        ends.append(End(make, *lengths, **options))
        return ends[-1]

    yield end
    for e in ends:
        e.transport.close()


def fill(array, seed):
    array[:] = np.random.default_rng(seed).integers(0, 256, array.size, dtype=np.uint8)


def test_contiguous_bytes_arrive_exactly_and_nothing_around_them_changes(world):
    src, dst = world(1000), world(1000)
    fill(src.memory[0], 1)
    ticket = src.transport.write(dst.transport.open_session(), [Copy(0, 100, 0, 300, 500)])
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
    copies = [Copy(i % 2, i * page, i % 2, places[i] * page, page) for i in range(n)]
    ticket = src.transport.write(dst.transport.open_session(), copies)
    assert src.outcome(ticket).state is WriteState.DONE
    for i in range(n):
        target = dst.memory[i % 2][places[i] * page :][:page]
        assert (target == src.memory[i % 2][i * page :][:page]).all()


def test_a_write_of_64_mib(world):
    n = 64 << 20
    src, dst = world(n), world(n)
    fill(src.memory[0], 3)
    ticket = src.transport.write(dst.transport.open_session(), [Copy(0, 0, 0, 0, n)])
    assert src.outcome(ticket).state is WriteState.DONE
    assert (dst.memory[0] == src.memory[0]).all()


def test_writes_to_one_session_land_in_order(world):
    src, dst = world(200), world(1)
    src.memory[0][:] = np.arange(200)
    session = dst.transport.open_session()
    tickets = [src.transport.write(session, [Copy(0, i, 0, 0, 1)]) for i in range(200)]
    assert all(src.outcome(t).state is WriteState.DONE for t in tickets)
    assert dst.memory[0][0] == 199


def test_an_empty_write_and_an_empty_copy_are_done(world):
    src, dst = world(8), world(8)
    session = dst.transport.open_session()
    for copies in ([], [Copy(0, 0, 0, 8, 0)]):
        assert src.outcome(src.transport.write(session, copies)).state is WriteState.DONE


@pytest.mark.parametrize(
    "copy",
    [Copy(0, 0, 0, 60, 8), Copy(0, 0, 3, 0, 8), Copy(0, 0, 0, 1 << 63, 8), Copy(0, 0, 0, 65, 0)],
    ids=["over the end", "unknown region", "huge offset", "empty past the end"],
)
def test_a_target_outside_the_peers_memory_is_refused_and_touches_nothing(world, copy):
    src, dst = world(64), world(64)
    src.memory[0][:] = 7
    session = dst.transport.open_session()
    status = src.outcome(src.transport.write(session, [Copy(0, 0, 0, 0, 8), copy]))
    assert status.state is WriteState.FAILED
    assert "region" in status.error
    assert not dst.memory[0].any()
    again = src.outcome(src.transport.write(session, [Copy(0, 0, 0, 16, 8)]))
    assert again.state is WriteState.DONE


@pytest.mark.parametrize("copy", [Copy(0, 60, 0, 0, 8), Copy(2, 0, 0, 0, 8), Copy(0, -1, 0, 0, 1)])
def test_a_source_outside_our_own_memory_is_an_error_at_once(world, copy):
    src, dst = world(64), world(64)
    with pytest.raises(ValueError, match="source of"):
        src.transport.write(dst.transport.open_session(), [copy])


def test_two_peers_at_once_do_not_mix(world):
    n = 4 << 20
    one, two, dst = world(n), world(n), world(n, n)
    fill(one.memory[0], 1)
    fill(two.memory[0], 2)
    sessions = [dst.transport.open_session() for _ in range(2)]
    first = [one.transport.write(sessions[0], [Copy(0, 0, 0, 0, n)]) for _ in range(4)]
    second = [two.transport.write(sessions[1], [Copy(0, 0, 1, 0, n)]) for _ in range(4)]
    assert all(one.outcome(t).state is WriteState.DONE for t in first)
    assert all(two.outcome(t).state is WriteState.DONE for t in second)
    assert (dst.memory[0] == one.memory[0]).all()
    assert (dst.memory[1] == two.memory[0]).all()


def test_an_unknown_session_is_refused(world):
    src, dst = world(8), world(8)
    forged = PeerAddress("not-a-session", dst.transport.open_session().endpoint)
    status = src.outcome(src.transport.write(forged, [Copy(0, 0, 0, 0, 8)]))
    assert status.state is WriteState.FAILED
    assert "unknown" in status.error


@pytest.mark.parametrize("side", ["receiver", "sender"])
def test_after_a_drain_nothing_is_written_through_the_session(world, side):
    src, dst = world(1 << 20), world(1 << 20)
    session, other = dst.transport.open_session(), dst.transport.open_session()
    fill(src.memory[0], 5)
    assert src.outcome(src.transport.write(session, [Copy(0, 0, 0, 0, 1 << 20)])).state is WriteState.DONE
    (dst if side == "receiver" else src).transport.drain(session.session_id)
    dst.memory[0][:] = 0
    status = src.outcome(src.transport.write(session, [Copy(0, 0, 0, 0, 1 << 20)]))
    assert status.state in (WriteState.FAILED, WriteState.LOST)
    assert "drained" in status.error
    assert not dst.memory[0].any()
    assert src.outcome(src.transport.write(other, [Copy(0, 0, 0, 0, 1 << 20)])).state is WriteState.DONE


@pytest.mark.parametrize("side", ["receiver", "sender"])
def test_a_drain_in_the_middle_of_writes_makes_every_ticket_final_and_fences_the_memory(world, side):
    n = 32 << 20
    src, dst = world(n), world(n)
    src.memory[0][:] = 1
    session = dst.transport.open_session()
    tickets = [src.transport.write(session, [Copy(0, 0, 0, 0, n)]) for _ in range(8)]
    src.outcome(tickets.pop(0))
    if side == "sender":
        src.transport.drain(session.session_id)
    dst.transport.drain(session.session_id)
    dst.memory[0][:] = 0
    assert all(src.outcome(t).is_final for t in tickets)
    assert not dst.memory[0].any()


def test_a_closed_peer_fails_what_is_written_to_it(world):
    n = 32 << 20
    src, dst = world(n), world(n)
    session = dst.transport.open_session()
    tickets = [src.transport.write(session, [Copy(0, 0, 0, 0, n)]) for _ in range(8)]
    src.outcome(tickets.pop(0))
    dst.transport.close()
    tickets.append(src.transport.write(session, [Copy(0, 0, 0, 0, 8)]))
    final = [src.outcome(t) for t in tickets]
    assert final[-1].state in (WriteState.FAILED, WriteState.LOST)
    assert all(status.error for status in final if status.state is not WriteState.DONE)


def test_close_twice_and_polling_a_forgotten_ticket(world):
    src, dst = world(8), world(8)
    ticket = src.transport.write(dst.transport.open_session(), [Copy(0, 0, 0, 0, 8)])
    src.outcome(ticket)
    with pytest.raises(KeyError):
        src.transport.poll(ticket)
    src.transport.close()
    src.transport.close()


# -- what only sockets can suffer ---------------------------------------------------------------------------------


class MutePeer:
    """Accepts connections and welcomes any session, then says nothing and, where told so, reads nothing."""

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
            connection.recv(4096)
            connection.sendall(b"SSKV" + b"\xff" * 8 + b"\0\0")

    def address(self):
        return PeerAddress("any", f"127.0.0.1:{self.socket.getsockname()[1]}")

    def close(self):
        self.socket.shutdown(socket.SHUT_RDWR)
        self.thread.join()
        for connection in [*self.accepted, self.socket]:
            connection.close()


@pytest.fixture
def mute():
    peer = MutePeer()
    yield peer
    peer.close()


@pytest.fixture
def tcp():
    ends = []

    def end(*lengths, **options):
        ends.append(End(lambda **o: TcpTransport("127.0.0.1", **o), *lengths, **options))
        return ends[-1]

    yield end
    for e in ends:
        e.transport.close()


@pytest.mark.parametrize("length", [8, 64 << 20], ids=["never acknowledged", "never read"])
def test_a_peer_that_stops_runs_into_the_deadline_of_the_write(tcp, mute, length):
    src = tcp(length, write_timeout=0.3)
    status = src.outcome(src.transport.write(mute.address(), [Copy(0, 0, 0, 0, length)]))
    assert status.state is WriteState.LOST
    assert "within 0.3 s" in status.error


def test_a_full_queue_says_so_and_a_drain_empties_it(tcp, mute):
    src = tcp(8)
    tickets = []

    def write_until_refused():
        for _ in range(MAX_PENDING_WRITES + 2):
            tickets.append(src.transport.write(mute.address(), [Copy(0, 0, 0, 0, 8)]))

    with pytest.raises(CapacityError):
        write_until_refused()
    src.transport.drain("any")
    states = [src.outcome(t).state for t in tickets]
    assert set(states) <= {WriteState.FAILED, WriteState.LOST}
    assert states.count(WriteState.LOST) <= 1


def test_nobody_listening_fails_with_the_address(tcp):
    src = tcp(8)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    status = src.outcome(src.transport.write(PeerAddress("s", f"127.0.0.1:{port}"), [Copy(0, 0, 0, 0, 8)]))
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
    assert src.outcome(src.transport.write(session, [Copy(0, 0, 0, 0, 8)])).state is WriteState.DONE


def test_a_broken_connection_is_made_anew_for_the_next_write(tcp):
    src, dst = tcp(8), tcp(8)
    session = dst.transport.open_session()
    assert src.outcome(src.transport.write(session, [Copy(0, 0, 0, 0, 8)])).state is WriteState.DONE
    for incoming in dst.transport._listener._sessions.values():
        incoming.stop()
    assert src.outcome(src.transport.write(session, [Copy(0, 0, 0, 0, 8)])).state is WriteState.DONE


def test_an_unknown_backend_names_those_there_are():
    with pytest.raises(ConfigError, match="fake, tcp"):
        create_transport("carrier-pigeon", host="127.0.0.1")
