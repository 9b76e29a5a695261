"""How a copy list is cut into the parts that NIXL gets; the library itself is not needed."""

import random

from splitserve.disaggregation.copies import copy_table, num_bytes
from splitserve.disaggregation.transports.nixl_requests import MAX_BATCH_BYTES, MAX_BATCH_PIECES, batches


def bytes_of(copies):
    """Every byte's way, at a resolution of 1 MiB."""
    step = 1 << 20
    return [
        (int(c["src_region"]), int(c["src_offset"]) + i, int(c["dst_region"]), int(c["dst_offset"]) + i)
        for c in copies
        for i in range(0, int(c["length"]), step)
    ]


def test_the_parts_hold_the_same_bytes_in_the_same_order_and_are_bounded():
    rng = random.Random(0)
    rows = [(i % 3, i << 40, i % 2, (i + 7) << 40, rng.choice([0, 1, 5, 30, 64, 65, 300]) << 20) for i in range(40)]
    copies = copy_table(rows)
    parts = batches(copies)
    assert [way for part in parts for way in bytes_of(part)] == bytes_of(copies)
    assert all(len(part) and part["length"].all() for part in parts)
    assert max(num_bytes(part) for part in parts) < 2 * MAX_BATCH_BYTES
    assert max(int(part["length"].max()) for part in parts) == MAX_BATCH_BYTES


def test_many_small_pieces_are_bounded_by_their_number():
    n = 2 * MAX_BATCH_PIECES + 1
    parts = batches(copy_table((0, 2 * i, 0, 2 * i, 1) for i in range(n)))
    assert [len(part) for part in parts] == [MAX_BATCH_PIECES, MAX_BATCH_PIECES, 1]


def test_nothing_to_copy_makes_no_part():
    assert batches(copy_table([])) == []
    assert batches(copy_table([(0, 0, 0, 8, 0)])) == []
