"""Mooncake from pool to pool, beyond the contract of transports: what is registered, its fence, and its options."""

import time

import numpy as np
import pytest

from splitserve.core.errors import ConfigError
from splitserve.transfer.copies import copy_table
from splitserve.transfer.state import KVPoll
from splitserve.transfer.transports import create_transport, missing
from splitserve.transfer.transports.base import TransportOptions, WriteState
from support.kv_world import KVWorld
from support.transfer_peer import End, close_quickly

if problem := missing("mooncake"):
    pytest.skip(problem, allow_module_level=True)

from splitserve.transfer.transports import mooncake, mooncake_ends
from splitserve.transfer.transports.mooncake_direct import PIECE_BYTES, PROBE_BYTES, WINDOW
from splitserve.transfer.transports.mooncake_engine import MooncakeError, MooncakeTransferEngine
from splitserve.transfer.transports.staging import ProcessStaging

N = 1 << 20
WHOLE = [(0, 0, 0, 0, N)]


@pytest.fixture
def make():
    ends = []

    def end(backend="mooncake-direct", length=N):
        ends.append(End(backend, [length]))
        return ends[-1]

    yield end
    close_quickly(ends)


def outcome(src, session, copies=WHOLE):
    return src.outcome(src.transport.write(session, copy_table(copies)))


def test_pages_go_from_pool_to_pool_and_no_buffer_lies_between(make, monkeypatch):
    src, dst = make(), make()
    submitted, sizes = [], []
    submit, init = MooncakeTransferEngine.submit, ProcessStaging.__init__

    def noting(self, session_id, buffer, peer_address, length):
        submitted.append((buffer, peer_address, length))
        return submit(self, session_id, buffer, peer_address, length)

    def noting_size(self, num_slots, slot_bytes):
        sizes.append(num_slots * slot_bytes)
        init(self, num_slots, slot_bytes)

    monkeypatch.setattr(MooncakeTransferEngine, "submit", noting)
    monkeypatch.setattr(ProcessStaging, "__init__", noting_size)
    assert outcome(src, dst.transport.open_session()).state is WriteState.DONE
    assert submitted == [(src.memory[0].ctypes.data, dst.memory[0].ctypes.data, N)]
    assert set(sizes) == {PROBE_BYTES}


def test_adjacent_copies_are_joined_and_long_ones_are_split(make, monkeypatch):
    src, dst = make(length=4 * PIECE_BYTES), make(length=4 * PIECE_BYTES)
    src.memory[0][:] = np.arange(4 * PIECE_BYTES) % 251
    lengths, submit = [], MooncakeTransferEngine.submit

    def noting(self, session_id, buffer, peer_address, length):
        lengths.append(length)
        return submit(self, session_id, buffer, peer_address, length)

    monkeypatch.setattr(MooncakeTransferEngine, "submit", noting)
    half = 2 * PIECE_BYTES + 10
    copies = [(0, 0, 0, 0, half), (0, half, 0, half, 100)]
    assert outcome(src, dst.transport.open_session(), copies).state is WriteState.DONE
    assert lengths == [PIECE_BYTES, PIECE_BYTES, 110]
    assert (dst.memory[0][: half + 100] == src.memory[0][: half + 100]).all()
    assert not dst.memory[0][half + 100 :].any()


def test_few_pieces_are_in_flight_at_once(make, monkeypatch):
    src, dst = make(), make()
    in_flight, most = set(), []
    submit, is_done = MooncakeTransferEngine.submit, MooncakeTransferEngine.is_done

    def noting(self, *args):
        transfer = submit(self, *args)
        in_flight.add(transfer.id)
        most.append(len(in_flight))
        return transfer

    def ended(self, transfer):
        is_over = is_done(self, transfer)
        if is_over:
            in_flight.discard(transfer.id)
        return is_over

    monkeypatch.setattr(MooncakeTransferEngine, "submit", noting)
    monkeypatch.setattr(MooncakeTransferEngine, "is_done", ended)
    # Every second piece, so none is joined to the next.
    copies = [(0, i * 512, 0, i * 512, 256) for i in range(N // 512)]
    assert outcome(src, dst.transport.open_session(), copies).state is WriteState.DONE
    assert len(most) == N // 512
    assert max(most) <= WINDOW


def late_write(src, dst, session_id):
    """Write into all of `dst` by an engine of the session, as a peer does that did not receive its end."""
    engine = MooncakeTransferEngine("127.0.0.1")
    engine.initialize()
    try:
        engine.transfer_sync(session_id, src.memory[0].ctypes.data, dst.memory[0].ctypes.data, N)
    finally:
        engine.destroy()


def test_pages_stay_in_quarantine_until_the_engine_that_can_write_them_is_gone(make):
    src, dst = make(), make()
    src.memory[0][:] = 7
    session = dst.transport.open_session()
    assert outcome(src, session).state is WriteState.DONE
    engine = dst.transport._listener._sessions[session.session_id].incoming._own
    # As if a thread were inside the library.
    name, inside = engine.get_session_id(), engine._engine
    dst.memory[0][:] = 0
    dst.transport.drain(session.session_id)
    late_write(src, dst, name)
    # The late write changed pages that are not free: the session is not fenced.
    assert dst.memory[0].all()
    assert not dst.transport.is_fenced(session.session_id)
    del inside
    assert dst.transport.is_fenced(session.session_id)
    # The pages' new owner.
    dst.memory[0][:] = 0
    with pytest.raises(MooncakeError):
        late_write(src, dst, name)
    assert not dst.memory[0].any()


def test_a_lost_prefill_worker_leaves_pages_on_loan_until_the_engine_is_gone(monkeypatch):
    # The pages of this world are small: send none over the connection.
    monkeypatch.setattr(mooncake_ends, "INLINE_BYTES", 0)
    options = TransportOptions(extra={"direct": "true"})
    ours, theirs = (create_transport("mooncake", options) for _ in range(2))
    world = KVWorld(prefill={"transport": ours}, decode={"transport": theirs})
    world.prefill.fill([1, 2], seed=3)
    sender, receiver = world.paired(target=(5, 6))
    sender.send([1], is_last=False)
    limit = time.monotonic() + 60
    world.tick()
    while len(sender.targets[0].outgoing):
        assert time.monotonic() < limit
        world.tick()
    assert world.decode.read(5) == world.prefill.read(1)
    (session,) = theirs._listener._sessions.values()
    inside = session.incoming._own._engine
    world.replace_prefill(epoch=12)
    world.pass_time(40.0)
    assert receiver.poll() is KVPoll.FAILED
    assert not receiver.quiescent()
    del inside
    world.tick()
    assert receiver.quiescent()
    ours.close()
    theirs.close()


def test_the_end_of_a_session_leaves_the_others_alone(make):
    src, other, dst = make(), make(), make()
    sessions = [dst.transport.open_session() for _ in range(2)]
    for end, session in zip((src, other), sessions, strict=True):
        assert outcome(end, session).state is WriteState.DONE
    dst.transport.drain(sessions[0].session_id)
    other.memory[0][:] = 9
    assert outcome(other, sessions[1]).state is WriteState.DONE
    assert (dst.memory[0] == 9).all()


def test_a_broken_connection_is_made_anew_in_the_same_session(make):
    src, dst = make(), make()
    session = dst.transport.open_session()
    for value in (1, 2):
        src.memory[0][:] = value
        assert outcome(src, session).state is WriteState.DONE
        assert (dst.memory[0] == value).all()
        for connection in dst.transport._listener.connections:
            connection.stop()


def test_a_piece_that_fails_is_lost(make, monkeypatch):
    src, dst = make(), make()
    session = dst.transport.open_session()
    submit = MooncakeTransferEngine.submit
    monkeypatch.setattr(MooncakeTransferEngine, "submit", lambda self, s, b, p, n: submit(self, s, b, p + (1 << 40), n))
    status = outcome(src, session)
    assert status.state is WriteState.LOST
    assert "mooncake could not transfer" in status.error


@pytest.mark.parametrize("backends", [("mooncake", "mooncake-direct"), ("mooncake-direct", "mooncake")])
def test_both_ends_must_agree(make, backends):
    src, dst = (make(backend) for backend in backends)
    status = outcome(src, dst.transport.open_session())
    assert status.state is WriteState.FAILED
    assert "give both the same direct=" in status.error


@pytest.mark.parametrize(
    ("options", "protocol", "is_direct"),
    [
        ({}, "tcp", False),
        ({"direct": "true"}, "tcp", True),
        ({}, "rdma", True),
        ({"direct": "false"}, "rdma", False),
        ({"staging": "host"}, "rdma", False),
        ({"staging": "host", "direct": "false"}, "rdma", False),
    ],
)
def test_staging_is_the_default_except_over_rdma(options, protocol, is_direct):
    assert mooncake._wants_direct(options, protocol) is is_direct


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"direct": "yes"}, "direct=yes: give true or false"),
        ({"direct": "true", "staging": "host"}, "direct=true uses no slots"),
    ],
)
def test_invalid_options_are_config_errors(extra, message):
    with pytest.raises(ConfigError, match=message):
        create_transport("mooncake", TransportOptions(extra=extra))


def test_a_pool_on_a_gpu_is_refused_if_direct_was_requested_and_staged_if_not(monkeypatch):
    for options, is_refused in (({"direct": "true"}, True), ({}, False)):
        backend = mooncake.MooncakeBackend(TransportOptions(extra=options))
        backend.is_direct = True
        monkeypatch.setattr(type(backend.stagings), "register", lambda self, regions: None)
        monkeypatch.setattr(type(backend.stagings), "has_gpu", True)
        if is_refused:
            with pytest.raises(ConfigError, match="direct=true is for KV pools on the CPU"):
                backend.register(backend.memory)
        else:
            backend.register(backend.memory)
            assert not backend.is_direct
        backend.close()
