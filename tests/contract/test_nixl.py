"""What is particular to NIXL: pieces of any shape, links with and without the gate, peers that come again."""

import contextlib
import itertools
import os
import random
import threading
import time
import weakref

import numpy as np
import pytest

from splitserve.core.errors import ConfigError
from splitserve.transfer.copies import copy_table
from splitserve.transfer.transports import TransferBackend, create_transport, missing
from splitserve.transfer.transports.base import TransportOptions, WriteState
from support.transfer_peer import End, PeerProcess

if problem := missing(TransferBackend.NIXL):
    pytest.skip(problem, allow_module_level=True)

from splitserve.transfer.transports import nixl, nixl_requests, same_host
from splitserve.transfer.transports.nixl_requests import Lane

DEADLINE = 60.0
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
    """Receivers of this process report another machine: no gate, and no link inside the host."""
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
    for connection in dst.transport._listener.connections:
        connection.stop()
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
        there.ask("write_for_ever", peer=session, copies=WHOLE)
        until(lambda: here.memory[0].all())
        there.stop()
        here.transport.drain(session.session_id)
        assert here.transport.is_fenced(session.session_id)
        here.memory[0][:] = 0
        there.go_on()
        assert there.ask("have_writes_ended", timeout=DEADLINE)
        assert not here.memory[0].any()


def test_without_the_gate_a_stopped_receiver_costs_at_most_the_deadline(world, monkeypatch):
    here = world(N, write_timeout=4.0)
    with PeerProcess("nixl", [N]) as there:
        monkeypatch.setattr(nixl, "boot_id", lambda: "another machine")
        session = there.open_session()
        # On a busy machine it may miss the short deadline.
        until(lambda: write(here, session, WHOLE).state is WriteState.DONE)
        there.stop()
        status = write(here, session, WHOLE)
        there.go_on()
        assert status.state is WriteState.LOST
        assert "within 4 s" in status.error


@pytest.fixture
def shared(world, monkeypatch):
    """Two ends. Two threads share writes of N bytes and more, in eight parts. No byte of the source is 0."""
    monkeypatch.setattr(nixl, "SHARED_BYTES", N)
    monkeypatch.setattr(nixl_requests, "MAX_BATCH_BYTES", N // 8)
    src, dst = (world(N, extra={"threads": "2"}) for _ in range(2))
    src.memory[0][:] = np.random.default_rng(1).integers(1, 256, N, dtype=np.uint8)
    return src, dst


def meet(monkeypatch):
    """The threads that post a part, each in its list once; the first two wait for each other before they do."""
    barrier, post, threads = threading.Barrier(2), Lane.post, []

    def post_after_meeting(lane, part, note):
        if threading.get_ident() not in threads:
            threads.append(threading.get_ident())
            barrier.wait(DEADLINE)
        return post(lane, part, note)

    monkeypatch.setattr(Lane, "post", post_after_meeting)
    return threads


def test_threads_share_a_large_write_on_one_host(shared, monkeypatch):
    src, dst = shared
    threads = meet(monkeypatch)
    assert write(src, dst.transport.open_session(), WHOLE).state is WriteState.DONE
    assert len(threads) == 2
    assert (dst.memory[0] == src.memory[0]).all()


@pytest.mark.parametrize("size", [N - 1, N])
def test_small_writes_and_those_to_other_hosts_are_one_threads(shared, monkeypatch, size):
    src, dst = shared
    if size == N:
        # Both ends compute it: no two machines are the same.
        machines = itertools.count()
        monkeypatch.setattr(nixl, "boot_id", lambda: str(next(machines)))
    post, threads = Lane.post, []

    def noted(lane, part, note):
        threads.append(threading.get_ident())
        return post(lane, part, note)

    monkeypatch.setattr(Lane, "post", noted)
    assert write(src, dst.transport.open_session(), [(0, 0, 0, 0, size)]).state is WriteState.DONE
    assert len(threads) == 8
    assert len(set(threads)) == 1
    assert np.count_nonzero(dst.memory[0]) == size


@pytest.mark.parametrize("failing", [0, 1])
def test_an_error_of_either_thread_loses_a_shared_write_and_the_next_one_connects_anew(shared, monkeypatch, failing):
    src, dst = shared
    session = dst.transport.open_session()
    with monkeypatch.context() as patch:
        threads, post, carry_out = meet(patch), Lane.post, nixl.NixlOutgoing._carry_out
        posts, has_failed = [], threading.Event()

        def fail(lane, part, note):
            posts.append(threading.get_ident())
            result = post(lane, part, note)
            if threading.get_ident() == threads[failing]:
                raise RuntimeError("no more")
            assert has_failed.wait(DEADLINE)
            return result

        def note_failure(*args):
            try:
                carry_out(*args)
            except RuntimeError:
                has_failed.set()
                raise

        patch.setattr(Lane, "post", fail)
        patch.setattr(nixl.NixlOutgoing, "_carry_out", note_failure)
        status = write(src, session, WHOLE)
    assert status.state is WriteState.LOST
    assert "no more" in status.error
    # Of the eight parts: who failed left none to the other but the one that it had by then.
    assert sorted(posts) == sorted(threads)
    dst.memory[0][:] = 0
    assert write(src, session, WHOLE).state is WriteState.DONE
    assert (dst.memory[0] == src.memory[0]).all()


def test_the_fence_of_a_shared_write_waits_for_each_of_its_threads(shared, monkeypatch):
    src, dst = shared
    session, post = dst.transport.open_session(), Lane.post
    both_are_in, is_seen, threads = threading.Barrier(3), threading.Event(), []
    carry_out, first_is_out = nixl.NixlOutgoing._carry_out, threading.Event()

    def carry_out_noted(outgoing, *args):
        try:
            carry_out(outgoing, *args)
        finally:
            if threading.get_ident() == threads[0]:
                first_is_out.set()

    def post_held(lane, part, note):
        if threading.get_ident() not in threads:
            threads.append(threading.get_ident())
            both_are_in.wait(DEADLINE)
            # The second one stays until the fence was looked at; the first one fails, or takes the other parts.
            if threading.get_ident() == threads[1]:
                assert is_seen.wait(DEADLINE)
        return post(lane, part, note)

    monkeypatch.setattr(Lane, "post", post_held)
    monkeypatch.setattr(nixl.NixlOutgoing, "_carry_out", carry_out_noted)
    ticket = src.transport.write(session, copy_table(WHOLE))
    both_are_in.wait(DEADLINE)
    dst.transport.drain(session.session_id)
    assert first_is_out.wait(DEADLINE)
    fenced = [dst.transport.is_fenced(session.session_id) for _ in range(100)]
    is_seen.set()
    assert src.outcome(ticket).state is WriteState.LOST
    assert not any(fenced)
    until(lambda: dst.transport.is_fenced(session.session_id))


def test_what_failed_keeps_the_gate_until_its_agents_are_gone(shared, monkeypatch):
    src, dst = shared
    session, agents, gone = dst.transport.open_session(), [], []
    make, leave = Lane.__init__, same_host._Held.__exit__

    def note_agent(lane, agent, *args):
        agents.append(weakref.ref(agent))
        make(lane, agent, *args)

    def fail(agent, request):
        raise RuntimeError("no more")

    def note_agents(held, *error):
        gone.append([agent() is None for agent in agents])
        leave(held, *error)

    monkeypatch.setattr(Lane, "__init__", note_agent)
    monkeypatch.setattr(nixl.library.nixl_agent, "transfer", fail)
    monkeypatch.setattr(same_host._Held, "__exit__", note_agents)
    assert write(src, session, WHOLE).state is WriteState.LOST
    assert gone == [[True, True]]


def test_a_connection_that_cannot_be_made_keeps_no_file_open(shared, monkeypatch):
    src, dst = shared
    session = dst.transport.open_session()

    def fail(*args):
        raise RuntimeError("no such peer")

    monkeypatch.setattr(Lane, "__init__", fail)

    def num_gates():
        return sum("splitserve-gate" in link for link in links("/proc/self/fd"))

    before = num_gates()
    for _ in range(3):
        assert write(src, session, WHOLE).state is WriteState.FAILED
    assert num_gates() == before


def links(folder):
    for entry in list(os.scandir(folder)):
        with contextlib.suppress(OSError):
            yield os.readlink(entry.path)


def test_a_large_write_goes_by_one_thread_where_there_are_no_more_agents(shared, monkeypatch, caplog):
    src, dst = shared
    session = dst.transport.open_session()
    assert write(src, session, [(0, 0, 0, 0, 8)]).state is WriteState.DONE

    def no_more(*args, **options):
        raise RuntimeError("too many open files")

    monkeypatch.setattr(nixl, "new_agent", no_more)
    for _ in range(2):
        assert write(src, session, WHOLE).state is WriteState.DONE
    assert (dst.memory[0] == src.memory[0]).all()
    said = "large writes go by 1 thread(s), for want of an agent: too many open files"
    assert [record.getMessage() for record in caplog.records].count(said) == 1


def test_a_session_that_ends_while_another_agent_is_made_says_so(shared, monkeypatch):
    src, dst = shared
    session = dst.transport.open_session()
    assert write(src, session, [(0, 0, 0, 0, 8)]).state is WriteState.DONE

    def drain(*args, **options):
        dst.transport.drain(session.session_id)
        raise RuntimeError("the agent cannot be reached")

    monkeypatch.setattr(nixl, "new_agent", drain)
    status = write(src, session, WHOLE)
    assert status.state is WriteState.LOST
    assert "the connection was closed" in status.error


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
