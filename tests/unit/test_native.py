"""The C functions and their slower twins do the same."""

import numpy as np
import pytest

from splitserve import _native
from splitserve._native import ScatterCopy

LENGTHS = [0, 1, 15, 63, 64, 65, 511, 512, 1023, 1024, 1087, 1088, 1089, 4096, 70_001] * 3


@pytest.fixture(params=["slow", "cached", "streaming"])
def way(request, monkeypatch):
    if request.param == "slow":
        monkeypatch.setattr(_native, "_library", None)
    elif not _native.is_built:
        pytest.skip("installed without a C compiler")
    for limit in ("STREAMING_BYTES", "ORDERED_BYTES"):
        monkeypatch.setattr(_native, limit, 1 if request.param == "streaming" else 1 << 62)


def address(array):
    return np.uint64(array.ctypes.data)


@pytest.mark.parametrize("part", [1 << 30, 100_000, 777])
def test_pieces_of_any_length_at_any_alignment_arrive_and_nothing_beside_them_changes(way, part):
    random = np.random.default_rng(0)
    lengths = random.permutation(np.array(LENGTHS, dtype=np.uint64))
    gaps = random.integers(1, 200, (2, len(lengths))).astype(np.uint64)
    sources, targets = (np.cumsum(lengths + gap) - lengths for gap in gaps)
    size = int(max(sources[-1], targets[-1]) + lengths[-1]) + 200
    here = random.integers(0, 256, size, dtype=np.uint8)
    there, expected = np.zeros(size, np.uint8), np.zeros(size, np.uint8)
    for s, t, n in zip(sources.tolist(), targets.tolist(), lengths.tolist(), strict=True):
        expected[t : t + n] = here[s : s + n]
    order = random.permutation(len(lengths))
    copy = ScatterCopy(targets[order] + address(there), sources[order] + address(here), lengths[order])
    landed = 0
    while not copy.is_complete:
        copy.advance(part)
        landed = min(landed + part, int(lengths.sum()))
        done = int(copy._table[2][: copy._at.piece].sum()) + copy._at.offset
        assert done == landed
    assert (there == expected).all()


def test_a_part_ends_on_the_byte(way):
    here, there = np.ones(5000, np.uint8), np.zeros(5000, np.uint8)
    half = np.array([2500, 2500], dtype=np.uint64)
    starts = np.array([0, 2500], dtype=np.uint64)
    copy = ScatterCopy(starts + address(there), starts + address(here), half)
    copy.advance(3001)
    assert not copy.is_complete
    assert there[:3001].all()
    assert not there[3001:].any()
    copy.advance(1999)
    assert copy.is_complete
    assert there.all()


def test_pieces_of_a_large_copy_are_taken_in_the_order_of_their_sources(monkeypatch):
    monkeypatch.setattr(_native, "ORDERED_BYTES", 1)
    here, there = np.arange(1, 101, dtype=np.uint8), np.zeros(100, np.uint8)
    sources = np.array([70, 10, 40], dtype=np.uint64)
    targets = np.array([0, 10, 20], dtype=np.uint64)
    copy = ScatterCopy(targets + address(there), sources + address(here), np.full(3, 10, dtype=np.uint64))
    for first, target in ((11, 10), (41, 20), (71, 0)):
        copy.advance(10)
        assert (there[target : target + 10] == np.arange(first, first + 10)).all()
    assert copy.is_complete


def test_no_pieces_are_complete_at_once(way):
    nothing = np.empty(0, dtype=np.uint64)
    assert ScatterCopy(nothing, nothing, nothing).is_complete
