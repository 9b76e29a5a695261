"""The cuda_ipc backend between two processes on one GPU: real handles, the real kernel, the fence."""

import os
import signal

import numpy as np
import pytest
import torch

from splitserve.transfer.copies import copy_table
from splitserve.transfer.transports import missing
from splitserve.transfer.transports.base import WriteState
from support.transfer_peer import End, PeerProcess, digest

PROBLEM = missing("cuda_ipc") or (None if torch.cuda.is_available() else "no CUDA device")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(PROBLEM is not None, reason=PROBLEM or "")]

N = 64 << 20
PAGE = 32 << 10


@pytest.fixture
def pair():
    with PeerProcess("cuda_ipc", [N, 4096]) as peer:
        end = End("cuda_ipc", [N, 4096])
        for tensor in end.tensors:
            tensor.copy_(torch.randint(0, 256, (tensor.numel(),), dtype=torch.uint8))
        torch.cuda.synchronize()
        yield end, peer
        end.close()


def write(end, session, copies):
    return end.outcome(end.transport.write(session, copy_table(copies)))


def bytes_of(tensor):
    return tensor.cpu().numpy()


def test_contiguous_and_scattered_bytes_arrive_exactly(pair):
    here, peer = pair
    session = peer.open_session()
    assert write(here, session, [(0, 0, 0, 0, N), (1, 3, 1, 5, 1001)]).state is WriteState.DONE
    assert peer.ask("digest", region=0) == digest(bytes_of(here.tensors[0]))
    row = np.zeros(4096, dtype=np.uint8)
    row[5:1006] = bytes_of(here.tensors[1])[3:1004]
    assert peer.ask("digest", region=1) == digest(row)
    places = np.random.default_rng(0).permutation(N // PAGE).tolist()
    copies = [(0, i * PAGE, 0, place * PAGE, PAGE) for i, place in enumerate(places)]
    assert write(here, session, copies).state is WriteState.DONE
    expected = np.zeros((N // PAGE, PAGE), dtype=np.uint8)
    expected[places] = bytes_of(here.tensors[0]).reshape(-1, PAGE)
    assert peer.ask("digest", region=0) == digest(expected.reshape(-1))


def test_both_ends_in_one_process():
    src, dst = End("cuda_ipc", [4096]), End("cuda_ipc", [4096])
    src.tensors[0].fill_(7)
    torch.cuda.synchronize()
    assert write(src, dst.transport.open_session(), [(0, 0, 0, 100, 1000)]).state is WriteState.DONE
    assert int(dst.tensors[0].sum()) == 7 * 1000
    src.close()
    dst.close()


def test_after_a_drain_nothing_is_written(pair):
    here, peer = pair
    session = peer.open_session()
    assert write(here, session, [(0, 0, 0, 0, PAGE)]).state is WriteState.DONE
    before = peer.ask("digest", region=0)
    peer.ask("drain", session=session.session_id)
    assert peer.ask("is_fenced", session=session.session_id)
    assert write(here, session, [(0, PAGE, 0, PAGE, N - PAGE)]).state in (WriteState.FAILED, WriteState.LOST)
    assert peer.ask("digest", region=0) == before


def test_a_target_outside_the_peers_memory_is_refused(pair):
    here, peer = pair
    session = peer.open_session()
    assert write(here, session, [(0, 0, 0, 8, N)]).state is WriteState.FAILED
    assert write(here, session, [(0, 0, 0, 0, N)]).state is WriteState.DONE


def test_a_receiver_that_is_stopped_costs_the_sender_nothing_and_one_that_is_killed_no_more_than_the_write(pair):
    here, peer = pair
    session = peer.open_session()
    assert write(here, session, [(0, 0, 0, 0, PAGE)]).state is WriteState.DONE
    peer.stop()
    assert write(here, session, [(0, 0, 0, 0, N)]).state is WriteState.DONE
    os.kill(peer.pid, signal.SIGKILL)
    peer.kill()
    assert write(here, session, [(0, 0, 0, 0, N)]).state in (WriteState.FAILED, WriteState.LOST)
    assert int(torch.ones(8, device="cuda").sum()) == 8
