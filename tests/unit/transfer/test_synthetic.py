"""Workers without a peer: a prefill worker that writes into a sink, and a decode worker with synthetic KV."""

import numpy as np
import pytest
import torch

from splitserve.core.clock import ManualClock
from splitserve.core.request import FAKE_BOOTSTRAP_HOST, BootstrapInfo, RoomKey
from splitserve.transfer.metadata import MetadataRow
from splitserve.transfer.reshard import RoomPages
from splitserve.transfer.state import KVPoll, RoomState
from splitserve.transfer.synthetic import synthetic_bytes
from splitserve.transfer.transports.fake import FakeLink, FakeTransport
from support.kv_world import PAGE_SIZE, KVWorld, layout

FAKE = BootstrapInfo(FAKE_BOOTSTRAP_HOST, 0, RoomKey(9))
# A link that needs a second for each page of a room.
PAGE_BYTES = layout().bytes_per_page


def world_of(role, *, delay=0.0):
    """A world in which the worker of this role has a sink instead of peers."""
    clock = ManualClock(100.0)
    world = KVWorld(**{role: {"sink": FakeTransport(FakeLink(PAGE_BYTES, delay), clock=clock)}})
    getattr(world, role).manager._context.clock = world.clock = clock
    return world


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_synthetic_bytes_are_finite_small_numbers_of_both_signs_in_every_dtype(dtype):
    values = torch.frombuffer(bytearray(synthetic_bytes(1 << 16)), dtype=dtype).float()
    assert values.isfinite().all()
    assert -2 < values.min() < 0 < values.max() < 2


def test_prefill_sends_all_bytes_of_a_room_into_the_sink_at_its_speed():
    world = world_of("prefill")
    manager = world.prefill.manager
    sender = manager.sender("p", FAKE, num_tokens=3 * PAGE_SIZE)
    assert sender.poll() is KVPoll.WAITING_FOR_INPUT
    sender.send([4, 5], is_last=False)
    manager.tick()
    world.set_row(9)
    sender.send([6], is_last=True, metadata_index=0)
    world.clock.advance(2.5)
    manager.tick()
    # The third page, and the metadata row.
    assert sender.poll() is KVPoll.TRANSFERRING
    assert not sender.quiescent()
    world.clock.advance(1000.0 / PAGE_BYTES * world.prefill.metadata.row_bytes)
    manager.tick()
    assert sender.poll() is KVPoll.SUCCESS
    stats = sender.stats()
    assert stats.num_bytes == 3 * PAGE_BYTES + world.prefill.metadata.row_bytes
    assert stats.peer == ""
    sender.clear()
    manager.tick()
    assert not manager._fakes
    assert not world.wires.busy()


def test_an_aborted_room_keeps_its_pages_until_the_sink_has_its_bytes():
    world = world_of("prefill")
    sender = world.prefill.manager.sender("p", FAKE, num_tokens=2 * PAGE_SIZE)
    sender.send([1], is_last=False)
    world.prefill.manager.tick()
    sender.abort("the client left")
    world.prefill.manager.tick()
    assert not sender.quiescent()
    world.clock.advance(1.0)
    world.prefill.manager.tick()
    assert sender.quiescent()


def received(world, pages, num_held_tokens=0):
    receiver = world.decode.manager.receiver("d", FAKE)
    num_tokens = PAGE_SIZE * len(pages) - 1
    receiver.init(pages, 7, num_tokens=num_tokens, num_held_tokens=num_held_tokens, prompt_ids=list(range(num_tokens)))
    return receiver


def test_decode_gets_the_same_kv_in_any_pages_and_nothing_around_it():
    world = world_of("decode")
    pools = []
    for pages in ([5, 6, 20], [9, 3, 8]):
        receiver = received(world, pages)
        world.clock.advance(2.0)
        world.decode.manager.tick()
        assert receiver.poll() is KVPoll.TRANSFERRING
        world.clock.advance(1.0)
        world.decode.manager.tick()
        assert receiver.poll() is KVPoll.SUCCESS
        row = world.decode.metadata.get_buf(7, FAKE.key)
        # The last token of the prompt.
        assert isinstance(row, MetadataRow)
        assert row.output_id == 3 * PAGE_SIZE - 2
        pools.append([component[pages].copy() for component in world.decode.pages])
        receiver.clear()
        world.decode.manager.tick()
    first, second = pools
    assert all((a == b).all() for a, b in zip(first, second, strict=True))
    for component in first:
        # Only the last token is not part of the prompt.
        assert component.reshape(-1)[: -component.shape[1] // PAGE_SIZE].all()
        assert not component.reshape(-1)[-component.shape[1] // PAGE_SIZE :].any()
    untouched = np.setdiff1d(np.arange(world.decode.layout.num_pages), [5, 6, 20, 9, 3, 8])
    assert not any(component[untouched].any() for component in world.decode.pages)
    assert not world.decode.manager._fakes


def test_tokens_that_decode_holds_are_left_as_they_are():
    world = world_of("decode")
    received(world, [1, 2], num_held_tokens=PAGE_SIZE)
    world.clock.advance(5.0)
    world.decode.manager.tick()
    assert not any(component[1].any() for component in world.decode.pages)
    assert all(component[2].any() for component in world.decode.pages)


def test_a_room_that_is_aborted_in_flight_gets_nothing_and_is_forgotten_after_its_write():
    world = world_of("decode")
    receiver = received(world, [1, 2])
    receiver.abort("the client left")
    assert receiver.quiescent()
    receiver.clear()
    world.decode.manager.tick()
    assert world.decode.manager._fakes
    world.clock.advance(5.0)
    world.decode.manager.tick()
    assert receiver.state is RoomState.CLOSED
    assert not world.decode.manager._fakes
    assert not any(component.any() for component in world.decode.pages)


def test_with_peers_a_fake_room_is_filled_at_once():
    world = KVWorld()
    receiver = received(world, [1, 2])
    assert receiver.poll() is KVPoll.SUCCESS
    copies = world.decode.manager._context.synthetic.copies(RoomPages([1, 2]), range(2 * PAGE_SIZE - 1))
    assert int(copies["length"].sum()) == sum(c[:2].size for c in world.decode.pages) // 8 * 7
    assert all(component[1].any() for component in world.decode.pages)


def test_a_slow_link_runs_into_the_deadline_of_a_transfer():
    world = world_of("decode", delay=1e6)
    receiver = received(world, [1, 2])
    world.clock.advance(61.0)
    world.decode.manager.tick()
    assert receiver.poll() is KVPoll.FAILED
    assert "waiting for its KV cache" in str(receiver.failure())
