"""How a copy list is cut into the parts that go to a library, or into a frame, at once."""

import random
from typing import cast

import numpy as np

from splitserve._native import tables
from splitserve._native.library import Int64Array
from splitserve.transfer.copies import Copies, copy_table, cut, joined, num_bytes, parts_of, select
from splitserve.transfer.outgoing import MAX_WRITE_BYTES, Outgoing
from splitserve.transfer.reshard import LayoutPlan
from splitserve.transfer.transports.base import PeerAddress, Transport

MAX_BYTES, MAX_PIECES = 64 << 20, 8192


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
    parts = parts_of(copies, MAX_BYTES, MAX_PIECES)
    assert [way for part in parts for way in bytes_of(part)] == bytes_of(copies)
    assert all(len(part) and part["length"].all() for part in parts)
    assert max(num_bytes(part) for part in parts) < 2 * MAX_BYTES
    assert max(int(part["length"].max()) for part in parts) == MAX_BYTES


class _Writes:
    """Transport that keeps the writes, which are done at once."""

    def __init__(self) -> None:
        self.tables: list[Copies] = []

    def write(self, peer: PeerAddress, copies: Copies) -> int:
        self.tables.append(copies)
        return len(self.tables)


def test_a_large_transfer_is_several_writes():
    transport = _Writes()
    outgoing = Outgoing(cast(Transport, transport), None)
    outgoing.begin_part(0.0)
    large = copy_table((0, i << 28, 0, i << 28, 100 << 20) for i in range(20))
    small = copy_table([(0, 0, 0, 0, 4096), (0, 8192, 0, 4096, 4096)])
    for copies in (large, small, small[:0]):
        outgoing.add(LayoutPlan(copies, []))
    outgoing.submit(cast(PeerAddress, None))
    *of_large, of_small = transport.tables
    assert [way for table in of_large for way in bytes_of(table)] == bytes_of(large)
    assert 1 < len(of_large) == len(outgoing) - 1
    assert max(num_bytes(table) for table in of_large) < 2 * MAX_WRITE_BYTES
    assert (of_small == small).all()


def test_many_small_pieces_are_bounded_by_their_number():
    n = 2 * MAX_PIECES + 1
    parts = parts_of(copy_table((0, 2 * i, 0, 2 * i, 1) for i in range(n)), MAX_BYTES, MAX_PIECES)
    assert [len(part) for part in parts] == [MAX_PIECES, MAX_PIECES, 1]


def test_tables_are_joined_and_picked_from_row_by_row_wherever_their_rows_lie():
    rows = [(i % 3, i * 10, i % 2, i * 7, i) for i in range(9)]
    table = copy_table(rows)
    assert joined([table[1::2], table[:0], table[::-2]]).tolist() == rows[1::2] + rows[::-2]
    assert select(table, table["length"] % 2 == 0).tolist() == rows[::2]
    assert select(table[::-1], np.array([0, 3, 3])).tolist() == [rows[8], rows[5], rows[5]]
    picked = select(table, np.array([4]))
    picked["length"] = 99
    assert table.tolist() == rows


def test_what_needs_no_cut_stays_as_it_is_and_the_rest_keeps_every_byte():
    whole = copy_table([(0, 0, 1, 5, 3), (1, 9, 0, 2, 4)])
    assert cut(whole, 4) is whole
    assert cut(copy_table([(0, 10, 1, 50, 7), (0, 0, 0, 0, 0), (1, 9, 0, 2, 3)]), 3).tolist() == [
        (0, 10, 1, 50, 3),
        (0, 13, 1, 53, 3),
        (0, 16, 1, 56, 1),
        (1, 9, 0, 2, 3),
    ]


def test_nothing_to_copy_makes_no_part():
    assert parts_of(copy_table([]), MAX_BYTES, MAX_PIECES) == []
    assert parts_of(copy_table([(0, 0, 0, 8, 0)]), MAX_BYTES, MAX_PIECES) == []


def test_addresses_are_the_same_from_c_and_from_numpy(monkeypatch):
    rng = random.Random(1)
    rows = [
        (rng.randrange(3), rng.randrange(1 << 40), rng.randrange(2), rng.randrange(1 << 40), 8 * i) for i in range(50)
    ]
    sources, targets = Int64Array([1 << 41, 1 << 42, 1 << 43]), Int64Array([1 << 44, 1 << 45])
    for copies in (copy_table(rows), copy_table(rows)[::3], copy_table([])):
        found, bits = tables.addresses(copies, sources, targets)
        with monkeypatch.context() as patch:
            patch.setattr(tables, "_library", None)
            expected, expected_bits = tables.addresses(copies, sources, targets)
        assert found.tolist() == expected.tolist()
        assert bits == expected_bits
