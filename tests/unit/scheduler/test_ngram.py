"""Prompt lookup finds what a search by hand finds, and follows a text as it grows."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from splitserve.core.batch import RequestStep, SampleSpec
from splitserve.core.sampling import ResolvedSampling
from splitserve.core.speculative import MIN_NGRAM_MATCH
from splitserve.scheduler.speculation import NgramProposer, Text, continuation

# Few different tokens, so that there is much to be found.
TEXTS = st.lists(st.integers(0, 3), min_size=1, max_size=60)


def naive(tokens: list[int], max_match: int, count: int) -> list[int]:
    n = len(tokens)
    for length in range(min(max_match, n - 1), MIN_NGRAM_MATCH - 1, -1):
        for end in range(n - 1, length - 1, -1):
            if tokens[end - length : end] == tokens[n - length :]:
                text = list(tokens)
                for i in range(count):
                    text.append(text[end + i])
                return text[n:]
    return []


def step_of(prompt: list[int], output: list[int], rid: str = "a") -> RequestStep:
    spec = SampleSpec(ResolvedSampling(), len(prompt) + len(output), prompt, output)
    return RequestStep(rid, 0, output[-1:], len(prompt) + len(output) - 1, spec)


@given(TEXTS, st.integers(2, 6), st.integers(1, 8))
def test_it_finds_what_a_naive_search_finds(tokens, max_match, count):
    assert continuation(np.array(tokens, dtype=np.int32), max_match, count) == naive(tokens, max_match, count)


@given(TEXTS, TEXTS, st.data())
def test_a_text_that_grows_step_by_step_is_looked_up_whole(prompt, output, data):
    proposer, text = NgramProposer(4), Text(prompt)
    done = 0
    while done < len(output):
        done = data.draw(st.integers(done + 1, len(output)))
        assert text.follow(output[:done]).tolist() == prompt + output[:done]
        found = proposer.propose([step_of(prompt, output[:done])], [5])
        assert found == [naive(prompt + output[:done], 4, 5)]


def test_of_several_places_the_longest_match_counts_and_then_the_latest():
    assert continuation(np.array([1, 2, 3, 7, 9, 2, 3, 8, 5, 2, 3, 6, 1, 2, 3], dtype=np.int32), 8, 1) == [7]
    assert continuation(np.array([1, 2, 7, 1, 2, 8, 1, 2], dtype=np.int32), 8, 1) == [8]


def test_a_text_that_goes_round_in_circles_is_continued_so():
    assert continuation(np.array([9, 4, 5, 6, 4, 5, 6], dtype=np.int32), 3, 7) == [4, 5, 6, 4, 5, 6, 4]


def test_an_id_that_comes_again_with_another_request_starts_anew():
    proposer = NgramProposer(4)
    proposer.propose([step_of([1, 2, 3], [1, 2])], [1])
    assert proposer.propose([step_of([7, 8, 9], [7, 8])], [1]) == [[9]]


def test_texts_of_requests_that_are_gone_are_forgotten():
    proposer = NgramProposer(4)
    proposer.propose([step_of([1, 2], [3], rid) for rid in "abc"], [1, 1, 1])
    proposer.propose([step_of([1, 2], [3], "b")], [1])
    assert list(proposer._texts) == ["b"]
