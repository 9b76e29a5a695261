"""What `bench transfer` measures: each page once, in the order that is named, and no more than fits."""

from __future__ import annotations

import numpy as np
import pytest

from splitserve.tools.bench.transfer_plan import (
    FULL,
    GIB,
    KIB,
    MIB,
    TransferCase,
    batch_of,
    batches_a_run,
    copies_of,
    fits,
    latency_writes,
    memory_of,
)


@pytest.mark.parametrize("side", ["src_offset", "dst_offset"])
def test_scattered_pages_are_all_moved_once_and_in_no_order(side):
    copies = copies_of(TransferCase(4 * KIB, MIB, scattered=True))
    ends = np.sort(copies[side]) + copies["length"][np.argsort(copies[side])]
    assert copies["length"].sum() == MIB
    # Without a gap and without an overlap.
    assert list(np.sort(copies[side])[1:]) == list(ends[:-1])
    assert list(copies[side]) != sorted(copies[side])


def test_scattered_sources_and_targets_are_permuted_apart():
    copies = copies_of(TransferCase(4 * KIB, MIB, scattered=True))
    assert list(copies["src_offset"]) != list(copies["dst_offset"])
    assert len(copies) > 200


@pytest.mark.parametrize("page_bytes", FULL.page_sizes)
def test_contiguous_pages_coalesce_to_one_copy(page_bytes):
    copies = copies_of(TransferCase(page_bytes, 4 * MIB, scattered=False))
    assert copies.tolist() == [(0, 0, 0, 0, 4 * MIB)]


def test_the_full_plan_covers_pages_and_totals_from_the_smallest_to_the_largest():
    assert (FULL.page_sizes[0], FULL.page_sizes[-1]) == (4 * KIB, 4 * MIB)
    assert (FULL.totals[0], FULL.totals[-1]) == (MIB, GIB)
    assert FULL.runs == 5
    cases = list(FULL.cases(GIB))
    assert {(c.page_bytes, c.scattered) for c in cases} == {(p, s) for p in FULL.page_sizes for s in (True, False)}


def test_no_case_has_pages_larger_than_all_of_it():
    assert max(c.page_bytes for c in FULL.cases(MIB)) == MIB


def test_small_totals_are_sent_often_enough_to_be_timed():
    assert all(batches_a_run(total) * memory_of(total) >= GIB for total in FULL.totals)
    assert batches_a_run(GIB) == 1


@pytest.mark.parametrize("scattered", [True, False])
def test_small_writes_go_many_at_once_over_all_of_the_memory(scattered):
    writes = batch_of(TransferCase(4 * KIB, MIB, scattered))
    assert len(writes) == 64
    for side in ("src_offset", "dst_offset"):
        rows = np.concatenate(writes)
        order = np.argsort(rows[side])
        ends = rows[side][order] + rows["length"][order]
        assert rows[side].min() == 0
        assert (rows[side][order][1:] == ends[:-1]).all()
        assert ends[-1] == memory_of(MIB) == 64 * MIB


def test_a_large_write_goes_alone():
    assert len(batch_of(TransferCase(4 * MIB, 64 * MIB, scattered=True))) == 1
    assert memory_of(GIB) == GIB


def test_a_percentile_has_enough_writes_behind_it():
    assert all(latency_writes(page_bytes) >= 100 for page_bytes in FULL.page_sizes)


def test_a_total_fits_where_four_buffers_leave_half_of_the_memory_that_is_available():
    assert fits(GIB, 8 * GIB)
    assert not fits(GIB, 8 * GIB - 1)
