"""Staging of memory on a GPU that the CPU cannot touch, beside memory of the CPU: against copies made one by one."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitserve.core.errors import ConfigError
from splitserve.core.layout import Region
from splitserve.transfer.transports.device import host_bytes
from splitserve.transfer.transports.device_staging import DeviceAuxDataCodec, DeviceStaging, PinnedStaging
from splitserve.transfer.transports.staging import Pieces, ProcessStaging, StagingChoice
from splitserve.transfer.transports.tensors import DeviceMemory, Ranges
from support.fake_device import FakeDevice

KINDS = [PinnedStaging, DeviceStaging]
SLOT = 4096


class World:
    """A GPU with two regions, one of the CPU, and the bytes of all by address."""

    def __init__(self):
        self.device = FakeDevice([5000, 3000])
        self.row = np.zeros(1000, dtype=np.uint8)
        self.regions = [*self.device.regions, Region(self.row.ctypes.data, 1000)]
        self.arrays = [*self.device.memory, self.row]
        self.memory = DeviceMemory(self.device, self.regions)

    def addresses(self, spans):
        """Of (region, first, length)."""
        starts = [self.regions[region].address + first for region, first, _ in spans]
        return np.array(starts, dtype=np.uint64), np.array([n for _, _, n in spans], dtype=np.uint64)

    def joined(self, spans):
        return b"".join(self.arrays[region][first : first + n].tobytes() for region, first, n in spans)

    def put(self, spans, data):
        for region, first, n in spans:
            self.arrays[region][first : first + n] = np.frombuffer(data[:n], dtype=np.uint8)
            data = data[n:]


def filled(seed=0):
    world = World()
    for array in world.arrays:
        array[:] = np.random.default_rng(seed).integers(0, 256, array.size, dtype=np.uint8)
    return world


@st.composite
def span_lists(draw):
    """Pieces of either kind that do not overlap, in any order; some are rows of one size, some empty."""
    unit = draw(st.sampled_from([1, 8, 16]))
    cells = draw(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 9)), min_size=1, unique=True))
    return [(region, cell * 96, unit * draw(st.integers(0, 6))) for region, cell in cells]


@pytest.mark.parametrize("kind", KINDS)
@given(spans=span_lists())
def test_what_is_gathered_is_what_lies_there_and_scattered_it_is_in_place_again(kind, spans):
    source, target = filled(), World()
    data = source.joined(spans)
    if not data:
        return
    ours = kind(source.device, source.memory, 2, SLOT)
    theirs = kind(target.device, target.memory, 2, SLOT)
    ours.gather(1, Pieces(*source.addresses(spans)).between(0, len(data)))
    # The way of an engine: from slot to slot, by their addresses.
    host_bytes(theirs.slot_address(1), len(data))[:] = host_bytes(ours.slot_address(1), len(data))
    theirs.scatter(1, Pieces(*target.addresses(spans)).between(0, len(data)))
    expected = World()
    expected.put(spans, data)
    assert all((a == b).all() for a, b in zip(target.arrays, expected.arrays, strict=True))


@given(spans=span_lists())
def test_small_writes_of_either_kind_arrive_where_their_pieces_lie(spans):
    source, target = filled(), World()
    data = DeviceAuxDataCodec(source.device, source.memory).serialize_data_from_buffer(*source.addresses(spans))
    assert data == source.joined(spans)
    DeviceAuxDataCodec(target.device, target.memory).deserialize_data_to_buffer(data, *target.addresses(spans))
    assert target.joined(spans) == data


def test_a_small_write_of_another_size_is_refused_before_anything_is_written():
    world = World()
    with pytest.raises(ValueError, match="7 bytes for pieces of 8"):
        DeviceAuxDataCodec(world.device, world.memory).deserialize_data_to_buffer(
            bytes(7), *world.addresses([(0, 0, 4), (2, 0, 4)])
        )


def test_a_metadata_row_alone_does_not_go_over_the_gpu():
    world = filled()
    codec = DeviceAuxDataCodec(world.device, world.memory)
    assert codec.serialize_data_from_buffer(*world.addresses([(2, 0, 100)])) == world.joined([(2, 0, 100)])
    assert world.device.num_waits == 0


def test_one_piece_of_the_gpu_is_a_view_and_one_of_the_cpu_is_none():
    world = filled()

    def view(*spans):
        return world.memory.view(Ranges(*world.addresses(spans)))

    assert view((1, 5, 100)).numpy().tobytes() == world.joined([(1, 5, 100)])
    assert view((2, 5, 100)) is None
    assert view((0, 0, 8), (0, 8, 8)) is None


def test_page_locked_memory_is_unlocked_before_it_goes_and_its_addresses_stay():
    world = filled()
    staging = PinnedStaging(world.device, world.memory, 3, SLOT)
    assert world.device.locked == {staging.address: 3 * SLOT}
    staging.gather(0, Pieces(*world.addresses([(0, 0, SLOT)])).between(0, SLOT))
    staging.discard()
    assert world.device.locked == {}
    assert not host_bytes(staging.address, SLOT).any()
    # A late write.
    host_bytes(staging.address, SLOT)[:] = 1


def test_slots_on_the_gpu_are_read_only_after_what_the_network_wrote_is_seen():
    world = World()
    staging = DeviceStaging(world.device, world.memory, 1, SLOT)
    before = world.device.num_flushes
    assert before == 1
    staging.scatter(0, Pieces(*world.addresses([(0, 0, 8)])).between(0, 8))
    assert world.device.num_flushes == before + 1


def choice(world, wanted):
    return StagingChoice(wanted, lambda regions: world.device if any(map(world.device.holds, regions)) else None)


@pytest.mark.parametrize(
    ("wanted", "on_gpu", "kind"),
    [("host", False, ProcessStaging), ("host", True, PinnedStaging), ("gpu", True, DeviceStaging)],
)
def test_memory_and_option_say_which_buffers_there_are(wanted, on_gpu, kind):
    world = World()
    made = choice(world, wanted)
    made.register(world.regions if on_gpu else world.regions[2:])
    for staging in (made.to_send(1, SLOT), made.to_receive(1, SLOT)):
        assert isinstance(staging, kind)
        assert staging.gpu_id == (0 if kind is DeviceStaging else -1)


def test_an_unknown_staging_and_one_on_a_gpu_for_a_pool_of_the_cpu_are_refused():
    world = World()
    with pytest.raises(ConfigError, match=r"staging=nvme: choose one of host, gpu"):
        choice(world, "nvme")
    with pytest.raises(ConfigError, match=r"staging=gpu needs a KV pool on a GPU.*--device cuda"):
        choice(world, "gpu").register(world.regions[2:])


def test_buffers_on_the_gpu_that_peers_write_to_are_bounded_and_said_to_be_once(monkeypatch, caplog):
    monkeypatch.setattr("splitserve.transfer.transports.staging.MAX_GPU_BUFFERS", 2)
    world = World()
    made = choice(world, "gpu")
    made.register(world.regions)
    buffers = [made.to_receive(1, SLOT) for _ in range(4)]
    assert [type(buffer) for buffer in buffers] == [DeviceStaging, DeviceStaging, PinnedStaging, PinnedStaging]
    # No peer writes to buffers that are sent from: they are freed after they were read.
    assert isinstance(made.to_send(1, SLOT), DeviceStaging)
    assert [record.message for record in caplog.records if "2 connections" in record.message] == [
        "2 connections have had a staging buffer on the GPU, which stays allocated: from now on they get page-locked "
        "memory of the host, until this worker is started anew"
    ]
