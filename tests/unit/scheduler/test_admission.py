"""What must stay free in the pool beside a newcomer."""

import pytest

from splitserve.cache.kv_cache import PagedKVCache
from splitserve.cache.pages import PageAllocator, ReqToTokenPool
from splitserve.cache.prefix import PrefixCache
from splitserve.core.request import Request
from splitserve.core.sampling import ResolvedSampling
from splitserve.scheduler.admission import FORESEEN_TOKENS, PoolAdmission


def admission_of(num_pages, reserved, page_size=1) -> tuple[PoolAdmission, PagedKVCache]:
    rows = ReqToTokenPool(8, num_pages * page_size, page_size)
    cache = PagedKVCache(PageAllocator(num_pages), rows, PrefixCache(), page_size)
    rule = PoolAdmission(cache, reserved)
    return rule, cache


def request_of(rid, num_prompt_tokens, max_new_tokens) -> Request:
    return Request(rid, [1] * num_prompt_tokens, ResolvedSampling(max_new_tokens=max_new_tokens))


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
