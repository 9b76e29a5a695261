"""The nccl backend: staging on one GPU, and writes between two processes, which NCCL allows on two GPUs only."""

import contextlib
import multiprocessing
import os
import signal
import threading

import numpy as np
import pytest
import torch

from splitserve.core.layout import Region
from splitserve.transfer.copies import copy_table
from splitserve.transfer.transports import create_transport, missing
from splitserve.transfer.transports.base import PeerAddress, TransportOptions, WriteState
from splitserve.transfer.transports.device import CudaDevice
from splitserve.transfer.transports.tensors import DeviceMemory, Ranges
from support.transfer_peer import End

NUM_GPUS = 0 if missing("nccl") else torch.cuda.device_count()

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(NUM_GPUS < 1, reason=missing("nccl") or "no CUDA device")]
two_gpus = pytest.mark.skipif(NUM_GPUS < 2, reason="NCCL wants a GPU for each member of a group")

N = 32 << 20
PAGE = 16 << 10
DEADLINE = 60.0


class GpuEnd(End):
    """A transport over N bytes on a GPU, and a row in host memory beside them, as the metadata rows are."""

    def __init__(self, device, **options):
        self.progress = threading.Event()
        self.memory = torch.zeros(N, dtype=torch.uint8, device=device)
        self.row = np.zeros(64, dtype=np.uint8)
        torch.cuda.synchronize(device)
        self.transport = create_transport("nccl", TransportOptions(on_progress=self.progress.set, **options))
        self.transport.register([Region(self.memory.data_ptr(), N), Region(self.row.ctypes.data, 64)])


def serve(device, pipe):
    """The other end: opens sessions, and shows its memory."""
    end = GpuEnd(device)
    with contextlib.suppress(EOFError):
        while True:
            match pipe.recv():
                case "open":
                    address = end.transport.open_session()
                    pipe.send((address.session_id, address.endpoint))
                case "show":
                    pipe.send((end.memory.cpu().numpy(), end.row))
    end.close()


@pytest.fixture
def pair():
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=("cuda:1", theirs), daemon=True)
    process.start()
    theirs.close()
    end = GpuEnd("cuda:0", write_timeout=5.0)
    yield end, process, ours
    end.close()
    ours.close()
    process.kill()
    process.join()


def ask(pipe, what):
    pipe.send(what)
    assert pipe.poll(DEADLINE)
    return pipe.recv()


def write(end, session, copies):
    return end.outcome(end.transport.write(session, copy_table(copies)), DEADLINE)


def fill(end):
    end.memory.copy_(torch.randint(0, 256, (N,), dtype=torch.uint8))
    torch.cuda.synchronize()


@two_gpus
def test_contiguous_and_scattered_bytes_and_a_row_of_host_memory_arrive_exactly(pair):
    here, _, pipe = pair
    fill(here)
    here.row[:] = 9
    session = PeerAddress(*ask(pipe, "open"))
    assert write(here, session, [(0, 0, 0, 0, N), (1, 0, 1, 0, 64)]).state is WriteState.DONE
    memory, row = ask(pipe, "show")
    assert (memory == here.memory.cpu().numpy()).all()
    assert (row == 9).all()
    places = np.random.default_rng(0).permutation(N // PAGE).tolist()
    copies = [(0, i * PAGE, 0, place * PAGE, PAGE) for i, place in enumerate(places)]
    assert write(here, session, copies).state is WriteState.DONE
    memory, _ = ask(pipe, "show")
    assert (memory.reshape(-1, PAGE)[places] == here.memory.cpu().numpy().reshape(-1, PAGE)).all()


@two_gpus
def test_a_target_outside_the_peers_memory_is_refused(pair):
    here, _, pipe = pair
    session = PeerAddress(*ask(pipe, "open"))
    assert write(here, session, [(0, 0, 0, 8, N)]).state is WriteState.FAILED
    assert write(here, session, [(0, 0, 0, 0, N)]).state is WriteState.DONE


@two_gpus
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_member_lost_ends_the_write_and_leaves_this_process_alive(pair, number):
    here, process, pipe = pair
    session = PeerAddress(*ask(pipe, "open"))
    assert write(here, session, [(0, 0, 0, 0, N)]).state is WriteState.DONE
    os.kill(process.pid, number)
    assert write(here, session, [(0, 0, 0, 0, N)]).state in (WriteState.FAILED, WriteState.LOST)
    here.close()
    assert torch.ones(8, device="cuda:0").sum().item() == 8


def test_gathered_on_the_gpu_and_scattered_again_is_the_same():
    memory = torch.randint(0, 256, (1 << 20,), dtype=torch.uint8, device="cuda:0")
    target = torch.zeros_like(memory)
    device = DeviceMemory(CudaDevice(memory.device), [Region(m.data_ptr(), m.numel()) for m in (memory, target)])
    for lengths in ([4096] * 256, [4096, 12288] * 64, [1, 2, 3, 5]):
        offsets = np.cumsum([0, *lengths])[:-1].astype(np.uint64)
        sizes = np.array(lengths, dtype=np.uint64)
        stage = device.stage()
        part = device.gather(Ranges(offsets + np.uint64(memory.data_ptr()), sizes), stage)
        assert torch.equal(part, memory[: sum(lengths)])
        device.scatter(stage, Ranges(offsets + np.uint64(target.data_ptr()), sizes))
        assert torch.equal(target[: sum(lengths)], memory[: sum(lengths)])


def test_host_memory_is_no_view_on_the_gpu_but_can_be_staged_there():
    memory = torch.zeros(64, dtype=torch.uint8, device="cuda:0")
    row = np.arange(64, dtype=np.uint8)
    device = DeviceMemory(CudaDevice(memory.device), [Region(memory.data_ptr(), 64), Region(row.ctypes.data, 64)])
    ranges = Ranges(np.array([row.ctypes.data], dtype=np.uint64), np.array([64], dtype=np.uint64))
    assert device.view(ranges) is None
    assert device.gather(ranges, device.stage()).cpu().numpy().tolist() == row.tolist()
