"""The row that travels with the KV cache."""

import ctypes

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitserve.core.batch import TokenLogprob
from splitserve.core.errors import CapacityError, KVTransferError
from splitserve.core.request import RoomKey
from splitserve.transfer.metadata import (
    FIELD_ALIGNMENT,
    MetadataBuffers,
    MetadataRow,
    ReqToMetadataIdxAllocator,
    RowWidths,
)

tokens = st.integers(0, 1 << 40)
logprobs = st.floats(max_value=0.0, allow_nan=False)
widths = st.builds(RowWidths, top_logprobs=st.integers(0, 130), hidden_state=st.integers(1, 200))


def rows(widths: RowWidths) -> st.SearchStrategy[MetadataRow]:
    """Return a strategy of rows with fields of any length up to these widths."""
    top = st.lists(st.tuples(tokens, logprobs), max_size=widths.top_logprobs).map(tuple)
    num_bytes = 4 * widths.hidden_state
    states = st.binary(min_size=num_bytes, max_size=num_bytes)
    return st.builds(
        MetadataRow,
        key=st.builds(RoomKey, st.integers(0, (1 << 63) - 1), st.integers(0, 1000)),
        output_id=tokens,
        num_cached_tokens=st.integers(0, 1 << 30),
        logprob=st.none() | st.builds(TokenLogprob, tokens, logprobs, top),
        hidden_state=st.none() | states,
    )


@given(widths, st.data())
def test_a_row_of_any_widths_reads_as_it_was_written_after_any_other_row(widths, data):
    buffers = MetadataBuffers(2, widths)
    found = []
    written = data.draw(st.lists(rows(widths), min_size=1, max_size=4))
    for row in written:
        buffers.set_buf(1, row)
        found.append(buffers.get_buf(1, row.key))
    # Rows that were read are copies: a later row does not change them.
    assert found == written


@given(rows(RowWidths(hidden_state=4)), st.data())
def test_any_flipped_bit_that_matters_is_torn(row, data):
    buffers = MetadataBuffers(1, RowWidths(hidden_state=4))
    buffers.set_buf(0, row)
    region = buffers.region()
    memory = (ctypes.c_uint8 * region.length).from_address(region.address)
    # The checksum field's own padding carries nothing.
    position = data.draw(st.integers(0, region.length - FIELD_ALIGNMENT + 7))
    memory[position] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(KVTransferError, match="torn"):
        buffers.get_buf(0, row.key)


def test_a_row_of_another_room_is_foreign():
    buffers = MetadataBuffers(1)
    buffers.set_buf(0, MetadataRow(RoomKey(1, 0), 5))
    with pytest.raises(KVTransferError, match="foreign: it holds room 1/0, not 1/1"):
        buffers.get_buf(0, RoomKey(1, 1))


def test_a_row_nobody_wrote_is_torn():
    with pytest.raises(KVTransferError, match="torn"):
        MetadataBuffers(1).get_buf(0, RoomKey(0))


def test_fields_share_no_64_bytes_and_rows_follow_each_other():
    buffers = MetadataBuffers(3, RowWidths(hidden_state=100))
    offsets = [offset for _, offset in buffers._dtype.fields.values()]
    assert all(offset % FIELD_ALIGNMENT == 0 for offset in offsets)
    assert len(set(offsets)) == len(offsets)
    assert buffers.row_bytes % FIELD_ALIGNMENT == 0
    assert buffers.region().length == 3 * buffers.row_bytes
    buffers.set_buf(1, MetadataRow(RoomKey(1), 5))
    assert not np.any(buffers._bytes[[0, 2]])


def test_what_does_not_fit_is_refused():
    buffers = MetadataBuffers(1, RowWidths(top_logprobs=1))
    with pytest.raises(ValueError, match="2 top logprobs, the row holds 1"):
        buffers.set_buf(0, MetadataRow(RoomKey(1), 5, logprob=TokenLogprob(5, -1.0, ((5, -1.0), (6, -2.0)))))
    for name in ("hidden_state", "draft_state"):
        with pytest.raises(ValueError, match=f"{name} of 1 numbers, the row holds 0"):
            buffers.set_buf(0, MetadataRow(RoomKey(1), 5, **{name: bytes(4)}))


def test_a_row_carries_the_state_of_a_draft_head():
    buffers = MetadataBuffers(1, RowWidths(draft_state=3))
    state = np.arange(3, dtype=np.float32).tobytes()
    buffers.set_buf(0, MetadataRow(RoomKey(1), 5, draft_state=state))
    assert buffers.get_buf(0, RoomKey(1)).draft_state == state
    buffers.set_buf(0, MetadataRow(RoomKey(2), 5))
    assert buffers.get_buf(0, RoomKey(2)).draft_state is None
    assert "give both workers the same --speculative-algorithm" in (buffers.widths.difference(RowWidths()) or "")


def test_rows_are_handed_out_once_and_taken_back_once():
    slots = ReqToMetadataIdxAllocator(2)
    a, b = slots.alloc(), slots.alloc()
    assert {a, b} == {0, 1}
    assert slots.available_size() == 0
    with pytest.raises(CapacityError, match="--num-metadata-slots"):
        slots.alloc()
    slots.free(a)
    with pytest.raises(ValueError, match="not allocated"):
        slots.free(a)
    assert slots.available_size() == 1
    assert slots.alloc() == a
