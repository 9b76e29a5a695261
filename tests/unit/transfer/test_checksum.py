"""A room's KV compared end to end: alike however it was cut, different where one bit is."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitserve.core.layout import Region
from splitserve.transfer.pool_bytes import Checksums
from splitserve.transfer.reshard import RoomPages
from splitserve.transfer.state import KVPoll
from support.kv_world import KVWorld, layout


class Pool:
    def __init__(self, page_size):
        self.layout = layout(64, page_size=page_size)
        self.memory = [np.zeros(64 * c.page_bytes(page_size), np.uint8) for c in self.layout.components]
        self.checksums = Checksums(self.layout, [Region(m.ctypes.data, m.nbytes) for m in self.memory])

    def put(self, pages, tokens):
        """`tokens`: [component][token, bytes]."""
        size = self.layout.page_size
        for memory, rows in zip(self.memory, tokens, strict=True):
            slots = memory.reshape(-1, rows.shape[1])
            for t, row in enumerate(rows):
                slots[pages[t // size] * size + t % size] = row


@given(st.data(), st.integers(1, 40), st.integers(1, 9), st.integers(1, 9))
def test_both_sides_find_the_same_whatever_their_pages_and_chunks(data, n, source_size, target_size):
    source, target = Pool(source_size), Pool(target_size)
    rng = np.random.default_rng(n)
    tokens = [rng.integers(0, 256, (n, c.page_bytes(1)), dtype=np.uint8) for c in source.layout.components]
    ours = data.draw(st.permutations(range(64)))
    theirs = data.draw(st.permutations(range(64)))
    source.put(ours, tokens)
    target.put(theirs, tokens)
    pages = -(-n // source_size)
    cuts = sorted({0, *data.draw(st.lists(st.integers(0, pages))), pages})
    parts = [
        source.checksums.of(RoomPages(ours), range(a * source_size, min(b * source_size, n)), n, target_size)
        for a, b in itertools.pairwise(cuts)
    ]
    whole = target.checksums.of(RoomPages(theirs), range(n), n, source_size)
    assert sum(parts) % (1 << 64) == whole
    component, token = data.draw(st.integers(0, 3)), data.draw(st.integers(0, n - 1))
    tokens[component][token, data.draw(st.integers(0, 7))] ^= 1
    target.put(theirs, tokens)
    assert target.checksums.of(RoomPages(theirs), range(n), n, source_size) != whole


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_a_damaged_page_fails_its_room_where_one_side_asks_for_the_checksum(side):
    world = KVWorld(step=True, **{side: {"wants_checksum": True}})
    world.prefill.fill([1, 2, 3], seed=1)
    rooms = [world.paired(1, (5, 6, 7)), world.paired(2, (8, 9, 10))]
    for room, (sender, _) in enumerate(rooms, start=1):
        world.set_row(room, index=room)
        sender.send([1, 2], is_last=False)
        sender.send([3], is_last=True, metadata_index=room)
    world.prefill.manager.tick()
    world.land()
    world.decode.pages[0][9, 3] ^= 4
    world.tick()
    (_, whole), (_, damaged) = rooms
    assert whole.poll() is KVPoll.SUCCESS
    assert damaged.poll() is KVPoll.FAILED
    assert "arrived damaged" in damaged.failure().message
    assert damaged.quiescent()


def test_without_the_option_nothing_is_summed_up():
    world = KVWorld()
    sender, receiver = world.paired(1, (5,))
    world.set_row(1)
    sender.send([1], is_last=True, metadata_index=0)
    world.tick()
    assert receiver.poll() is KVPoll.SUCCESS
    assert list(receiver._checksums.values()) == [None]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ({"can_checksum": False}, "that the CPU can read"),
        ({"pool": layout(dtype="bfloat16")}, "one KV dtype"),
    ],
)
def test_pools_that_cannot_be_compared_are_refused_at_pairing(args, words):
    world = KVWorld(prefill={"wants_checksum": True, "can_convert": True}, decode=args)
    receiver = world.receiver(1)
    world.tick()
    assert receiver.poll() is KVPoll.FAILED
    assert words in receiver.failure().message
