"""Bits of attention by the kernels: the same for a token in any step, in each build that this CPU can run."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from splitserve.engine.attention.base import AttentionParams
from splitserve.engine.kernels.library import KernelLibrary
from support.attended_sequence import AttendedSequence, chunkings, same_bits, sequence_with_zero_sums


@pytest.mark.parametrize(
    ("num_kv_heads", "group", "head_size", "window", "softcap"),
    [
        (3, 3, 64, None, None),
        # More KV heads than one task of a decode step has.
        (5, 1, 128, 100, None),
        (1, 8, 256, 700, 50.0),
        (1, 7, 48, None, 30.0),
        (2, 5, 16, 1, None),
        # Passes of two heads, and of one with a rest of a value.
        (1, 6, 80, None, None),
        (2, 1, 96, None, None),
    ],
)
@settings(max_examples=10)
@given(data=st.data())
def test_a_token_gets_thesame_bits_in_any_step(
    library: KernelLibrary,
    num_kv_heads: int,
    group: int,
    head_size: int,
    window: int | None,
    softcap: float | None,
    data: st.DataObject,
) -> None:
    if head_size % library.lanes:
        pytest.skip("the kernels do not support such heads")
    length = data.draw(st.sampled_from([1, 63, 64, 130, 511, 513, 1100]))
    params = AttentionParams(0.2, window=window, softcap=softcap)
    sequence = AttendedSequence(num_kv_heads, group, head_size, params, length)
    whole = sequence.attend(library, [length], few=0)
    chunks = data.draw(chunkings(length))
    torch.set_num_threads(data.draw(st.integers(1, 4)))
    found = sequence.attend(
        library, chunks, few=data.draw(st.sampled_from([0, 4, 16])), others=data.draw(st.integers(0, 3))
    )
    assert same_bits(found, whole)


def test_a_token_gets_thesame_bits_alone_as_in_its_prompt(library: KernelLibrary) -> None:
    sequence = AttendedSequence(3, 3, 64, AttentionParams(0.2), 600)
    assert same_bits(sequence.attend(library, [1] * 600, few=1), sequence.attend(library, [600], few=0))


def test_keys_without_a_weight_do_not_change_the_sign_of_zero(library: KernelLibrary) -> None:
    sequence = sequence_with_zero_sums()
    assert same_bits(sequence.attend(library, [1] * 600, few=1), sequence.attend(library, [600], few=0))
