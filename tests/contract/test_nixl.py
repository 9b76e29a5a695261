"""What is particular to NIXL: pieces of any shape, links with and without the gate, peers that come again."""

import random
import time

import numpy as np
import pytest

from splitserve.disaggregation.copies import copy_table
from splitserve.disaggregation.transports import TransferBackend, create_transport, missing
from splitserve.disaggregation.transports.base import TransportOptions, WriteState
from splitserve.errors import ConfigError
from splitserve.testing.transfer_peer import End, PeerProcess

if problem := missing(TransferBackend.NIXL):
    pytest.skip(problem, allow_module_level=True)

from splitserve.disaggregation.transports import nixl

DEADLINE = 20.0
N = 8 << 20
WHOLE = [(0, 0, 0, 0, N)]


@pytest.fixture
def world():
    """Makes ends in this process, and closes them all."""
    ends = []

    def end(*lengths, **options):
        ends.append(End("nixl", lengths, **options))
        return ends[-1]

    yield end
    for e in ends:
        e.close()


@pytest.fixture
def far_away(monkeypatch):
    """Receivers of this process say that they run on another machine: no gate, and no link inside the host."""
    monkeypatch.setattr(nixl, "boot_id", lambda: "another machine")


def write(end, peer, copies):
    return end.outcome(end.transport.write(peer, copy_table(copies)))


def test_pieces_of_many_sizes_in_any_order_arrive_exactly(world):
    src, dst = world(1 << 16, 1 << 16), world(1 << 16, 1 << 16)
    rng = random.Random(5)
    for m in src.memory:
        m[:] = np.frombuffer(rng.randbytes(m.size), dtype=np.uint8)
    session = dst.transport.open_session()
    for size in (1, 16, 64, 100, 1000, 4096, 5000, 7, 3, 11, 16):
        copies = [
            (
                i % 2,
                rng.randrange(4) * size * (i % 3 + 1),
                (i + 1) % 2,
                2 * i * size,
                size * (1 + i % 2 * (size == 100)),
            )
            for i in range(6)
        ]
        assert write(src, session, copies).state is WriteState.DONE
        for src_region, src_offset, dst_region, dst_offset, length in copies:
            there = dst.memory[dst_region][dst_offset:][:length]
            assert (there == src.memory[src_region][src_offset:][:length]).all()


def test_a_peer_is_added_anew_after_its_connection_broke(world):
    src, dst = world(N), world(N)
    session = dst.transport.open_session()
    assert write(src, session, WHOLE).state is WriteState.DONE
    for guest in list(dst.transport._door._guests):
        guest.stop()
    src.memory[0][:] = 5
    assert write(src, session, WHOLE).state is WriteState.DONE
    assert (dst.memory[0] == 5).all()


def test_two_senders_one_after_another_write_through_one_session(world):
    one, two, dst = world(N), world(N), world(N)
    session = dst.transport.open_session()
    for value, sender in ((1, one), (2, two), (3, one)):
        sender.memory[0][:] = value
        assert write(sender, session, WHOLE).state is WriteState.DONE
        assert (dst.memory[0] == value).all()


def test_without_the_gate_a_stopped_sender_is_fenced_at_once(world, far_away):
    here = world(N)
    with PeerProcess("nixl", [N]) as there:
        session = here.transport.open_session()
        there.ask("set", region=0, value=7)
        there.ask("write_for_ever", peer=[session.session_id, session.endpoint], copies=WHOLE)
        until(lambda: here.memory[0].all())
        there.stop()
        here.transport.drain(session.session_id)
        assert here.transport.is_fenced(session.session_id)
        here.memory[0][:] = 0
        there.go_on()
        there.answer()
        assert not here.memory[0].any()


def test_without_the_gate_a_stopped_receiver_costs_at_most_the_deadline(world, monkeypatch):
    here = world(N, write_timeout=4.0)
    with PeerProcess("nixl", [N]) as there:
        monkeypatch.setattr(nixl, "boot_id", lambda: "another machine")
        session = there.open_session()
        assert write(here, session, WHOLE).state is WriteState.DONE
        there.stop()
        status = write(here, session, WHOLE)
        there.go_on()
        assert status.state is WriteState.LOST
        assert "within 4 s" in status.error


def test_settings_that_keep_the_links_of_the_host_are_refused_where_the_gate_is_out_of_reach(world, monkeypatch):
    def no_access(fd):
        raise PermissionError("not your file")

    monkeypatch.setattr(nixl, "GateKey", no_access)
    monkeypatch.setenv("UCX_TLS", "all")
    src, dst = world(8), world(8)
    src.memory[0][:] = 1
    status = write(src, dst.transport.open_session(), [(0, 0, 0, 0, 8)])
    assert status.state is WriteState.FAILED
    assert "unset UCX_TLS" in status.error
    assert not dst.memory[0].any()


def test_a_library_that_cannot_start_is_an_error_of_the_configuration(monkeypatch):
    def no_plugins(name, config):
        raise RuntimeError("no plugins")

    monkeypatch.setattr(nixl.library, "nixl_agent", no_plugins)
    with pytest.raises(ConfigError, match="no plugins"):
        create_transport("nixl", TransportOptions())


def until(is_true):
    limit = time.monotonic() + DEADLINE
    while not is_true():
        assert time.monotonic() < limit, "it never became true"
        time.sleep(0.001)
