"""One suite over every prefix cache."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from splitserve.cache.kv_events import BlockRecord
from splitserve.cache.prefix import Evicted, PrefixCache, RadixCache

PAGE = 4
MAKERS = {
    "none": PrefixCache,
    "radix": lambda: RadixCache(PAGE),
    "recorded": lambda: RadixCache(PAGE, BlockRecord(PAGE)),
}


@pytest.fixture(params=MAKERS)
def cache(request: pytest.FixtureRequest) -> PrefixCache:
    return MAKERS[request.param]()


def test_an_empty_cache_knows_nothing(cache):
    match = cache.match([1, 2, 3, 4])
    assert match.pages == []
    assert cache.num_pages == cache.num_evictable_pages == 0
    assert cache.evict(10) == []


def test_pages_are_taken_or_given_back(cache):
    _, back = cache.insert(list(range(8)), [10, 11])
    assert sorted(back) == sorted({10, 11} - set(cache.match(list(range(8))).pages))


def pages_of(evicted: list[Evicted]) -> list[int]:
    return [page for e in evicted for page in e.pages]


def ends_of(evicted: list[Evicted]) -> list[tuple[int, tuple[int, ...]]]:
    """Each page with all tokens up to its end."""
    found = []
    for e in evicted:
        tokens = tuple(token for key in e.keys for token in key)
        first = len(e.keys) - len(e.pages)
        found += [(page, tokens[: (first + i + 1) * PAGE]) for i, page in enumerate(e.pages)]
    return found


prompts = st.lists(st.integers(0, 1), max_size=6 * PAGE)
actions = st.lists(
    st.one_of(
        st.tuples(st.just("insert"), prompts),
        st.tuples(st.just("lock"), prompts),
        st.tuples(st.just("unlock"), st.integers(0, 100)),
        st.tuples(st.just("evict"), st.integers(0, 8)),
    ),
    max_size=60,
)


@pytest.mark.parametrize("name", MAKERS)
@given(actions=actions)
@settings(max_examples=150, deadline=None)
def test_a_cache_never_lies_about_tokens_pages_or_locks(name, actions):
    cache: PrefixCache = MAKERS[name]()
    fresh = iter(range(10_000))
    # What each page the cache owns was computed from: all tokens up to its end.
    content: dict[int, tuple[int, ...]] = {}
    locked = []
    for action, argument in actions:
        if action in ("insert", "lock"):
            tokens = argument[: len(argument) // PAGE * PAGE]
            match = cache.match(tokens)
            for i, page in enumerate(match.pages):
                assert content[page] == tuple(tokens[: (i + 1) * PAGE])
        if action == "insert":
            pages = [next(fresh) for _ in range(len(tokens) // PAGE)]
            after, back = cache.insert(tokens, pages)
            for i, page in enumerate(pages):
                if page not in back:
                    content[page] = tuple(tokens[: (i + 1) * PAGE])
            assert after.pages[: len(match.pages)] == match.pages
        elif action == "lock":
            cache.lock(match.handle)
            locked.append(match)
        elif action == "unlock" and locked:
            cache.unlock(locked.pop(argument % len(locked)).handle)
        elif action == "evict":
            before = cache.num_evictable_pages
            evicted = cache.evict(argument)
            assert len(pages_of(evicted)) >= min(argument, before)
            for page, tokens in ends_of(evicted):
                assert all(page not in m.pages for m in locked)
                assert content.pop(page) == tokens
        cache.check()
        assert cache.num_pages == len(content)
        assert cache.num_evictable_pages == len(set(content) - {p for m in locked for p in m.pages})


def test_eviction_takes_what_was_used_least_recently():
    cache = RadixCache(PAGE)
    cache.insert([1] * 4, [1])
    cache.insert([2] * 4, [2])
    cache.insert([3] * 4, [3])
    cache.match([1] * 4)
    assert pages_of(cache.evict(1)) == [2]
    assert pages_of(cache.evict(1)) == [3]
    assert cache.match([1] * 4).pages == [1]


def test_a_shared_prefix_is_kept_once_and_outlives_its_branches():
    cache = RadixCache(PAGE)
    stem = [7] * 4
    cache.insert(stem + [1] * 4, [0, 1])
    match, back = cache.insert(stem + [2] * 4, [5, 2])
    assert match.pages == [0, 2]
    assert back == [5]
    assert set(pages_of(cache.evict(2))) == {1, 2}
    assert cache.match(stem + [1] * 4).pages == [0]


def test_a_part_of_a_page_is_never_matched():
    cache = RadixCache(PAGE)
    cache.insert([1, 2, 3, 4, 5, 6, 7, 8], [0, 1])
    assert cache.match([1, 2, 3, 4, 5, 6, 7]).pages == [0]
    assert cache.match([1, 2, 3]).pages == []
