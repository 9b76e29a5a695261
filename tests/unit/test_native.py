"""The C functions and their slower twins do the same."""

import numpy as np
import pytest

from splitserve import _native
from splitserve._native import scatter_copy, scatter_copy_slowly

WAYS = {
    "slow": scatter_copy_slowly,
    "cached": lambda *table: scatter_copy(*table, streaming=False),
    "streaming": lambda *table: scatter_copy(*table, streaming=True),
}


@pytest.fixture(params=WAYS)
def copy(request):
    if request.param != "slow" and not _native.is_built:
        pytest.skip("installed without a C compiler")
    return WAYS[request.param]


def test_pieces_of_any_length_at_any_alignment_arrive_and_nothing_beside_them_changes(copy):
    random = np.random.default_rng(0)
    lengths = np.array(
        [0, 1, 15, 63, 64, 65, 511, 512, 1023, 1024, 1087, 1088, 1089, 4096, 70_001] * 3, dtype=np.uint64
    )
    random.shuffle(lengths)
    gaps = random.integers(1, 200, (2, len(lengths))).astype(np.uint64)
    sources, targets = (np.cumsum(lengths + gap) - lengths for gap in gaps)
    size = int(max(sources[-1], targets[-1]) + lengths[-1]) + 200
    here = random.integers(0, 256, size, dtype=np.uint8)
    there, expected = np.zeros(size, np.uint8), np.zeros(size, np.uint8)
    for s, t, n in zip(sources.tolist(), targets.tolist(), lengths.tolist(), strict=True):
        expected[t : t + n] = here[s : s + n]
    order = random.permutation(len(lengths))
    copy(targets[order] + np.uint64(there.ctypes.data), sources[order] + np.uint64(here.ctypes.data), lengths[order])
    assert (there == expected).all()


def test_no_pieces_are_no_work(copy):
    nothing = np.empty(0, dtype=np.uint64)
    copy(nothing, nothing, nothing)


def test_a_column_of_a_table_is_taken_for_lengths(copy):
    here, there = np.arange(16, dtype=np.uint8), np.zeros(16, np.uint8)
    table = np.zeros(2, dtype=[("other", "<u4"), ("length", "<u8")])
    table["length"] = 8
    offsets = np.array([0, 8], dtype=np.uint64)
    copy(offsets + np.uint64(there.ctypes.data), offsets + np.uint64(here.ctypes.data), table["length"])
    assert (there == here).all()
