"""Cutting writes into pieces, and moving many ranges at once."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitserve.transfer.transports import tensors
from splitserve.transfer.transports.tensors import ProcessMemory, Ranges, as_rows, cut

LENGTHS = st.lists(st.sampled_from([0, 1, 7, 48, 4096, tensors.DIRECT_BYTES - 1, tensors.DIRECT_BYTES, 9 << 20]))


def u64(values):
    return np.array(values, dtype=np.uint64)


def scattered(lengths, seed=0):
    """Ranges of these lengths in a random order over fresh memory, and that memory."""
    order = np.random.default_rng(seed).permutation(len(lengths))
    memory = np.random.default_rng(seed + 1).integers(0, 256, sum(lengths), dtype=np.uint8)
    offsets = np.zeros(len(lengths), dtype=np.int64)
    offsets[order] = np.cumsum([0, *np.array(lengths)[order][:-1]])
    return Ranges(u64(offsets) + np.uint64(memory.ctypes.data), u64(lengths)), memory, offsets


@given(LENGTHS)
def test_the_pieces_are_all_bytes_in_order_each_of_bounded_size(lengths):
    addresses = u64(1000 + 2 * np.cumsum([0, *lengths])[:-1])
    spans = []
    for piece in cut(addresses, u64(lengths)):
        assert 0 < piece.num_bytes <= tensors.PIECE_BYTES
        spans += zip(piece.addresses.tolist(), piece.lengths.tolist(), strict=True)
    joined = []
    for address, length in spans:
        if joined and sum(joined[-1]) == address:
            joined[-1] = (joined[-1][0], joined[-1][1] + length)
        else:
            joined.append((address, length))
    assert joined == [(a, n) for a, n in zip(addresses.tolist(), lengths, strict=True) if n]


@given(LENGTHS)
def test_both_ends_cut_alike_wherever_the_bytes_lie(lengths):
    here = [piece.lengths.tolist() for piece in cut(u64(range(len(lengths))), u64(lengths))]
    there = [piece.lengths.tolist() for piece in cut(u64([1 << 40] * len(lengths)), u64(lengths))]
    assert here == there


@pytest.mark.parametrize(
    "lengths",
    [[4096] * 300, [4096, 8192, 12288] * 50, [48] * 1000, [1, 2, 3, 5, 4096], [640]],
    ids=["one size", "multiples", "small", "odd", "one"],
)
def test_gathered_bytes_are_in_order_and_scattered_ones_in_place(lengths):
    ranges, memory, offsets = scattered(lengths)
    parts = [memory[o : o + n] for o, n in zip(offsets, lengths, strict=True)]
    host = ProcessMemory()
    stage = host.stage()
    assert (host.gather(ranges, stage).numpy() == np.concatenate(parts)).all()
    target = Ranges(ranges.addresses[::-1].copy(), ranges.lengths[::-1].copy())
    expected = [part.copy() for part in parts]
    host.scatter(stage[: ranges.num_bytes], ranges)
    assert all((a == b).all() for a, b in zip(parts, expected, strict=True))
    if len(set(lengths)) == 1:
        host.scatter(stage, target)
        assert all((a == b).all() for a, b in zip(parts, expected[::-1], strict=True))


def test_ranges_of_one_size_are_one_row_each_and_odd_ones_no_rows_at_all():
    ranges, _, _ = scattered([4096] * 10)
    rows = as_rows(ranges)
    assert rows is not None
    assert (rows.unit, len(rows.indices)) == (4096, 10)
    assert as_rows(scattered([4096, 4097])[0]) is None


def test_one_range_is_the_memory_itself():
    ranges, memory, _ = scattered([100])
    ProcessMemory().view(ranges)[0] = 7
    assert memory[0] == 7
    assert ProcessMemory().view(scattered([100, 100])[0]) is None
