"""Scattered memory through a staging buffer, against copies made one by one."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitserve.transfer.transports.staging import AuxDataCodec, Pieces, ProcessStaging


def pieces_of(memory, spans):
    addresses = np.array([memory.ctypes.data + first for first, _ in spans], dtype=np.uint64)
    return addresses, np.array([length for _, length in spans], dtype=np.uint64)


def joined(memory, spans):
    return b"".join(memory[first : first + length].tobytes() for first, length in spans)


def counting(n):
    return (np.arange(n) % 251).astype(np.uint8)


spans_lists = st.lists(st.tuples(st.integers(0, 900), st.integers(0, 100)), min_size=1, max_size=30)


@given(spans_lists, st.data())
def test_a_part_of_the_stream_is_the_same_bytes_whatever_the_pieces(spans, data):
    memory = counting(1000)
    whole = joined(memory, spans)
    if not whole:
        return
    first = data.draw(st.integers(0, len(whole) - 1))
    end = data.draw(st.integers(first + 1, len(whole)))
    staging = ProcessStaging(2, 4096)
    staging.gather(1, Pieces(*pieces_of(memory, spans)).between(first, end))
    target = np.zeros(end - first, dtype=np.uint8)
    staging.scatter(1, Pieces(*pieces_of(target, [(0, len(target))])).between(0, len(target)))
    assert target.tobytes() == whole[first:end]


def test_more_pieces_than_one_system_call_takes_scatter_and_touch_nothing_else():
    n, page = 3000, 16
    source, target = counting(n * page), np.zeros(2 * n * page, dtype=np.uint8)
    staging = ProcessStaging(1, n * page)
    staging.gather(0, Pieces(*pieces_of(source, [(i * page, page) for i in range(n)])).between(0, n * page))
    staging.scatter(0, Pieces(*pieces_of(target, [(2 * i * page, page) for i in range(n)])).between(0, n * page))
    rows = target.reshape(n, 2, page)
    assert (rows[:, 0].reshape(-1) == source).all()
    assert not rows[:, 1].any()


def test_a_discarded_buffer_reads_zero_and_may_still_be_written_to():
    staging = ProcessStaging(1, 4096)
    source = np.full(4096, 7, dtype=np.uint8)
    staging.gather(0, Pieces(*pieces_of(source, [(0, 4096)])).between(0, 4096))
    address = staging.slot_address(0)
    staging.discard()
    zero = np.array([address], dtype=np.uint64)
    assert AuxDataCodec().serialize_data_from_buffer(zero, np.array([4096], dtype=np.uint64)) == bytes(4096)
    AuxDataCodec().deserialize_data_to_buffer(b"late", zero, np.array([4], dtype=np.uint64))


@given(spans_lists)
def test_aux_data_arrives_where_its_pieces_lie(spans):
    memory = counting(1000)
    addresses, lengths = pieces_of(memory, spans)
    data = AuxDataCodec().serialize_data_from_buffer(addresses, lengths)
    assert data == joined(memory, spans)
    target = np.zeros(len(data) + 1, dtype=np.uint8)
    ends = np.cumsum(lengths)
    AuxDataCodec().deserialize_data_to_buffer(data, np.uint64(target.ctypes.data) + ends - lengths, lengths)
    assert target.tobytes() == data + b"\0"


def test_aux_data_of_another_size_is_refused_before_anything_is_written():
    target = np.zeros(8, dtype=np.uint8)
    addresses, lengths = pieces_of(target, [(0, 4), (4, 4)])
    with pytest.raises(ValueError, match="7 bytes for pieces of 8"):
        AuxDataCodec().deserialize_data_to_buffer(b"1234567", addresses, lengths)
    assert not target.any()
