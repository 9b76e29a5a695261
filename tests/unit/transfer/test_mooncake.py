"""What is mooncake's own, beyond the contract of transports: the wrapper of the library, its options, its failures."""

import contextlib
import ctypes
import sys
import threading

import msgspec
import numpy as np
import pytest

from splitserve.core.errors import ConfigError
from splitserve.core.machine import Arena
from splitserve.transfer.copies import copy_table
from splitserve.transfer.transports import create_transport, missing
from splitserve.transfer.transports.base import TransportOptions, WriteState
from splitserve.transfer.transports.sockets import Deadline
from splitserve.transfer.transports.staging import ProcessStaging
from support.transfer_peer import End

if problem := missing("mooncake"):
    pytest.skip(problem, allow_module_level=True)

from splitserve.transfer.transports import mooncake, mooncake_engine
from splitserve.transfer.transports.mooncake_ends import MooncakeOutgoing
from splitserve.transfer.transports.mooncake_engine import MAX_BATCH, MooncakeError, MooncakeTransferEngine

N = 4 * (MAX_BATCH + 100)
WHOLE = [(0, 0, 0, 0, 1 << 20)]


@pytest.fixture
def engines():
    """Two engines, each over N registered bytes: (engine, address, view)."""
    made = []
    for _ in range(2):
        engine, arena = mooncake_engine.take_engine("127.0.0.1", "", "tcp"), Arena(N)
        engine.register(arena.address, N)
        made.append((engine, arena.address, np.frombuffer(arena.buffer, dtype=np.uint8)))
    yield made
    for engine, address, view in made:
        with contextlib.suppress(MooncakeError):
            engine.deregister(address)
        # The library may still hold a connection that reads into it.
        engine.kept.append(view)
        mooncake_engine.give_back(engine)


@pytest.fixture
def ends():
    made = [End("mooncake", [1 << 20]) for _ in range(2)]
    yield made
    for end in made:
        end.close()


def test_more_pieces_than_the_library_queues_are_sent_in_batches(engines):
    (one, source, ours), (two, target, theirs) = engines
    ours[:] = np.arange(N) % 251
    firsts = range(0, N, 4)
    one.batch_transfer_sync(
        two.get_session_id(), [source + i for i in firsts], [target + i for i in firsts], [4] * len(firsts)
    )
    assert (ours == theirs).all()


def test_a_transfer_outside_registered_memory_names_session_and_size(engines):
    (one, source, _), (two, target, _) = engines
    with pytest.raises(MooncakeError, match=rf"99 bytes to {two.get_session_id()} .*MC_LOG_LEVEL"):
        one.transfer_sync(two.get_session_id(), source, target + N - 98, 99)


def test_deregistered_memory_is_written_no_more(engines):
    (one, source, ours), (two, target, theirs) = engines
    ours[:] = 1
    two.deregister(target)
    with pytest.raises(MooncakeError):
        one.transfer_sync(two.get_session_id(), source, target, N)
    assert not theirs.any()


def test_an_engine_that_was_not_initialized_is_an_error():
    with pytest.raises(MooncakeError, match="not initialized"):
        MooncakeTransferEngine("127.0.0.1").get_session_id()


def test_overlapping_memory_is_refused(engines):
    engine, address, _ = engines[0]
    with pytest.raises(MooncakeError, match="a range of 8 bytes"):
        engine.register(address + 8, 8)


def test_an_engine_is_used_again_but_not_for_another_process_at_the_same_address():
    first = mooncake_engine.take_engine("127.0.0.1", "", "tcp", ("127.0.0.1:1", "before"))
    mooncake_engine.give_back(first)
    other = mooncake_engine.take_engine("127.0.0.1", "", "tcp", ("127.0.0.1:1", "after"))
    assert other is not first
    again = mooncake_engine.take_engine("127.0.0.1", "", "tcp", ("127.0.0.1:1", "before"))
    assert again.known["127.0.0.1:1"] == "before"
    for engine in (other, again):
        mooncake_engine.give_back(engine)


def test_memory_that_the_library_keeps_costs_no_other_connection_its_engine():
    def refuse():
        raise MooncakeError("cannot deregister")

    # As no other test's.
    first = mooncake_engine.take_engine("127.0.0.1", "", "tcp", gpu_id=4711)
    mooncake_engine.give_back(first, when_idle=refuse)
    again = mooncake_engine.take_engine("127.0.0.1", "", "tcp", gpu_id=4711)
    assert again is first
    mooncake_engine.give_back(again)


def test_a_staging_buffer_that_the_library_keeps_stays_where_it_is_and_its_session_is_fenced(ends, monkeypatch):
    def refuse(engine, address):
        refused.append((engine, address))
        raise MooncakeError("cannot deregister")

    src, dst = ends
    session, refused = dst.transport.open_session(), []
    assert src.outcome(src.transport.write(session, copy_table(WHOLE))).state is WriteState.DONE
    with monkeypatch.context() as patch:
        patch.setattr(MooncakeTransferEngine, "deregister", refuse)
        dst.transport.drain(session.session_id)
        assert dst.transport.is_fenced(session.session_id)
    ((engine, address),) = refused
    assert address in [kept.address for kept in engine.kept if hasattr(kept, "address")]
    engine.deregister(address)


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ({"protocol": "pigeon"}, "tcp, rdma"),
        ({"devices": "mlx5_0"}, "it takes device, direct, protocol, staging"),
        ({"staging": "nvme"}, "staging=nvme: choose one of host, gpu"),
        ({"staging": "gpu"}, r"mooncake-transfer-engine-non-cuda .* Install mooncake-transfer-engine=="),
        ({"protocol": "rdma"}, "use protocol=tcp"),
    ],
)
def test_options_that_cannot_be_are_config_errors(extra, said, monkeypatch, tmp_path):
    monkeypatch.setattr(mooncake_engine, "_RDMA_DEVICES", tmp_path)
    monkeypatch.setattr(mooncake_engine, "_installed", lambda: ("mooncake-transfer-engine-non-cuda", "0.3.13"))
    with pytest.raises(ConfigError, match=said):
        create_transport("mooncake", TransportOptions(extra=extra))


def test_slots_on_a_gpu_need_a_pool_there(monkeypatch):
    monkeypatch.setattr(mooncake_engine, "_installed", lambda: ("mooncake-transfer-engine", "0.3.13"))
    transport = create_transport("mooncake", TransportOptions(extra={"staging": "gpu"}))
    with pytest.raises(ConfigError, match="staging=gpu needs a KV pool on a GPU"):
        transport.register([Arena(8).region()])
    transport.close()


def test_a_library_that_cannot_be_loaded_is_a_config_error_with_the_hint(monkeypatch):
    monkeypatch.delitem(sys.modules, mooncake.__name__)
    monkeypatch.delitem(sys.modules, mooncake_engine.__name__)
    monkeypatch.setitem(sys.modules, "mooncake.engine", None)
    with pytest.raises(ConfigError, match=r"cannot be loaded.*pip install 'splitserve\[mooncake\]'"):
        create_transport("mooncake", TransportOptions())


def test_a_missing_system_library_is_named_with_its_package(monkeypatch):
    def load(name):
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", load)
    with pytest.raises(ConfigError, match=r"needs the system library libibverbs\.so\.1.*apt-get install libibverbs1"):
        create_transport("mooncake", TransportOptions())


def outcome(src, session):
    return src.outcome(src.transport.write(session, copy_table(WHOLE)))


def test_another_version_of_the_library_is_refused_with_both(ends, monkeypatch):
    src, dst = ends
    session_info = mooncake.MooncakeSessionInfo("0.2.9", "tcp", "127.0.0.1:1", "x", 0, 1, 4096)
    monkeypatch.setattr(mooncake.MooncakeIncoming, "session_info", lambda self: msgspec.msgpack.encode(session_info))
    status = outcome(src, dst.transport.open_session())
    assert status.state is WriteState.FAILED
    assert f"{mooncake_engine.library_version()} over tcp against 0.2.9 over tcp" in status.error


def test_a_broken_connection_is_made_anew_over_another_buffer(ends):
    src, dst = ends
    session = dst.transport.open_session()
    for value in (1, 2, 3):
        src.memory[0][:] = value
        assert outcome(src, session).state is WriteState.DONE
        assert (dst.memory[0] == value).all()
        for connection in dst.transport._listener.connections:
            connection.stop()
    retired = [kept.address for kept in dst.transport.backend.engine().kept if isinstance(kept, ProcessStaging)]
    assert len(set(retired)) == len(retired) >= 2


def test_a_transfer_that_fails_is_lost_and_the_next_write_is_tried_anew(ends, monkeypatch):
    src, dst = ends
    session = dst.transport.open_session()
    assert outcome(src, session).state is WriteState.DONE
    submit = MooncakeTransferEngine.submit
    with monkeypatch.context() as patch:
        # Beside the staging buffer: the receiver's library refuses it.
        patch.setattr(MooncakeTransferEngine, "submit", lambda self, s, b, p, n: submit(self, s, b, p + (1 << 40), n))
        status = outcome(src, session)
    assert status.state is WriteState.LOST
    assert "mooncake could not transfer" in status.error
    src.memory[0][:] = 9
    assert outcome(src, session).state is WriteState.DONE
    assert (dst.memory[0] == 9).all()


def test_an_engine_that_never_answers_costs_no_more_than_the_deadline_of_a_connection(ends, monkeypatch):
    src, dst = ends
    seconds, answered, wait = src.transport.options.connect_timeout, threading.Event(), MooncakeOutgoing.open

    def open_soon_late(outgoing, deadline):
        # The handshake before it may take its time.
        assert deadline.seconds == seconds
        wait(outgoing, Deadline(0.2))

    monkeypatch.setattr(MooncakeOutgoing, "open", open_soon_late)
    monkeypatch.setattr(MooncakeTransferEngine, "transfer_sync", lambda *args: answered.wait(60))
    status = outcome(src, dst.transport.open_session())
    answered.set()
    assert status.state is WriteState.FAILED
    assert "0.2 s" in status.error
