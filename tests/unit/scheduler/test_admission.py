"""What must stay free in the pool beside a newcomer, and which requests may overtake one without room."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitserve.cache.kv_cache import PagedKVCache
from splitserve.cache.pages import PageAllocator, ReqToTokenPool
from splitserve.cache.prefix import PrefixCache
from splitserve.cache.window_pages import WindowPages
from splitserve.core.request import PROBE_PRIORITY, Request
from splitserve.core.sampling import ResolvedSampling
from splitserve.scheduler.admission import FORESEEN_TOKENS, OVERTAKING_PARTS, AdmissionTurn, PoolAdmission


def admission_of(num_pages, reserved, page_size=1) -> tuple[PoolAdmission, PagedKVCache]:
    rows = ReqToTokenPool(8, num_pages * page_size, page_size)
    cache = PagedKVCache(PageAllocator(num_pages), rows, PrefixCache(), page_size)
    rule = PoolAdmission(cache, reserved)
    return rule, cache


def request_of(rid, num_prompt_tokens, max_new_tokens, **more) -> Request:
    return Request(rid, [1] * num_prompt_tokens, ResolvedSampling(max_new_tokens=max_new_tokens), **more)


def admits(turn: AdmissionTurn, request: Request) -> bool:
    return turn.try_admit(request, max_prefix=0)


def turn_behind(rule: PoolAdmission, large: Request, num_running: int) -> AdmissionTurn:
    """Return a turn in which a request of `num_running` tokens is admitted, and `large` finds no room then."""
    turn = AdmissionTurn(rule, None)
    assert admits(turn, request_of("running", num_running, 1))
    assert not admits(turn, large)
    return turn


@pytest.mark.parametrize(("num_pages", "fits"), [(9, False), (10, True)])
def test_each_request_has_its_reserve_beside_its_tokens(num_pages, fits):
    rule, _ = admission_of(num_pages, reserved=2)
    assert rule.try_admit(request_of("a", 3, 100))
    assert rule.try_admit(request_of("b", 3, 100)) is fits


def test_no_more_is_reserved_than_a_request_may_generate():
    rule, _ = admission_of(8, reserved=512)
    assert rule.try_admit(request_of("a", 3, 1))
    assert rule.try_admit(request_of("b", 3, 1))


def test_the_reserve_is_kept_ahead_of_those_that_grow():
    """A new request must not take the page for the very next token of a running request."""
    rule, cache = admission_of(10, reserved=1)
    running = request_of("running", 4, 100)
    assert rule.try_admit(running)
    assert cache.extend(running, 4)
    running.output_ids = [7, 8]
    running.num_computed_tokens = 5
    assert cache.extend(running, 5)
    # It has six tokens, of which the last is not computed, and pages for five: two more are its own.
    assert not rule.try_admit(request_of("large", 3, 1))
    assert rule.try_admit(request_of("small", 2, 1))


def test_the_reserve_of_one_that_has_ended_is_nobodys():
    rule, _ = admission_of(8, reserved=4)
    ended = request_of("ended", 2, 4)
    assert rule.try_admit(ended)
    assert not rule.try_admit(request_of("b", 2, 4))
    ended.append(5, None)
    ended.params = ResolvedSampling(max_new_tokens=2)
    ended.append(6, None)
    assert ended.is_finished
    assert rule.try_admit(request_of("b", 2, 4))


@pytest.mark.parametrize(("num_tokens", "fits"), [(4, False), (3, True)])
def test_pages_that_cannot_be_taken_back_leave_the_longest_room_to_end(num_tokens, fits):
    rule, cache = admission_of(20, reserved=1)
    long, on_its_way = request_of("long", 4, 10), request_of("on its way", 3, 2)
    assert rule.try_admit(long)
    assert cache.extend(long, 4)
    assert rule.try_admit(on_its_way, running=[long])
    assert rule.try_admit(request_of("b", num_tokens, 2), running=[long]) is fits


def test_an_answer_without_end_is_foreseen_so_far_only():
    rule, cache = admission_of(3 * FORESEEN_TOKENS, reserved=1)
    endless = request_of("endless", 4, 3 * FORESEEN_TOKENS)
    assert rule.try_admit(endless)
    assert cache.extend(endless, 4)
    assert rule.try_admit(request_of("b", FORESEEN_TOKENS, 2), running=[endless])


def test_small_requests_overtake_while_they_hold_a_part_of_the_pool():
    rule, cache = admission_of(80, reserved=1)
    turn = turn_behind(rule, request_of("large", 50, 1), num_running=40)
    # It would fit.
    assert not admits(turn, request_of("too large to overtake", 20, 1))
    small = [request_of(f"s{i}", 4, 1) for i in range(5)]
    assert [admits(turn, request) for request in small] == [True] * 4 + [False]
    assert turn.is_over
    small[0].append(7, None)
    cache.release(small[0], publish=False)
    turn = AdmissionTurn(rule, None)
    assert not admits(turn, request_of("large", 50, 1))
    assert [admits(turn, request_of(f"t{i}", 4, 1)) for i in range(2)] == [True, False]


def test_a_request_of_another_queue_is_overtaken_only_by_those_that_rank_behind_it():
    rule, _ = admission_of(80, reserved=1)
    before, large, behind = (request_of(rid, 30, 1, number=i) for i, rid in enumerate(("before", "large", "behind")))
    turn = AdmissionTurn(rule, large)
    assert admits(turn, before)
    assert not admits(turn, behind)
    assert turn.blocked is None


@pytest.mark.parametrize("first", ["retracted", "more important", "probe"])
def test_retracted_and_more_important_requests_and_probes_are_not_overtaken(first):
    rule, _ = admission_of(80, reserved=1)
    large = request_of("large", 50, 1, priority=1 if first == "more important" else 0)
    if first == "retracted":
        large.num_retractions = 1
    elif first == "probe":
        large.priority = PROBE_PRIORITY
    turn = turn_behind(rule, large, num_running=40)
    assert not admits(turn, request_of("small", 4, 1))
    assert turn.is_over


def test_a_request_that_needs_nearly_the_whole_pool_is_not_overtaken():
    rule, _ = admission_of(80, reserved=1)
    turn = turn_behind(rule, request_of("large", 78, 2), num_running=4)
    assert not admits(turn, request_of("small", 4, 1))


def test_a_reserve_larger_than_the_foreseen_tokens_counts_for_requests_that_overtake():
    """Each of them reserves these tokens beside the large one. If fewer counted, that would never be admitted."""
    rule, cache = admission_of(16 * FORESEEN_TOKENS, reserved=4 * FORESEEN_TOKENS)
    large = request_of("large", 11 * FORESEEN_TOKENS, 1)
    turn = AdmissionTurn(rule, None)
    running = request_of("running", 6 * FORESEEN_TOKENS, 1)
    assert admits(turn, running)
    assert not admits(turn, large)
    for i in range(2):
        admits(turn, request_of(f"s{i}", 4, 4 * FORESEEN_TOKENS))
    cache.release(running, publish=False)
    assert admits(AdmissionTurn(rule, None), large)


def test_requests_that_overtake_leave_window_pages_for_the_one_they_overtook():
    """They hold less than the quarter. But what steps need for chunks must be free, too."""
    # Of 49 window pages 43 are for chunks. A whole window takes 4, and a request of two tokens takes 2.
    windows = WindowPages(100, 49, 1, window=2, step_tokens=43)
    cache = PagedKVCache(PageAllocator(100), ReqToTokenPool(8, 100, 1), PrefixCache(), 1, windows=windows)
    rule = PoolAdmission(cache, 1)
    turn = AdmissionTurn(rule, None)
    large, running = request_of("large", 20, 10), [request_of(f"r{i}", 1, 1) for i in range(2)]
    assert [admits(turn, r) for r in (*running, large)] == [True, True, False]
    for i, request in enumerate(running):
        admits(turn, request_of(f"s{i}", 1, 1))
        cache.release(request, publish=False)
    assert admits(AdmissionTurn(rule, None), large)


SIZES = st.tuples(st.integers(1, 40), st.integers(1, 60))


@given(
    num_pages=st.integers(20, 200),
    reserved=st.integers(1, 32),
    others=st.lists(SIZES, min_size=1, max_size=4),
    large=st.tuples(st.integers(10, 120), st.integers(1, 60)),
    small=st.lists(SIZES, max_size=20),
    is_decode=st.booleans(),
)
def test_what_was_overtaken_has_room_when_the_others_have_ended(num_pages, reserved, others, large, small, is_decode):
    rows = ReqToTokenPool(40, num_pages, 1)
    cache = PagedKVCache(PageAllocator(num_pages), rows, PrefixCache(), 1)
    rule = PoolAdmission(cache, reserved)
    turn = AdmissionTurn(rule, None)
    running = [r for i, size in enumerate(others) if admits(turn, r := request_of(f"o{i}", *size))]
    blocked = request_of("blocked", *large)
    if turn.blocked is not None or blocked.num_tokens_at_most > num_pages or admits(turn, blocked):
        return
    overtook = [r for i, size in enumerate(small) if admits(turn, r := request_of(f"s{i}", *size))]
    for request in running:
        cache.release(request, publish=False)
    for request in overtook:
        # To its last token.
        request.output_ids = [7] * (request.num_tokens_at_most - request.num_tokens)
        assert cache.extend(request, request.num_tokens)
        request.num_computed_tokens = request.num_tokens
    assert sum(len(r.pages) for r in overtook) <= num_pages // OVERTAKING_PARTS
    assert rule.try_admit(blocked, running=overtook if is_decode else ())
