"""Mooncake between pools on a real GPU: both stagings, against each other and against a pool of the CPU.

With the library's build for CUDA also slots on the GPU; over rdma where SPLITSERVE_TEST_RDMA names a device.
"""

import os
import threading

import numpy as np
import pytest
import torch

from splitserve.core.errors import ConfigError
from splitserve.core.layout import Region
from splitserve.transfer.copies import copy_table
from splitserve.transfer.transports import create_transport, missing
from splitserve.transfer.transports.base import TransportOptions, WriteState
from splitserve.transfer.transports.device import find_device
from support.transfer_peer import End, PeerProcess, digest

PROBLEM = missing("mooncake") or (None if torch.cuda.is_available() else "no CUDA device")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(PROBLEM is not None, reason=PROBLEM or "")]

N = 64 << 20
PAGE = 32 << 10
ROW = 4096
RDMA = os.environ.get("SPLITSERVE_TEST_RDMA", "")


class GpuEnd(End):
    """A transport over N bytes on a GPU, and a row in host memory beside them, as the metadata rows are."""

    def __init__(self, staging):
        self.progress = threading.Event()
        self.gpu_bytes = torch.zeros(N, dtype=torch.uint8, device="cuda")
        self.row = np.zeros(ROW, dtype=np.uint8)
        torch.cuda.synchronize()
        extra = {"staging": staging, **({"protocol": "rdma", "device": RDMA} if RDMA else {})}
        self.transport = create_transport("mooncake", TransportOptions(on_progress=self.progress.set, extra=extra))
        self.transport.register([Region(self.gpu_bytes.data_ptr(), N), Region(self.row.ctypes.data, ROW)])

    def fill(self):
        self.gpu_bytes.copy_(torch.randint(0, 256, (N,), dtype=torch.uint8))
        self.row[:] = 9
        torch.cuda.synchronize()

    def shown(self):
        return self.gpu_bytes.cpu().numpy()


@pytest.fixture
def ends():
    made = []

    def end(staging):
        try:
            made.append(GpuEnd(staging))
        except ConfigError as error:
            pytest.skip(str(error))
        return made[-1]

    yield end
    for one in made:
        one.close()


def write(end, session, copies):
    return end.outcome(end.transport.write(session, copy_table(copies)))


@pytest.mark.parametrize(("ours", "theirs"), [("host", "host"), ("gpu", "gpu"), ("host", "gpu"), ("gpu", "host")])
def test_scattered_pages_of_the_gpu_and_a_row_of_the_cpu_arrive_exactly(ends, ours, theirs):
    src, dst = ends(ours), ends(theirs)
    src.fill()
    places = np.random.default_rng(0).permutation(N // PAGE).tolist()
    copies = [(0, i * PAGE, 0, place * PAGE, PAGE) for i, place in enumerate(places)]
    copies.insert(100, (1, 3, 1, 5, 1001))
    assert write(src, dst.transport.open_session(), copies).state is WriteState.DONE
    assert (dst.shown().reshape(-1, PAGE)[places] == src.shown().reshape(-1, PAGE)).all()
    assert dst.row.tolist() == [0] * 5 + [9] * 1001 + [0] * (ROW - 1006)


@pytest.mark.parametrize("staging", ["host", "gpu"])
def test_a_small_write_arrives_exactly(ends, staging):
    src, dst = ends(staging), ends(staging)
    src.fill()
    copies = [(0, 0, 0, 4 * PAGE, PAGE), (1, 0, 1, 0, 64), (0, 7, 0, 1, 9)]
    assert write(src, dst.transport.open_session(), copies).state is WriteState.DONE
    shown = dst.shown()
    assert (shown[4 * PAGE : 5 * PAGE] == src.shown()[:PAGE]).all()
    assert (shown[1:10] == src.shown()[7:16]).all()
    assert dst.row.tolist() == [9] * 64 + [0] * (ROW - 64)


@pytest.mark.parametrize("staging", ["host", "gpu"])
def test_a_pool_on_a_gpu_goes_to_one_of_the_cpu_in_another_process_which_may_die(ends, staging):
    if RDMA:
        pytest.skip("the other process speaks tcp")
    src = ends(staging)
    src.fill()
    with PeerProcess("mooncake", [N]) as peer:
        session = peer.open_session()
        assert write(src, session, [(0, 0, 0, 0, N)]).state is WriteState.DONE
        assert peer.ask("digest", region=0) == digest(src.shown())
        peer.kill()
        assert write(src, session, [(0, 0, 0, 0, N)]).state in (WriteState.FAILED, WriteState.LOST)
    assert int(torch.ones(8, device="cuda").sum()) == 8


@pytest.mark.parametrize("staging", ["host", "gpu"])
def test_a_connection_made_anew_and_a_refused_target(ends, staging):
    src, dst = ends(staging), ends(staging)
    src.fill()
    session = dst.transport.open_session()
    for _ in range(3):
        assert write(src, session, [(0, 0, 0, 0, N)]).state is WriteState.DONE
        assert write(src, session, [(0, 0, 0, 8, N)]).state is WriteState.FAILED
    assert (dst.shown() == src.shown()).all()


def test_memory_is_page_locked_and_unlocked():
    memory = torch.zeros(64, dtype=torch.uint8, device="cuda")
    device = find_device([Region(memory.data_ptr(), 64)])
    host = np.zeros(1 << 20, dtype=np.uint8)
    for _ in range(2):
        device.page_lock(host.ctypes.data, host.nbytes)
        with device.new_stream()():
            torch.from_numpy(host)[:64].copy_(device.bytes_at(memory.data_ptr(), 64) + 3, non_blocking=True)
        assert int(host.sum()) == 3 * 64
        device.page_unlock(host.ctypes.data)


def test_remote_writes_are_flushed():
    memory = torch.zeros(64, dtype=torch.uint8, device="cuda")
    find_device([Region(memory.data_ptr(), 64)]).flush_remote_writes()
