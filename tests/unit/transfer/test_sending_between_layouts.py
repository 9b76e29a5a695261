"""Two managers with pools of different page size, axes and dtype. The cache arrives unchanged."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from splitserve.transfer.reshard import RoomPages, plan
from splitserve.transfer.state import KVPoll
from support.kv_world import KVWorld, layout

from .reshard_world import Cache, Kind

KINDS = [Kind(name, n, 2, 2) for n in range(2) for name in "kv"]


def cut(page_size, dtype="float32", axes="NHD", num_pages=64):
    whole = layout(num_pages, page_size=page_size, dtype=dtype, heads=2)
    return replace(whole, components=tuple(replace(c, axes=axes) for c in whole.components))


def world_of(source, target, *, step=False, slot_bytes=None, transfer_dtype=None):
    prefill = {"pool": source, "staging_slot_bytes": slot_bytes}
    return KVWorld(step=step, prefill=prefill, decode={"pool": target, "transfer_dtype": transfer_dtype})


def flat(worker):
    return [pages.reshape(-1) for pages in worker.pages]


def num_pages(num_tokens, pool):
    return -(-num_tokens // pool.page_size)


class Room:
    """A room with a random cache in prefill's pages, announced by decode."""

    def __init__(self, world, room, num_tokens, first_page=0):
        self.world, self.room, self.num_tokens = world, room, num_tokens
        source, target = world.prefill.layout, world.decode.layout
        self.src_pages = list(range(first_page, first_page + num_pages(num_tokens, source)))
        self.dst_pages = list(range(first_page, first_page + num_pages(num_tokens, target)))[::-1]
        self.cache = Cache(KINDS, num_tokens, source.components[0].dtype, seed=room)
        self.cache.place(source, flat(world.prefill), self.src_pages)
        self.sender, self.receiver = world.paired(room, self.dst_pages, num_tokens)
        world.set_row(room, index=room)

    def send(self, *ends):
        """In chunks that end before these source pages, and the rest."""
        first = 0
        for end in ends:
            self.sender.send(self.src_pages[first:end], is_last=False)
            first = end
        self.sender.send(self.src_pages[first:], is_last=True, metadata_index=self.room)

    def arrived(self):
        return self.sender.poll() is self.receiver.poll() is KVPoll.SUCCESS and self.holds()

    def holds(self):
        """Placing the cache into a copy of decode's pool changes nothing."""
        pools = [pool.copy() for pool in flat(self.world.decode)]
        self.cache.place(self.world.decode.layout, pools, self.dst_pages)
        return all((a == b).all() for a, b in zip(pools, flat(self.world.decode), strict=True))


@settings(deadline=None, max_examples=40)
@given(
    st.integers(1, 20),
    st.integers(1, 20),
    st.sampled_from(["NHD", "HND"]),
    st.sampled_from(["NHD", "HND"]),
    st.sampled_from(["float32", "bfloat16", "float16"]),
    st.integers(1, 60),
    st.data(),
)
def test_a_room_sent_in_chunks_arrives_whatever_the_two_pools_are_like(
    src_size, dst_size, src_axes, dst_axes, dtype, num_tokens, data
):
    world = world_of(cut(src_size, axes=src_axes), cut(dst_size, dtype, dst_axes), slot_bytes=256)
    room = Room(world, 1, num_tokens)
    room.send(*sorted(data.draw(st.sets(st.integers(1, num_tokens // src_size)))) if num_tokens >= src_size else ())
    world.tick(20)
    assert room.arrived()
    assert world.prefill.staging.num_taken == 0


def test_only_the_prompts_tokens_are_written_not_the_rest_of_the_last_page():
    world = world_of(cut(4), cut(4))
    world.decode.fill(range(64), seed=1)
    before = flat(world.decode)[0].copy()
    room = Room(world, 1, 5)
    room.send()
    world.tick()
    assert room.arrived()
    after = flat(world.decode)[0]
    tail = slice(room.dst_pages[1] * 64 + 16, room.dst_pages[1] * 64 + 64)
    assert (after[tail] == before[tail]).all()


def test_the_stats_tell_bytes_and_writes():
    world = world_of(cut(4), cut(4))
    room = Room(world, 1, 12)
    room.send(1)
    world.tick()
    stats = room.sender.stats()
    # Decode's pages run backwards, so that nothing is contiguous on both sides.
    assert stats.num_writes == 4 * 3 + 1
    assert stats.num_bytes == 4 * 3 * 64 + world.prefill.metadata.row_bytes


def test_axes_that_differ_are_packed_into_few_writes():
    source, target = cut(16), cut(16, axes="HND")
    packed, direct = world_of(source, target, slot_bytes=4096), world_of(source, target)
    writes = []
    for world in (packed, direct):
        room = Room(world, 1, 32)
        room.send()
        world.tick()
        assert room.arrived()
        writes.append(room.sender.stats().num_writes - 1)
    assert writes == [4 * 2, 4 * 32 * 2]


def test_a_full_staging_memory_holds_writes_back_until_there_is_room():
    world = world_of(cut(4), cut(4, "bfloat16"), step=True, slot_bytes=64)
    room = Room(world, 1, 60)
    room.send()
    world.tick()
    assert world.prefill.staging.num_taken == 2
    for _ in range(40):
        world.land()
        world.tick(1)
    assert room.arrived()
    assert world.prefill.staging.num_taken == 0


def test_a_session_that_is_stuck_leaves_staging_memory_to_the_others():
    world = world_of(cut(4), cut(4, "bfloat16"), step=True, slot_bytes=64)
    staging = world.prefill.staging
    Room(world, 1, 60).send()
    world.tick()
    (cast,) = plan(world.prefill.layout, world.decode.layout, RoomPages([0]), RoomPages([0]), range(4), 4).casts
    part = next(staging.parts(cast))
    assert staging.pack(part, world.network.busy_sessions()[0]) is None
    assert staging.pack(part, "another session") is not None


@pytest.mark.parametrize("end", ["abort", "lost"])
def test_a_room_that_fails_gives_its_staging_memory_back(end):
    world = world_of(cut(4), cut(4, "bfloat16"), step=True, slot_bytes=64)
    room = Room(world, 1, 60)
    room.send()
    world.tick()
    assert world.prefill.staging.num_taken > 0
    if end == "abort":
        room.sender.abort("client went away")
        world.land()
    else:
        world.decode.manager.close()
    world.tick()
    assert room.sender.poll() is KVPoll.FAILED
    assert room.sender.quiescent()
    assert world.prefill.staging.num_taken == 0


def test_rooms_that_wait_for_staging_memory_all_arrive():
    world = world_of(cut(4), cut(4, "float16"), slot_bytes=64)
    rooms = [Room(world, n, 20, first_page=10 * n) for n in range(1, 5)]
    for room in rooms:
        room.send(2)
    world.tick(60)
    assert [room.arrived() for room in rooms] == [True] * 4


def test_decodes_pages_must_hold_the_prompt():
    world = world_of(cut(4), cut(8))
    sender, receiver = world.paired(1, [3], num_tokens=12)
    sender.send([0, 1], is_last=False)
    sender.send([2], is_last=True, metadata_index=0)
    world.tick()
    assert "1 target pages of 8 tokens do not hold 12 tokens" in sender.failure().message
    assert receiver.poll() is KVPoll.FAILED


@pytest.mark.parametrize(
    ("source", "target", "options", "words"),
    [
        ("float32", "bfloat16", {}, "KV dtype float32 against bfloat16"),
        ("float32", "float32", {"transfer_dtype": "bfloat16"}, "KV dtype float32 against bfloat16"),
        ("bfloat16", "float16", {"slot_bytes": 64}, "bfloat16 against float16"),
        ("float16", "float32", {"slot_bytes": 64, "transfer_dtype": "bfloat16"}, "float16 against bfloat16"),
    ],
)
def test_a_prefill_that_cannot_convert_is_refused_at_pairing(source, target, options, words):
    world = world_of(cut(4, source), cut(4, target), **options)
    sender, receiver = world.sender(), world.receiver()
    world.tick()
    assert words in receiver.failure().message
    assert words in sender.failure().message


@pytest.mark.parametrize("wire_dtype", ["float8_e4m3fn", "bfloat16"])
@pytest.mark.parametrize("axes", ["NHD", "HND"])
def test_a_room_may_travel_in_a_narrower_dtype_than_either_pools(wire_dtype, axes):
    world = world_of(cut(4), cut(6, axes=axes), slot_bytes=256, transfer_dtype=wire_dtype)
    room = Room(world, 1, 21)
    values = {k: v.clip(-448, 448).astype(wire_dtype).astype(np.float32) for k, v in room.cache.values.items()}
    room.send(2, 4)
    world.tick(20)
    room.cache.values = values
    assert room.arrived()
    size = 1 if wire_dtype == "float8_e4m3fn" else 2
    assert room.sender.stats().num_bytes == 21 * 4 * 2 * 2 * size + world.prefill.metadata.row_bytes


def test_a_room_that_failed_is_not_widened():
    world = world_of(cut(4), cut(4), slot_bytes=256, transfer_dtype="bfloat16")
    room = Room(world, 1, 8)
    room.sender.send([0], is_last=False)
    world.tick()
    before = [pool.copy() for pool in flat(world.decode)]
    room.sender.abort("client went away")
    world.tick()
    assert room.receiver.poll() is KVPoll.FAILED
    assert all((a == b).all() for a, b in zip(before, flat(world.decode), strict=True))
