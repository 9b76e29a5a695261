"""Tables of copies: the C functions and their slower twins do the same."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitserve._native import tables
from splitserve._native.library import Int64Array, open_library
from splitserve._native.tables import blocks_of, bytes_inside, coalesce, in_source_order, parts_of
from splitserve.transfer.copies import copy_table, num_bytes

U64 = st.integers(0, 2**64 - 1) | st.integers(0, 200)


@given(
    rows=st.lists(st.tuples(st.integers(0, 4), U64, st.integers(0, 4), U64, U64), max_size=6),
    lengths=st.lists(st.integers(0, 150), max_size=4),
    is_target=st.booleans(),
)
def test_copies_are_added_up_unless_one_is_outside_its_region(rows, lengths, is_target):
    def is_inside(row):
        region, offset, length = (*row[2:4], row[4]) if is_target else (*row[:2], row[4])
        return region < len(lengths) and offset + length <= lengths[region]

    expected = next((~i for i, row in enumerate(rows) if not is_inside(row)), sum(row[4] for row in rows))
    copies, limits = copy_table(rows), Int64Array(lengths)
    assert bytes_inside(copies, limits, is_target=is_target) == expected
    assert tables._bytes_inside_slowly(copies, limits.array, "dst" if is_target else "src") == expected


FEW = st.integers(0, 3)
STEPS = st.lists(st.tuples(st.integers(0, 1), FEW, st.integers(0, 1), FEW, FEW), max_size=12)


@given(steps=STEPS, every=st.integers(1, 2))
def test_what_goes_on_where_the_last_one_ended_joins_it(steps, every):
    rows, ends = [], [0, 0]
    for src, gap, dst, other_gap, length in steps:
        rows.append((src, ends[0] + (gap == 3), dst, ends[1] + (other_gap == 3), length))
        ends = [rows[-1][1] + length, rows[-1][3] + length]
    rows = rows[::every]
    expected = []
    for src, at, dst, to, length in rows:
        if expected and (a := expected[-1])[:4] == [src, at - a[4], dst, to - a[4]]:
            a[4] += length
        else:
            expected.append([src, at, dst, to, length])
    copies = copy_table(rows)
    assert [list(row) for row in coalesce(copies).tolist()] == expected
    if len(rows) > 1:
        assert [list(row) for row in tables._coalesce_slowly(copies).tolist()] == expected
    assert [list(row) for row in copies.tolist()] == [list(row) for row in rows]


@given(
    rows=st.lists(st.tuples(FEW, U64, FEW, U64, st.integers(0, 30)), max_size=12),
    max_bytes=st.integers(1, 20),
    max_pieces=st.integers(1, 5),
)
def test_parts_hold_the_same_bytes_in_order_in_bounded_tables(rows, max_bytes, max_pieces):
    def every_byte(copies):
        return [(s, (a + i) % 2**64, d, (b + i) % 2**64) for s, a, d, b, n in copies.tolist() for i in range(n)]

    copies = copy_table(rows)
    parts = parts_of(copies, max_bytes, max_pieces)
    assert [byte for part in parts for byte in every_byte(part)] == every_byte(copies)
    for part in parts:
        assert 0 < len(part) <= max_pieces
        assert 0 < part["length"].min() <= part["length"].max() <= max_bytes
        assert num_bytes(part) < 2 * max_bytes
    if len(copies) > max_pieces or num_bytes(copies) > max_bytes:
        slowly = tables._parts_slowly(copies, max_bytes, max_pieces)
        assert [part.tolist() for part in parts] == [part.tolist() for part in slowly]


@given(
    rows=st.lists(st.tuples(FEW, st.integers(0, 9), FEW, st.integers(0, 9), st.integers(1, 2)), max_size=6),
    scale=st.integers(1, 5),
    is_target=st.booleans(),
    num_regions=FEW,
)
def test_pieces_are_numbered_as_blocks_of_one_size_unless_one_is_none(rows, scale, is_target, num_regions):
    copies = copy_table((s, a * 2, d, b * scale, n * scale) for s, a, d, b, n in rows)
    firsts, side = Int64Array(i * 1000 for i in range(num_regions)), 2 if is_target else 0
    ends = [(row[side], row[side + 1], row[4]) for row in copies.tolist()]
    are_blocks = all(n == scale and region < num_regions and at % scale == 0 for region, at, n in ends)
    expected = [region * 1000 + at // scale for region, at, _ in ends] if are_blocks else None
    for found in (
        blocks_of(copies, scale, firsts, is_target=is_target),
        tables._blocks_slowly(copies, np.uint64(scale), firsts.array, "dst" if is_target else "src"),
    ):
        assert (None if found is None else found.tolist()) == expected


def test_few_bytes_stay_in_their_order(monkeypatch):
    rows = copy_table([(0, 8192, 0, 0, 1), (0, 0, 0, 1, 1)])
    assert in_source_order(rows, 2, Int64Array([0])) is rows
    monkeypatch.setattr(tables, "_library", None)
    assert in_source_order(rows, 1 << 40, Int64Array([0])) is rows


@pytest.mark.parametrize("is_native", [True, False])
def test_rows_that_do_not_lie_together_are_joined_and_numbered_too(is_native, monkeypatch):
    if not is_native:
        monkeypatch.setattr(tables, "_library", None)
    copies = copy_table([(0, 4, 0, 8, 4), (1, 0, 1, 0, 1), (0, 8, 0, 12, 4), (1, 1, 1, 1, 1)])
    assert coalesce(copies[::2]).tolist() == [(0, 4, 0, 8, 8)]
    assert blocks_of(copies[::2], 4, Int64Array([10]), is_target=True).tolist() == [12, 13]


def test_a_build_of_other_sources_says_what_to_do():
    if not tables.is_built:
        pytest.skip("installed without a C compiler")
    with pytest.raises(ImportError, match=r"copies.* was built from other sources, install splitserve again.*no_such"):
        open_library("copies", lambda library: library.no_such_function.argtypes)
    assert open_library("no_such_library", lambda library: None) is None
