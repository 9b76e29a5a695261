"""Prompts: exact lengths as ids and as text, equal seeds equal prompts, shared blocks shared."""

from __future__ import annotations

import zlib

from hypothesis import given
from hypothesis import strategies as st

from splitserve.tools.bench.workload import PromptMaker


def words(text):
    return [zlib.crc32(word.encode()) % 50_000 for word in text.split()]


def letters(text):
    return [ord(c) for c in text]


@given(st.integers(1, 3000), st.integers(0, 5))
def test_a_prompt_has_the_same_exact_length_as_ids_and_as_text(num_tokens, seed):
    prompt = PromptMaker(words, seed).make(num_tokens)
    assert len(prompt.ids) == num_tokens
    assert words(prompt.text) == prompt.ids


def test_where_words_have_several_tokens_prompts_are_exact_but_have_no_text():
    prompts = [PromptMaker(letters).make(n) for n in (1, 7, 128)]
    assert [(len(p.ids), p.text) for p in prompts] == [(1, ""), (7, ""), (128, "")]
    assert set(prompts[-1].ids) <= set(range(128))


def test_equal_seeds_give_equal_prompts_and_others_others():
    first, again, other = (PromptMaker(words, seed) for seed in (3, 3, 4))
    assert [first.make(20) for _ in range(3)] == [again.make(20) for _ in range(3)]
    assert first.make(20) != other.make(20)


def test_prompts_share_exactly_the_blocks_whose_keys_they_share():
    maker = PromptMaker(words)
    one = maker.make_of_blocks([1, 2, 3], 8, 24)
    two = maker.make_of_blocks([1, 2, 4], 8, 20)
    assert one.ids[:16] == two.ids[:16]
    assert one.ids[16:20] != two.ids[16:20]
    assert (len(one.ids), len(two.ids)) == (24, 20)


def test_tokens_beyond_the_last_block_are_new_ones():
    maker = PromptMaker(words)
    one, two = (maker.make_of_blocks([1], 8, 30) for _ in range(2))
    assert (len(one.ids), len(two.ids)) == (30, 30)
    assert one.ids[:8] == two.ids[:8]
    assert one.ids[8:] != two.ids[8:]
