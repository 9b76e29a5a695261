"""The account of the pool under random lives of requests."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from splitserve.cache.kv_cache import InvariantViolation, PagedKVCache
from splitserve.cache.pages import PageAllocator, ReqToTokenPool
from splitserve.cache.prefix import PrefixCache, RadixCache
from splitserve.core.request import Request
from splitserve.core.sampling import ResolvedSampling


def make_cache(num_pages=12, page_size=4, rows=3, prefix=True, window=None) -> PagedKVCache:
    return PagedKVCache(
        PageAllocator(num_pages),
        ReqToTokenPool(rows, num_pages * page_size, page_size),
        RadixCache(page_size) if prefix else PrefixCache(),
        page_size,
        window=window,
    )


def make_request(rid="r", prompt=(1, 2, 3, 4, 5), max_new_tokens=4) -> Request:
    return Request(rid, list(prompt), ResolvedSampling(max_new_tokens=max_new_tokens))


def admit(cache: PagedKVCache, request: Request) -> bool:
    return cache.try_admit(request, num_tokens=request.num_tokens, max_prefix=request.num_tokens - 1)


lives = st.lists(
    st.one_of(
        st.tuples(st.just("admit"), st.lists(st.integers(0, 1), min_size=1, max_size=24), st.integers(1, 20)),
        st.tuples(st.just("compute"), st.integers(0, 9), st.integers(1, 9)),
        st.tuples(st.just("release"), st.integers(0, 9), st.booleans()),
        st.tuples(st.just("share"), st.integers(0, 9), st.none()),
        st.tuples(st.just("forget"), st.integers(0, 9), st.none()),
    ),
    max_size=80,
)


@given(lives, st.booleans(), st.none() | st.integers(1, 20))
@settings(max_examples=200, deadline=None)
def test_nothing_is_lost_and_a_request_always_finds_what_it_was_promised(life, with_prefix, window):
    cache = make_cache(prefix=with_prefix, window=window)
    held: list[Request] = []
    for action, a, b in life:
        if action == "admit":
            # All with one id, as a client may send them.
            request = make_request("r", a, b)
            if admit(cache, request):
                held.append(request)
            else:
                assert request.row is None
                assert not cache.holds(request)
        elif held:
            request = held[a % len(held)]
            if action == "compute":
                end = min(request.num_computed_tokens + b, request.num_tokens_at_most)
                found = cache.extend(request, end)
                assert found or end > len(request.prompt_ids)
                if not found:
                    end = min(end, len(request.pages) * cache.page_size)
                # Tokens beyond the prompt come from sampling.
                request.output_ids.extend([0] * (end - request.num_tokens))
                request.num_computed_tokens = max(end, request.num_computed_tokens)
            elif action == "share":
                cache.share(request)
            elif action == "forget":
                cache.forget(request)
            else:
                held.remove(request)
                cache.release(request, publish=b)
        cache.check(held)
        for request in held:
            assert cache.rows.table[request.row, : len(request.pages)].tolist() == request.pages
    for request in held:
        cache.release(request, publish=True)
    cache.check([])
    cache.flush()
    assert cache.pages.available() == cache.pages.num_pages


def test_a_second_request_reuses_the_pages_of_the_first():
    cache = make_cache()
    first = make_request("a", prompt=range(10))
    assert admit(cache, first)
    cache.extend(first, 10)
    first.num_computed_tokens = 10
    cache.share(first)
    second = make_request("b", prompt=range(10))
    assert admit(cache, second)
    assert second.num_cached_tokens == second.num_computed_tokens == 8
    assert second.pages == first.pages[:2]
    assert (cache.prefix_queries, cache.prefix_hits) == (9 + 9, 8)


def test_synthetic_kv_is_found_by_no_later_request():
    cache, synthetic, real = make_cache(), make_request("synthetic", range(8)), make_request("real", range(8))
    synthetic.is_synthetic = True
    assert admit(cache, synthetic)
    assert cache.extend(synthetic, 8)
    synthetic.num_computed_tokens = 8
    cache.share(synthetic)
    cache.release(synthetic, publish=True)
    assert admit(cache, real)
    assert real.num_computed_tokens == 0
    cache.check([real])


def test_a_request_without_room_for_its_tokens_and_the_headroom_waits():
    cache = make_cache(num_pages=4)
    assert admit(cache, make_request("a", prompt=range(8)))
    second = make_request("b", prompt=range(4))
    assert not cache.try_admit(second, num_tokens=4, headroom=2)
    assert second.row is None
    assert cache.try_admit(second, num_tokens=4, headroom=1)


def test_growth_beyond_the_promise_takes_no_page_promised_to_others():
    cache = make_cache(num_pages=3)
    first, second = make_request("a", prompt=range(4)), make_request("b", prompt=range(20, 28))
    assert admit(cache, first)
    assert admit(cache, second)
    assert cache.extend(first, 4)
    assert not cache.extend(first, 5)
    assert len(first.pages) == 1
    assert cache.extend(second, 8)
    cache.check([first, second])


def test_releasing_twice_is_caught():
    cache = make_cache()
    request = make_request()
    assert admit(cache, request)
    cache.release(request, publish=False)
    with pytest.raises(InvariantViolation, match="released twice"):
        cache.release(request, publish=False)


def test_a_request_whose_owner_forgot_it_is_caught():
    cache = make_cache()
    assert admit(cache, make_request("lost"))
    with pytest.raises(InvariantViolation, match="lost"):
        cache.check([])


def test_what_a_request_gives_back_during_its_step_is_free_when_the_step_has_ended():
    cache, request, other = make_cache(prefix=False), make_request(), make_request("other")
    for r in (request, other):
        admit(cache, r)
        cache.extend(r, r.num_tokens)
    free, rows = cache.pages.available(), cache.rows.available_size()
    cache.step_began([request])
    cache.release(request, publish=False)
    # No other request may get them, and no page is lost. A request outside the step does not wait.
    assert (cache.pages.available(), cache.rows.available_size()) == (free, rows)
    assert not cache.holds(request)
    cache.check([other])
    cache.release(other, publish=False)
    assert (cache.pages.available(), cache.rows.available_size()) == (free + 2, rows + 1)
    # The same name may come again meanwhile.
    again = make_request()
    assert admit(cache, again)
    cache.check([again])
    cache.step_ended()
    assert request.row is None
    cache.check([again])
    cache.release(again, publish=False)
    assert (cache.pages.available(), cache.rows.available_size()) == (12, 3)


def test_a_prefix_published_during_the_step_can_be_found_and_not_evicted_before_its_end():
    cache, request = make_cache(num_pages=4), make_request(prompt=range(9))
    admit(cache, request)
    cache.extend(request, 9)
    request.num_computed_tokens = 9
    cache.step_began([request])
    cache.release(request, publish=True)
    assert len(cache.prefix.match(list(range(9))).pages) == 2
    assert cache.flush() == 0
    cache.step_ended()
    assert cache.flush() == 2
    cache.check([])


def test_pages_that_others_have_published_first_are_set_aside_during_the_step():
    cache, first, second = make_cache(), make_request("a", range(9)), make_request("b", range(9))
    for r in (first, second):
        admit(cache, r)
        cache.extend(r, 9)
        r.num_computed_tokens = 9
    cache.share(first)
    free = cache.pages.available()
    cache.step_began([second])
    cache.share(second)
    assert second.pages[:2] == first.pages[:2]
    assert cache.pages.available() == free
    cache.check([first, second])
    cache.step_ended()
    assert cache.pages.available() == free + 2
    cache.check([first, second])


def test_promises_that_rest_on_pages_set_aside_can_be_drawn_when_the_step_has_ended():
    cache, first, second = make_cache(num_pages=6), make_request("a", range(9)), make_request("b", range(9))
    for r in (first, second):
        admit(cache, r)
        cache.extend(r, 9)
        r.num_computed_tokens = 9
    cache.release(first, publish=True)
    # What is free, and what the first one left in the prefix cache.
    third = make_request("c", range(100, 112))
    assert cache.try_admit(third, num_tokens=12)
    assert cache.num_grantable_pages == 0
    cache.step_began([second])
    # The pages that the first one left cannot be evicted now, and the second one's own copies are not free yet.
    cache.share(second)
    cache.check([second, third])
    assert not cache.extend(third, 12)
    assert third.pages == []
    cache.step_ended()
    cache.check([second, third])
    assert cache.extend(third, 12)
    cache.check([second, third])


def computed(cache: PagedKVCache, request: Request, num_tokens: int) -> None:
    assert cache.extend(request, num_tokens)
    request.output_ids.extend([0] * (num_tokens - request.num_tokens))
    request.num_computed_tokens = num_tokens


def test_pages_that_left_the_window_are_free_and_the_page_table_says_what_is_seen_first_instead():
    cache, request = make_cache(prefix=False, window=6), make_request(prompt=range(4), max_new_tokens=40)
    admit(cache, request)
    for num_tokens in range(4, 30):
        computed(cache, request, num_tokens)
        cache.forget(request)
        # The next token sees the five before it: two pages of four tokens, at times three.
        first = max(0, num_tokens - 5) // 4
        assert 12 - cache.pages.available() == -(-num_tokens // 4) - first <= 3
        assert cache.holdings[request].num_secured_pages <= cache.num_pages_at_most(request, num_tokens)
        row = cache.rows.table[request.row, : len(request.pages)].tolist()
        assert row == request.pages
        assert set(row[:first]) <= {row[first]}
        cache.check([request])
    # More tokens than the pool has room for at a time were no problem; nothing of it is published.
    cache.release(request, publish=True)
    cache.check([])
    assert (cache.pages.available(), cache.prefix.num_pages) == (12, 0)


def test_a_prompt_is_published_whole_before_any_of_it_is_forgotten_and_can_be_evicted_when_all_of_it_has_left():
    cache, request = make_cache(window=6), make_request(prompt=range(17), max_new_tokens=40)
    admit(cache, request)
    computed(cache, request, 12)
    cache.forget(request)
    assert cache.holdings[request].num_forgotten == 0, "the rest of the prompt comes, and all of it is to be published"
    computed(cache, request, 17)
    cache.share(request)
    for num_tokens in range(17, 25):
        computed(cache, request, num_tokens)
        cache.forget(request)
        evictable = 4 if num_tokens >= 21 else 0
        assert (cache.prefix.num_pages, cache.prefix.num_evictable_pages) == (4, evictable)
        cache.check([request])
    cache.share(request)
    assert cache.prefix.num_pages == 4, "behind a page that is not there nothing can be found"
    cache.release(request, publish=True)
    assert cache.prefix.match(list(range(17))).pages
    assert cache.prefix.num_pages == 4
    cache.check([])


def test_what_is_forgotten_during_steps_is_free_when_those_that_began_before_have_ended():
    cache, request = make_cache(prefix=False, window=4), make_request(prompt=range(32))
    admit(cache, request)
    cache.extend(request, 32)
    for _ in range(2):
        cache.step_began([request])
    request.num_computed_tokens = 16
    cache.forget(request)
    free = cache.pages.available()
    assert cache.holdings[request].num_forgotten == 3
    cache.step_began([request])
    cache.check([request])
    cache.step_ended()
    assert cache.pages.available() == free
    cache.step_ended()
    # The third step began when they were forgotten already.
    assert cache.pages.available() == free + 3
    cache.check([request])
