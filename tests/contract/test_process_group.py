"""What only groups of torch.distributed can suffer, beside the contract that they share with every transport."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

from splitserve.core.errors import ConfigError
from splitserve.transfer.copies import copy_table
from splitserve.transfer.transports import create_transport, missing, sockets
from splitserve.transfer.transports.base import TransportOptions, WriteState
from splitserve.transfer.transports.groups import RECEIVER, SENDER, GlooGroup, RendezvousInfo
from splitserve.transfer.transports.process_group import GlooBackend
from splitserve.transfer.transports.sockets import Deadline
from support.transfer_peer import End, PeerProcess, digest

DEADLINE = 60.0
N = 32 << 20
WHOLE = [(0, 0, 0, 0, N)]
# Far beyond what a test waits for: nothing may end by it.
NEVER = 3600.0


@pytest.fixture
def gloo():
    ends = []

    def end(*lengths, **options):
        ends.append(End("gloo", lengths, **options))
        return ends[-1]

    yield end
    for e in ends:
        e.close()


@pytest.fixture
def peers():
    """Processes with N bytes of memory each."""
    started = []

    def peer(**options):
        started.append(PeerProcess("gloo", [N], **options))
        return started[-1]

    yield peer
    for p in started:
        p.kill()


def write(end, session, copies):
    return end.outcome(end.transport.write(session, copy_table(copies)))


def until(is_true):
    limit = time.monotonic() + DEADLINE
    while not is_true():
        assert time.monotonic() < limit, "it never became true"
        time.sleep(0.001)


def ends_in_time(call, *args):
    thread = threading.Thread(target=call, args=args, daemon=True)
    thread.start()
    thread.join(DEADLINE)
    return not thread.is_alive()


def test_a_drain_does_not_wait_for_a_sender_that_was_stopped_half_way(gloo, peers):
    here, there = gloo(N, write_timeout=NEVER), peers()
    session = here.transport.open_session()
    there.ask("set", region=0, value=7)
    there.ask("write_for_ever", peer=session, copies=WHOLE)
    until(lambda: here.memory[0].any())
    there.stop()
    assert ends_in_time(here.transport.drain, session.session_id)
    assert here.transport.is_fenced(session.session_id)
    here.memory[0][:] = 0
    there.go_on()
    assert there.ask("have_writes_ended", timeout=DEADLINE)
    assert not here.memory[0].any()


HALF_WAY = """
import socket, sys, torch
from splitserve.transfer.transports.groups import GlooGroup
from splitserve.transfer.transports.groups import SENDER
from splitserve.transfer.transports.sockets import Deadline
group = GlooGroup(socket.socket(fileno=int(sys.argv[1])), SENDER, Deadline(60))
works = group.send(torch.ones(int(sys.argv[2]), dtype=torch.uint8))
sys.stdin.read()
"""


@contextmanager
def stopped_half_way(tensor):
    """Yield this end's connection, group and works, and the sender, stopped in the middle of the tensor."""
    while True:
        ours, theirs = connected()
        command = [sys.executable, "-c", HALF_WAY, str(theirs.fileno()), str(len(tensor))]
        with ours, theirs, subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.PIPE) as sender:
            try:
                group = GlooGroup(ours, RECEIVER, Deadline(DEADLINE))
                works = group.receive(tensor)
                until(lambda: tensor[0] == 1)
                sender.send_signal(signal.SIGSTOP)
                os.waitid(os.P_PID, sender.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
                if not tensor[-1]:
                    yield ours, group, works, sender
                    return
                # On a busy machine the library may have received all of it before this thread had a turn.
                group.close()
                tensor.zero_()
            finally:
                sender.kill()


def test_a_wait_for_a_tensor_that_is_half_there_ends_with_the_data_connection_and_nothing_lands_after_it():
    """Larger than what the kernel's buffers hold, so that the stopped sender leaves it in the middle."""
    tensor = torch.zeros(256 << 20, dtype=torch.uint8)
    with stopped_half_way(tensor) as (ours, group, works, sender):
        outcome = []

        def wait():
            with pytest.raises(ConnectionError):
                group.wait(works, Deadline(NEVER))
            outcome.append("ended")

        waiter = threading.Thread(target=wait, daemon=True)
        waiter.start()
        sockets.shut(ours)
        waiter.join(DEADLINE)
        assert outcome == ["ended"]
        group.close()
        tensor.zero_()
        sender.send_signal(signal.SIGCONT)
        sender.stdin.close()
        sender.wait(DEADLINE)
        assert not tensor.any()


def test_a_close_does_not_wait_for_a_receiver_that_was_stopped_half_way(gloo, peers):
    here, there = gloo(N, write_timeout=NEVER), peers()
    session = there.open_session()
    assert write(here, session, WHOLE).state is WriteState.DONE
    there.stop()
    here.transport.write(session, copy_table(WHOLE))
    assert ends_in_time(here.transport.close)


def test_a_receiver_killed_half_way_ends_the_write_long_before_its_deadline(gloo, peers):
    here, there = gloo(N, write_timeout=NEVER), peers()
    session = there.open_session()
    assert write(here, session, WHOLE).state is WriteState.DONE
    there.stop()
    ticket = here.transport.write(session, copy_table(WHOLE))
    there.kill()
    assert here.outcome(ticket, DEADLINE).state in (WriteState.FAILED, WriteState.LOST)


def what_a_member_says_before_it_goes(rank):
    """Over the data connection, to let the other find it."""
    ours, theirs = connected()
    with theirs:
        member = threading.Thread(target=loss_of, args=(ours, rank, []))
        member.start()
        said = theirs.recv(1 << 16)
        sockets.shut(theirs)
        member.join(DEADLINE)
        ours.close()
    return said


def loss_of(sock, rank, losses):
    """The library waits until its deadline, even if no caller waits for it any more."""
    try:
        GlooGroup(sock, rank, Deadline(DEADLINE / 4)).close()
    except (ConnectionError, TimeoutError) as error:
        losses.append(error)


def connected():
    with socket.create_server(("127.0.0.1", 0)) as server:
        theirs = socket.create_connection(server.getsockname())
        return server.accept()[0], theirs


@pytest.mark.parametrize("rank", [RECEIVER, SENDER])
@pytest.mark.parametrize("who", ["ours", "theirs"])
def test_a_member_that_meets_one_that_has_gone_waits_no_longer_than_the_data_connection(rank, who):
    """Which of the two connects to the other is the library's choice, by chance: only the one that does not would
    wait. So several of them.
    """
    for _ in range(4):
        ends = dict(zip(("ours", "theirs"), connected(), strict=True))
        with ends["ours"], ends["theirs"]:
            ends["theirs"].sendall(what_a_member_says_before_it_goes(1 - rank))
            losses = []
            member = threading.Thread(target=loss_of, args=(ends["ours"], rank, losses), daemon=True)
            member.start()
            # It has sent its name and received the peer's. From here on it waits for the peer.
            ends["theirs"].recv(1 << 16)
            sockets.shut(ends[who])
            member.join(DEADLINE)
            assert not member.is_alive()
            assert not any("Connect timeout" in str(loss) or isinstance(loss, TimeoutError) for loss in losses)


def test_a_lost_member_costs_its_own_pair_only(gloo, peers):
    here, lost, other = gloo(N), peers(), peers()
    to_lost, to_other = lost.open_session(), other.open_session()
    here.memory[0][:] = 5
    assert write(here, to_lost, WHOLE).state is WriteState.DONE
    assert write(here, to_other, [(0, 0, 0, 0, 8)]).state is WriteState.DONE
    lost.kill()
    assert write(here, to_lost, WHOLE).state is not WriteState.DONE
    assert write(here, to_other, WHOLE).state is WriteState.DONE
    assert other.ask("digest", region=0) == digest(here.memory[0])


def test_a_broken_group_is_made_anew_for_the_next_write(gloo):
    src, dst = gloo(8), gloo(8)
    session = dst.transport.open_session()
    for value in (1, 2):
        src.memory[0][:] = value
        assert write(src, session, [(0, 0, 0, 0, 8)]).state is WriteState.DONE
        assert (dst.memory[0] == value).all()
        for connection in dst.transport._listener.connections:
            connection.stop()


def test_nothing_is_left_behind_when_both_ends_are_closed(gloo):
    before = num_threads()
    src, dst = gloo(8), gloo(8)
    for _ in range(3):
        assert write(src, dst.transport.open_session(), [(0, 0, 0, 0, 8)]).state is WriteState.DONE
    assert num_threads() > before + 2
    src.transport.close()
    dst.transport.close()
    until(lambda: num_threads() <= before)


def num_threads():
    """Return all threads, also those that Python did not start."""
    return len(list(Path("/proc/self/task").iterdir()))


def test_a_member_that_does_not_know_the_secret_of_the_connection_is_turned_away(gloo, monkeypatch):
    src, dst = gloo(8), gloo(8)
    src.memory[0][:] = 1
    session = dst.transport.open_session()
    monkeypatch.setattr(RendezvousInfo, "read", classmethod(lambda cls, data, library: RendezvousInfo.to(library)))
    assert write(src, session, [(0, 0, 0, 0, 8)]).state is WriteState.FAILED
    assert not dst.memory[0].any()


def test_another_version_of_the_library_is_refused_and_both_are_named(gloo, monkeypatch):
    src, dst = gloo(8), gloo(8)
    session = dst.transport.open_session()
    ours = src.transport.backend.library
    monkeypatch.setattr(dst.transport.backend, "library", "gloo of torch 1.0")
    status = write(src, dst.transport.open_session(), [(0, 0, 0, 0, 8)])
    assert status.state is WriteState.FAILED
    assert f"{ours} against gloo of torch 1.0" in status.error
    assert write(src, session, [(0, 0, 0, 0, 8)]).state is WriteState.FAILED
    assert GlooBackend.library == ours


def test_ranges_of_all_sizes_arrive_together(gloo):
    lengths = [3, 300_000, 4096, 4096, 9 << 20, 1, 0, 4096, 5 << 20, 256 << 10, 17]
    total = sum(lengths)
    src, dst = gloo(total), gloo(total)
    src.memory[0][:] = np.random.default_rng(1).integers(0, 256, total, dtype=np.uint8)
    copies, at = [], 0
    for length in lengths:
        copies.append((0, at, 0, total - at - length, length))
        at += length
    assert write(src, dst.transport.open_session(), copies).state is WriteState.DONE
    for _, source, _, target, length in copies:
        assert (dst.memory[0][target : target + length] == src.memory[0][source : source + length]).all()


def test_nccl_says_what_it_lacks_without_loading_torch():
    problem = missing("nccl")
    if problem is None:
        pytest.skip("a CUDA build of torch and a driver are here")
    assert "CUDA" in problem
    with pytest.raises(ConfigError, match="CUDA"):
        create_transport("nccl", TransportOptions())
    script = (
        "import sys; from splitserve.transfer.transports import missing; "
        "assert missing('nccl'); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
