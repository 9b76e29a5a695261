"""Mooncake's real library between pools on a GPU that the CPU cannot touch, each beside a metadata row of the CPU."""

import random
import threading

import numpy as np
import pytest

from splitserve.core.errors import ConfigError
from splitserve.core.layout import Region
from splitserve.transfer.copies import copy_table
from splitserve.transfer.transports import missing
from splitserve.transfer.transports.base import TransportOptions, WriteState
from support.transfer_peer import End

if problem := missing("mooncake"):
    pytest.skip(problem, allow_module_level=True)

from splitserve.transfer.transports import mooncake
from splitserve.transfer.transports.device_staging import DeviceStaging, PinnedStaging
from splitserve.transfer.transports.mooncake_ends import INLINE_BYTES, SLOT_BYTES
from support.fake_device import FakeDevice, fake_mooncake_transport

PAGE = 12_000
NUM_PAGES = 1000
ROW = 4096


class GpuEnd(End):
    """Regions 0 and 1: keys and values on the GPU; 2: rows of the CPU."""

    def __init__(self, staging):
        self.progress = threading.Event()
        self.device = FakeDevice([PAGE * NUM_PAGES] * 2)
        self.rows = np.zeros(8 * ROW, dtype=np.uint8)
        self.memory = [*self.device.memory, self.rows]
        options = TransportOptions(on_progress=self.progress.set, extra={"staging": staging})
        self.transport = fake_mooncake_transport(options, self.device)
        self.transport.register([*self.device.regions, Region(self.rows.ctypes.data, len(self.rows))])


@pytest.fixture
def ends():
    made = []

    def end(staging):
        made.append(GpuEnd(staging))
        return made[-1]

    yield end
    for one in made:
        one.close()
    assert all(one.device.locked == {} for one in made)


def fill(end):
    for i, array in enumerate(end.memory):
        array[:] = np.random.default_rng(i).integers(0, 256, array.size, dtype=np.uint8)


def pages_and_row(num_pages, row, seed):
    """Scattered pages of both regions, the row in the middle of them."""
    places = random.Random(seed).sample(range(NUM_PAGES), num_pages)
    copies = [(region, i * PAGE, region, place * PAGE, PAGE) for i, place in enumerate(places) for region in (0, 1)]
    copies.insert(len(copies) // 2, (2, row * ROW, 2, (7 - row) * ROW, ROW - 3))
    return copies


def expected(src, copies):
    memory = [np.zeros_like(array) for array in src.memory]
    for source, first, target, place, length in copies:
        memory[target][place : place + length] = src.memory[source][first : first + length]
    return memory


def outcome(src, session, copies):
    return src.outcome(src.transport.write(session, copy_table(copies)))


@pytest.mark.parametrize("num_pages", [2, 700], ids=["inline", "in slots"])
@pytest.mark.parametrize(("ours", "theirs"), [("host", "host"), ("gpu", "gpu"), ("host", "gpu"), ("gpu", "host")])
def test_scattered_pages_of_the_gpu_and_a_row_of_the_cpu_go_in_one_write(ends, ours, theirs, num_pages):
    src, dst = ends(ours), ends(theirs)
    fill(src)
    copies = pages_and_row(num_pages, 1, seed=num_pages)
    size = sum(copy[-1] for copy in copies)
    assert size <= INLINE_BYTES or size > 3 * SLOT_BYTES
    assert outcome(src, dst.transport.open_session(), copies).state is WriteState.DONE
    assert all((a == b).all() for a, b in zip(dst.memory, expected(src, copies), strict=True))


@pytest.mark.parametrize("staging", ["host", "gpu"])
def test_a_refused_target_touches_nothing_and_the_session_goes_on(ends, staging):
    src, dst = ends(staging), ends(staging)
    fill(src)
    session = dst.transport.open_session()
    copies = pages_and_row(100, 1, seed=0)
    status = outcome(src, session, [*copies, (0, 0, 1, PAGE * NUM_PAGES - 8, 9)])
    assert status.state is WriteState.FAILED
    assert not any(array.any() for array in dst.memory)
    assert outcome(src, session, copies).state is WriteState.DONE


def test_a_buffer_on_the_gpu_is_of_one_connection_and_there_is_a_bound_for_them(ends, monkeypatch):
    monkeypatch.setattr("splitserve.transfer.transports.staging.MAX_GPU_BUFFERS", 2)
    src, dst = ends("gpu"), ends("gpu")
    # Engines of earlier tests come again, with what they keep.
    known = {id(kept) for gpu_id in (-1, 0) for kept in dst.transport.backend.engine(gpu_id).kept}
    session = dst.transport.open_session()
    for seed in range(4):
        fill(src)
        copies = pages_and_row(100, 1, seed)
        for array in dst.memory:
            array[:] = 0
        assert outcome(src, session, copies).state is WriteState.DONE
        assert all((a == b).all() for a, b in zip(dst.memory, expected(src, copies), strict=True))
        for connection in dst.transport._listener.connections:
            connection.stop()
    dst.transport.drain(session.session_id)

    def kept(gpu_id):
        return [staging for staging in dst.transport.backend.engine(gpu_id).kept if id(staging) not in known]

    assert [type(staging) for staging in kept(0)] == [DeviceStaging] * 2
    assert [type(staging) for staging in kept(-1)] == [PinnedStaging] * 2
    addresses = [staging.address for staging in (*kept(0), *kept(-1))]
    assert len(set(addresses)) == 4


def test_a_receiver_that_cannot_page_lock_says_so_and_can_later(ends, monkeypatch):
    src, dst = ends("gpu"), ends("host")
    fill(src)
    session = dst.transport.open_session()

    def full(address, length):
        raise OSError(f"cannot page-lock {length} bytes")

    with monkeypatch.context() as patch:
        patch.setattr(dst.device, "page_lock", full)
        status = outcome(src, session, pages_and_row(100, 1, 0))
    assert status.state is WriteState.FAILED
    assert "no staging buffer: cannot page-lock" in status.error
    assert outcome(src, session, pages_and_row(100, 1, 0)).state is WriteState.DONE


def test_a_gpu_that_fails_in_a_write_ends_the_connection_and_not_the_session(ends, monkeypatch):
    src, dst = ends("gpu"), ends("gpu")
    fill(src)
    session = dst.transport.open_session()
    assert outcome(src, session, pages_and_row(100, 1, 0)).state is WriteState.DONE

    def fail(address, length):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with monkeypatch.context() as patch:
        patch.setattr(dst.device, "bytes_at", fail)
        assert outcome(src, session, pages_and_row(100, 1, 0)).state is WriteState.LOST
    assert outcome(src, session, pages_and_row(100, 1, 1)).state is WriteState.DONE


@pytest.mark.parametrize("side", ["ours", "theirs"])
def test_an_engine_that_cannot_be_had_leaves_nothing_page_locked(ends, monkeypatch, side):
    src, dst = ends("host"), ends("host")

    def none_left(*args, **options):
        raise ConfigError("mooncake cannot start")

    with monkeypatch.context() as patch:
        if side == "ours":
            patch.setattr(mooncake, "take_engine", none_left)
        else:
            patch.setattr(dst.transport.backend, "engine", none_left)
        status = outcome(src, dst.transport.open_session(), pages_and_row(100, 1, 0))
    assert status.state is WriteState.FAILED
    assert "mooncake cannot start" in status.error
    assert src.device.locked == {}
    assert len(dst.device.locked) == (side == "ours")
