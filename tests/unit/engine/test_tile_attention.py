"""Attention by tile instructions (AMX): equal to attention in float64, and the same bits for a token in any step."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from splitserve.engine.attention.base import AttentionParams
from splitserve.engine.kernels.library import KernelLibrary, find_library
from support.attended_sequence import AttendedSequence, chunkings, same_bits, sequence_with_zero_sums

pytestmark = pytest.mark.skipif(find_library() is None, reason="installed without a C compiler")

# Multiples of the 32 numbers of a tile's row, and others.
SIZES = (16, 32, 48, 64, 80, 112, 128, 256)
# Lengths beside the limits of tiles, blocks and parts.
LENGTHS = (1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 100)
PAGE_SIZES = (1, 5, 16, 48, 64)


def check_equals_float64(library: KernelLibrary, sequence: AttendedSequence, few: int = 0) -> None:
    found = sequence.attend(library, [sequence.length], few)
    torch.testing.assert_close(found.double(), sequence.attend_in_float64(), rtol=0.02, atol=0.02)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("length", LENGTHS)
def test_prompts_of_any_size(tiled: KernelLibrary, size: int, length: int) -> None:
    check_equals_float64(tiled, AttendedSequence(2, 3, size, AttentionParams(size**-0.5), length))


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("length", [511, 512, 513])
@pytest.mark.parametrize("few", [0, 1000])
def test_prompts_and_decode_steps_over_parts(tiled: KernelLibrary, page_size: int, length: int, few: int) -> None:
    check_equals_float64(tiled, AttendedSequence(1, 2, 64, AttentionParams(0.125), length, page_size), few)


@st.composite
def sequences(draw: st.DrawFn) -> AttendedSequence:
    params = AttentionParams(
        draw(st.sampled_from([0.1, 0.5])),
        window=draw(st.sampled_from([None, 1, 16, 50, 200])),
        softcap=draw(st.sampled_from([None, None, 5.0])),
    )
    return AttendedSequence(
        draw(st.integers(1, 3)),
        draw(st.integers(1, 8)),
        draw(st.sampled_from(SIZES)),
        params,
        draw(st.sampled_from([*LENGTHS, 191, 300, 513])),
        draw(st.sampled_from(PAGE_SIZES)),
        draw(st.sampled_from([None, *SIZES])),
    )


@settings(max_examples=60)
@given(sequence=sequences(), few=st.sampled_from([0, 1000]))
def test_equals_attention_in_float64(tiled: KernelLibrary, sequence: AttendedSequence, few: int) -> None:
    check_equals_float64(tiled, sequence, few)


@settings(max_examples=60)
@given(sequence=sequences(), data=st.data())
def test_a_token_gets_the_same_bits_in_any_step(
    tiled: KernelLibrary, sequence: AttendedSequence, data: st.DataObject
) -> None:
    torch.set_num_threads(1)
    whole = sequence.attend(tiled, [sequence.length], few=0)
    chunks = data.draw(chunkings(sequence.length))
    torch.set_num_threads(data.draw(st.integers(1, 3)))
    few, others = data.draw(st.sampled_from([0, 4, 16, 1000])), data.draw(st.integers(0, 3))
    assert same_bits(sequence.attend(tiled, chunks, few, others), whole)


@pytest.mark.parametrize(("size", "group"), [(64, 3), (48, 8), (256, 1)])
def test_a_token_gets_the_same_bits_alone_as_in_its_prompt(tiled: KernelLibrary, size: int, group: int) -> None:
    sequence = AttendedSequence(2, group, size, AttentionParams(0.2), 530)
    assert same_bits(sequence.attend(tiled, [1] * 530, few=1), sequence.attend(tiled, [530], few=0))


def test_keys_without_a_weight_do_not_change_the_sign_of_zero(tiled: KernelLibrary) -> None:
    sequence = sequence_with_zero_sums()
    assert same_bits(sequence.attend(tiled, [1] * 600, few=1), sequence.attend(tiled, [600], few=0))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("few", [0, 1000])
def test_other_heads_are_not_read(tiled: KernelLibrary, size: int, few: int) -> None:
    """The head before and the one after are NaN."""
    sequence = AttendedSequence(3, 2, size, AttentionParams(0.2), 70)
    expected = sequence.attend(tiled, [70], few)
    for tensor in sequence.tensors[1:]:
        tensor[:, [0, 2]] = torch.nan
    found = sequence.attend(tiled, [70], few)
    assert same_bits(found[:, 2:4], expected[:, 2:4])
    assert found[:, [0, 1, 4, 5]].isnan().all()


@pytest.mark.parametrize("few", [0, 1000])
def test_the_instructions_are_used_if_the_library_permits_it(
    tiled_library: KernelLibrary, few: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sums of pairs have another order."""
    sequence = AttendedSequence(1, 3, 128, AttentionParams(0.2), 200)
    tiled = sequence.attend(tiled_library, [200], few)
    monkeypatch.setattr(tiled_library, "multiplies_tiles", False)
    assert not same_bits(sequence.attend(tiled_library, [200], few), tiled)


def test_the_build_for_bfloat16_contains_the_instructions(instructions_of_build: Callable[..., bytes]) -> None:
    code = instructions_of_build("--disassemble")
    functions = [part for part in code.split(b"\n\n") if b"tdpbf16ps" in part]
    # Linear layers, the peak, prompts and decode steps.
    assert len(functions) >= 4
