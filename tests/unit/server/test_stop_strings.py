"""The search for stop strings against a plain search, and its cost for the worst ones."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from splitserve.server import stop_strings
from splitserve.server.stop_strings import StopStrings

LETTERS = st.text(st.sampled_from("ab"), max_size=6)
STOPS = st.lists(st.text(st.sampled_from("ab"), min_size=1, max_size=5), min_size=1, max_size=4)


def plain(stop: list[str], pieces: list[tuple[str, bool]], include_stop: bool) -> tuple[str, str | None]:
    """Return the whole released text and the match: at each character, in pieces that may match, any string ends."""
    text = ""
    for piece, may_match in pieces:
        for character in piece:
            text += character
            found = max((s for s in stop if text.endswith(s)), key=len, default=None)
            if may_match and found is not None:
                return text if include_stop else text[: -len(found)], found
    return text, None


@given(STOPS, st.lists(st.tuples(LETTERS, st.booleans()), max_size=12), st.booleans())
def test_it_finds_the_first_match_and_holds_back_what_may_become_one(
    stop: list[str], pieces: list[tuple[str, bool]], include_stop: bool
) -> None:
    search = StopStrings(tuple(stop), include_stop=include_stop)
    released, text, matched = "", "", None
    for piece, may_match in pieces:
        more, matched = search.feed(piece, may_match=may_match)
        released += more
        text += piece
        if matched is not None:
            break
        held = text[len(released) :]
        longest = max((n for s in stop for n in range(len(s)) if text.endswith(s[:n])), default=0)
        # A string that ended where none might match is released.
        assert released + held == text
        assert len(held) == longest
    else:
        released += search.rest()
    assert (released, matched) == plain(stop, pieces, include_stop)


def test_the_worst_strings_cost_a_few_steps_for_each_character() -> None:
    class Counting(str):
        num_reads = 0

        def __getitem__(self, index: int | slice) -> str:  # type: ignore[override]
            Counting.num_reads += 1
            return super().__getitem__(index)

    # Requests with different strings, by turns.
    searches = []
    for number in range(20):
        others = (Counting("a" * 511 + "b" + chr(200 + number) + chr(200 + i) + "a" * 510) for i in range(63))
        searches.append(StopStrings((Counting("a" * 1024), *others), include_stop=False))
    # The tables were made, once for all samples of a request.
    Counting.num_reads = 0
    for _ in range(100):
        for search in searches:
            search.feed("aaaaa", may_match=True)
    assert Counting.num_reads <= 4 * 500 * 64 * len(searches)
    assert stop_strings._tables.cache_info().currsize <= 16
