from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitserve.api.tokenizer import Tokenizer
from splitserve.server.detokenizer import Detokenizer

from .server_fakes import byte_tokenizer, stripping_tokenizer

TOKENIZER = Tokenizer(byte_tokenizer(), chat_template=None)
STRIPPING = Tokenizer(stripping_tokenizer(), chat_template=None)
texts = st.text(alphabet=st.sampled_from("ab é🙂\u200d👩"), max_size=30)
stops = st.lists(st.text(alphabet=st.sampled_from("ab é🙂"), min_size=1, max_size=4), max_size=3).map(tuple)


def ids_of(text: str) -> list[int]:
    return TOKENIZER.encode(text)


def run(ids: list[int], tokenizer: Tokenizer = TOKENIZER, **options: object) -> tuple[list[str], str | None]:
    """The pieces that were shown, and the stop string that ended them."""
    detokenizer = Detokenizer(tokenizer, **options)  # type: ignore[arg-type]
    pieces = []
    for token_id in ids:
        pieces.append(detokenizer.push(token_id))
        if detokenizer.matched is not None:
            return pieces, detokenizer.matched
    pieces.append(detokenizer.finish())
    return pieces, detokenizer.matched


def first_stop(text: str, stop: tuple[str, ...], min_chars: int = 0) -> tuple[str, str | None]:
    """What should be shown, by the plainest search: grow the text by a character until it ends in a stop string."""
    for end in range(max(min_chars, 1), len(text) + 1):
        ending = [s for s in stop if text[:end].endswith(s)]
        if ending:
            matched = max(ending, key=len)
            return text[: end - len(matched)], matched
    return text, None


@given(texts)
def test_pieces_add_up_to_the_text_and_hold_whole_characters_only(text: str) -> None:
    pieces, matched = run(ids_of(text))
    assert "".join(pieces) == text
    assert matched is None
    assert all("\ufffd" not in piece for piece in pieces)


@given(st.lists(st.integers(0, 257), max_size=40), st.booleans())
def test_any_tokens_decode_to_what_the_tokenizer_makes_of_all_at_once(ids: list[int], skip: bool) -> None:
    pieces, _ = run(ids, skip_special_tokens=skip)
    assert "".join(pieces) == TOKENIZER.decode(ids, skip_special_tokens=skip)


@given(st.lists(st.sampled_from([TOKENIZER.backend.token_to_id(c) or 0 for c in "aâĤ¬ðŁĻÿ"] + [256]), max_size=80))
def test_long_runs_of_incomplete_characters_decode_to_what_the_tokenizer_makes_of_all_at_once(ids: list[int]) -> None:
    assert "".join(run(ids)[0]) == TOKENIZER.decode(ids)


words = st.text(alphabet=st.sampled_from("ab c€🙂"), max_size=12)


@given(words, st.lists(st.tuples(words, st.sampled_from([[], [1], [999]])), max_size=4))
def test_a_continued_text_has_the_spaces_that_the_whole_text_has(
    prompt: str, parts: list[tuple[str, list[int]]]
) -> None:
    before = STRIPPING.encode(prompt)
    ids = [token_id for text, ids in parts for token_id in [*STRIPPING.encode(text, add_special_tokens=False), *ids]]
    whole, before_text = STRIPPING.decode(before + ids), STRIPPING.decode(before)
    assert before_text + "".join(run(ids, STRIPPING, prompt_ids=before)[0]) == whole
    assert "".join(run(ids, STRIPPING)[0]) == STRIPPING.decode(ids)


def test_an_invalid_byte_after_a_character_of_byte_tokens_releases_no_error() -> None:
    ids = [STRIPPING.backend.token_to_id(piece) or 0 for piece in ("<0xE2>", "<0x82>", "<0xAC>", "<0x82>", "a")]
    assert "".join(run(ids, STRIPPING)[0]) == "€\ufffda"


class CountingTokenizer(Tokenizer):
    """Tokenizer that records the largest number of tokens that were decoded at once."""

    def __init__(self) -> None:
        super().__init__(byte_tokenizer(), chat_template=None)
        self.most = 0

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        self.most = max(self.most, len(ids))
        return super().decode(ids, skip_special_tokens=skip_special_tokens)


@pytest.mark.parametrize("piece", ["â", "ÿ", "<|im_start|>"])
def test_no_token_makes_a_step_slower_the_more_often_it_comes(piece: str) -> None:
    tokenizer = CountingTokenizer()
    token_id = tokenizer.backend.token_to_id(piece)
    assert token_id is not None
    pieces, _ = run([token_id] * 200, tokenizer)
    assert "".join(pieces) == TOKENIZER.decode([token_id] * 200)
    assert tokenizer.most < 20


@given(texts, stops)
def test_a_stop_string_ends_the_text_and_never_shows(text: str, stop: tuple[str, ...]) -> None:
    pieces, matched = run(ids_of(text), stop=stop)
    assert ("".join(pieces), matched) == first_stop(text, stop)


@given(texts, stops)
def test_what_is_shown_is_never_longer_than_what_stays_shown(text: str, stop: tuple[str, ...]) -> None:
    final, _ = first_stop(text, stop)
    shown = ""
    detokenizer = Detokenizer(TOKENIZER, stop=stop)
    for token_id in ids_of(text):
        shown += detokenizer.push(token_id)
        assert final.startswith(shown)
        if detokenizer.matched is not None:
            break


@given(st.text(alphabet="ab", max_size=12), stops, st.integers(0, 12))
def test_a_match_counts_only_from_the_minimum_of_tokens_on(text: str, stop: tuple[str, ...], minimum: int) -> None:
    pieces, matched = run(ids_of(text), stop=stop, min_new_tokens=minimum)
    assert ("".join(pieces), matched) == first_stop(text, stop, minimum)


def test_an_emoji_split_over_tokens_comes_out_whole_with_its_last_token() -> None:
    pieces, _ = run(ids_of("a🙂b"))
    assert pieces == ["a", "", "", "", "🙂", "b", ""]


def test_an_incomplete_character_comes_out_as_a_replacement_at_the_end() -> None:
    pieces, _ = run(ids_of("a🙂")[:3])
    assert "".join(pieces) == "a\ufffd"


def test_a_held_back_beginning_of_a_stop_string_comes_out_when_it_becomes_none() -> None:
    pieces, matched = run(ids_of("xENx"), stop=("END",))
    assert pieces == ["x", "", "", "ENx", ""]
    assert matched is None


def test_a_held_back_beginning_of_a_stop_string_comes_out_at_the_end() -> None:
    assert run(ids_of("xEN"), stop=("END",)) == (["x", "", "", "EN"], None)


def test_the_matched_stop_string_stays_in_the_text_where_asked_for() -> None:
    pieces, matched = run(ids_of("xEND"), stop=("END",), include_stop=True)
    assert ("".join(pieces), matched) == ("xEND", "END")


def test_special_tokens_are_skipped_unless_asked_for() -> None:
    ids = [256, *ids_of("hi"), 257]
    assert "".join(run(ids)[0]) == "hi"
    assert "".join(run(ids, skip_special_tokens=False)[0]) == "<|im_start|>hi<|im_end|>"
