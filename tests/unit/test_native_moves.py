"""Memory is moved the same in C, however it stores, and without."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitserve._native import moves, tables
from splitserve._native.library import Int64Array
from splitserve._native.moves import ScatterCopy, copy_few, gather_pieces, iovec_table, scatter_pieces
from splitserve.transfer.copies import copy_table, num_bytes

LENGTHS = [0, 1, 15, 63, 64, 65, 511, 512, 1023, 1024, 1087, 1088, 1089, 4096, 70_001] * 3


@pytest.fixture(params=["slow", "cached", 16, 32, 64])
def way(request, monkeypatch):
    """Without C, through the cache, past it by stores of so many bytes."""
    is_streaming = isinstance(request.param, int)
    if request.param == "slow":
        for module in (moves, tables):
            monkeypatch.setattr(module, "_library", None)
    elif not tables.is_built:
        pytest.skip("installed without a C compiler")
    elif is_streaming:
        if request.param > moves.STORE_BYTES:
            pytest.skip(f"this processor stores {moves.STORE_BYTES} bytes at most")
        monkeypatch.setattr(moves, "STORE_BYTES", request.param)
    for module, limit in ((moves, "STREAMING_BYTES"), (tables, "ORDERED_BYTES")):
        monkeypatch.setattr(module, limit, 1 if is_streaming else 1 << 62)


def scatter_copy(copies, sources, targets):
    return ScatterCopy(copies, num_bytes(copies), sources, targets)


def begins(array):
    """The one region that `array` is."""
    return Int64Array([array.ctypes.data])


def table(sources, targets, lengths):
    return copy_table((0, s, 0, t, n) for s, t, n in zip(sources, targets, lengths, strict=True))


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
    rows = table(sources[order].tolist(), targets[order].tolist(), lengths[order].tolist())
    copy = scatter_copy(rows, begins(here), begins(there))
    landed = 0
    while not copy.is_complete:
        copy.advance(part)
        landed = min(landed + part, int(lengths.sum()))
        assert copy.is_complete == (landed == lengths.sum())
    assert (there == expected).all()


@pytest.mark.parametrize("num_pieces", [1, len(LENGTHS)])
def test_few_bytes_are_copied_at_once(way, num_pieces):
    random = np.random.default_rng(3)
    lengths = random.permutation(np.array(LENGTHS, dtype=np.uint64))[:num_pieces].tolist()
    ends = np.cumsum(lengths).tolist()
    starts = [end - n for end, n in zip(ends, lengths, strict=True)]
    rows = table(starts, [start + 1 for start in starts], lengths)
    here, there = random.integers(0, 256, ends[-1], dtype=np.uint8), np.zeros(ends[-1] + 2, np.uint8)
    assert copy_few(rows, ends[-1], begins(here), begins(there), Int64Array([len(there)])) == ends[-1]
    assert (there[1:-1] == here).all()
    assert there[0] == there[-1] == 0


def test_of_too_many_bytes_none_is_copied_and_their_number_is_told(way):
    here, there = np.ones(4096, np.uint8), np.zeros(4096, np.uint8)
    rows = table([0, 2048], [0, 2048], [2048, 2048])
    assert copy_few(rows, 4095, begins(here), begins(there), Int64Array([4096])) == 4096
    assert not there.any()


@pytest.mark.parametrize(("region", "offset", "length"), [(0, 1, 4096), (0, 5000, 0), (1, 0, 1), (0, 1 << 63, 1 << 63)])
def test_where_one_target_is_outside_nothing_is_copied_and_it_is_named(way, region, offset, length):
    here, there = np.ones(4096, np.uint8), np.zeros(4096, np.uint8)
    rows = copy_table([(0, 0, 0, 0, 100), (0, 0, region, offset, length), (0, 0, 0, 100, 100)])
    assert copy_few(rows, 1 << 62, begins(here), begins(there), Int64Array([4096])) == ~1
    assert not there.any()


@pytest.mark.parametrize("part", [100_000, 777])
def test_threads_that_copy_together_take_each_byte_once(way, part):
    random = np.random.default_rng(2)
    lengths = random.permutation(np.array(LENGTHS, dtype=np.uint64)).tolist()
    ends = np.cumsum(lengths).tolist()
    starts = [end - n for end, n in zip(ends, lengths, strict=True)]
    here, there = random.integers(0, 256, ends[-1], dtype=np.uint8), np.zeros(ends[-1], np.uint8)
    copy = scatter_copy(table(starts, starts, lengths), begins(here), begins(there))
    taken = []

    def advance():
        while not copy.is_complete:
            copy.advance(part)
            taken.append(part)

    with ThreadPoolExecutor(3) as pool:
        for done in [pool.submit(advance) for _ in range(3)]:
            done.result()
    assert (there == here).all()
    # A thread may come too late for the last part.
    assert ends[-1] <= sum(taken) <= ends[-1] + 3 * part


def test_a_part_ends_on_the_byte(way):
    here, there = np.ones(5000, np.uint8), np.zeros(5000, np.uint8)
    copy = scatter_copy(table([0, 2500], [0, 2500], [2500, 2500]), begins(here), begins(there))
    copy.advance(3001)
    assert not copy.is_complete
    assert there[:3001].all()
    assert not there[3001:].any()
    copy.advance(1999)
    assert copy.is_complete
    assert there.all()


PAGES = st.lists(st.integers(0, 40) | st.integers(0, 9000), min_size=1, max_size=30, unique=True)


@given(pages=PAGES)
def test_pieces_of_a_large_copy_are_taken_by_the_pages_of_their_sources(pages):
    if not tables.is_built:
        pytest.skip("installed without a C compiler")
    memory, there = np.zeros(9002 * 4096, np.uint8), np.zeros(len(pages), np.uint8)
    base = -memory.ctypes.data % 4096
    memory[base + np.array(pages) * 4096 + 7] = np.arange(1, len(pages) + 1)
    rows = table([base + page * 4096 + 7 for page in pages], range(len(pages)), [1] * len(pages))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tables, "ORDERED_BYTES", 1)
        copy = scatter_copy(rows, begins(memory), begins(there))
    for place in np.argsort(pages):
        assert there[place] == 0
        copy.advance(1)
        assert there[place] == place + 1
    assert copy.is_complete


def test_no_pieces_are_complete_at_once(way):
    nothing = Int64Array([])
    assert scatter_copy(copy_table([]), nothing, nothing).is_complete


def test_copies_go_between_the_regions_that_they_name(way):
    here, there = (np.zeros((3, 100), np.uint8) for _ in range(2))
    here[:] = [[1], [2], [3]]
    copy = scatter_copy(
        copy_table([(2, 0, 0, 50, 10), (0, 90, 1, 0, 10), (1, 5, 2, 99, 1)]),
        Int64Array(row.ctypes.data for row in here),
        Int64Array(row.ctypes.data for row in there),
    )
    copy.advance(1 << 30)
    assert copy.is_complete
    expected = np.zeros((3, 100), np.uint8)
    expected[0, 50:60], expected[1, :10], expected[2, 99] = 3, 1, 2
    assert (there == expected).all()


def test_pieces_are_gathered_into_one_buffer_and_scattered_again(way):
    random = np.random.default_rng(1)
    lengths = random.permutation(np.array(LENGTHS, dtype=np.uint64))
    gaps = random.integers(1, 200, len(lengths)).astype(np.uint64)
    starts = np.cumsum(lengths + gaps) - lengths
    size, total = int(starts[-1] + lengths[-1]) + 200, int(lengths.sum())
    order = random.permutation(len(lengths))
    here, there = random.integers(0, 256, size, dtype=np.uint8), np.zeros(size, np.uint8)
    buffer, expected = np.full(total + 2, 7, np.uint8), np.zeros(size, np.uint8)
    spans = [(int(starts[i]), int(starts[i] + lengths[i])) for i in order]
    gather_pieces(iovec_table(starts[order] + np.uint64(here.ctypes.data), lengths[order]), buffer.ctypes.data + 1)
    assert (buffer[1:-1] == np.concatenate([here[first:end] for first, end in spans])).all()
    assert buffer[0] == buffer[-1] == 7
    scatter_pieces(buffer.ctypes.data + 1, iovec_table(starts[order] + np.uint64(there.ctypes.data), lengths[order]))
    for first, end in spans:
        expected[first:end] = here[first:end]
    assert (there == expected).all()
