"""KV events on the wire: both forms, and what others write."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitserve.observe.events.schema import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventBatch,
    EventFormatError,
    decode,
    encode,
)

HASHES = st.lists(st.integers(-(2**63), 2**63 - 1), max_size=4)
EVENTS = st.one_of(
    st.builds(
        BlockStored,
        block_hashes=HASHES,
        parent_block_hash=st.none() | st.integers(-(2**63), 2**63 - 1),
        token_ids=st.lists(st.integers(0, 2**31), max_size=8),
        block_size=st.integers(1, 256),
        lora_id=st.none() | st.integers(0, 9),
        medium=st.sampled_from(["GPU", "CPU_PINNED", "DISK", None]),
    ),
    st.builds(BlockRemoved, block_hashes=HASHES, medium=st.sampled_from(["GPU", "CPU_PINNED"])),
    st.just(AllBlocksCleared()),
)
BATCHES = st.builds(EventBatch, ts=st.floats(0, 2e9), events=st.lists(EVENTS, max_size=4), dp_rank=st.integers(0, 7))

STORED = BlockStored([1, -2], None, [5, 6, 7, 8], 2)


@given(BATCHES, st.booleans())
def test_a_batch_survives_the_wire_in_either_form(batch, as_arrays):
    assert decode(encode(batch, as_arrays=as_arrays)) == batch


def test_events_are_maps_with_a_type():
    told = msgspec.msgpack.decode(encode(EventBatch(1.5, [STORED, AllBlocksCleared()], 3)))
    assert told == [
        1.5,
        [
            {
                "type": "BlockStored",
                "block_hashes": [1, -2],
                "parent_block_hash": None,
                "token_ids": [5, 6, 7, 8],
                "block_size": 2,
                "lora_id": None,
                "medium": "GPU",
                "lora_name": None,
            },
            {"type": "AllBlocksCleared"},
        ],
        3,
    ]


def test_by_option_events_are_arrays_with_their_name_first():
    told = msgspec.msgpack.decode(encode(EventBatch(1.5, [STORED, AllBlocksCleared()], 0), as_arrays=True))
    assert told[1] == [["BlockStored", [1, -2], None, [5, 6, 7, 8], 2, None, "GPU", None], ["AllBlocksCleared"]]


def test_what_others_leave_out_or_add_does_not_matter():
    short = ["BlockStored", [1], None, [5], 1]
    longer = {"type": "BlockRemoved", "block_hashes": [1], "medium": "GPU", "group": 7}
    data = msgspec.msgpack.encode([1.0, [short, longer]])
    assert decode(data) == EventBatch(1.0, [BlockStored([1], None, [5], 1), BlockRemoved([1])], None)


@pytest.mark.parametrize(
    "told",
    [7, [], [1.0], ["x", []], [1.0, [["Unknown", 1]]], [1.0, [{"type": "Unknown"}]], [1.0, [[]]], [1.0, [3]], [1.0, 5]],
)
def test_anything_else_is_an_error_of_the_format(told):
    with pytest.raises(EventFormatError):
        decode(msgspec.msgpack.encode(told))
    with pytest.raises(EventFormatError):
        decode(b"\xc1")
