"""The host tier under the account of the pool: a page is on the device, on the host or freed, and has one owner."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from splitserve.cache.host_memory import HostMemory, HostTier
from splitserve.cache.kv_cache import PagedKVCache
from splitserve.cache.pages import PageAllocator, ReqToTokenPool
from splitserve.cache.prefix import Evicted, RadixCache, split_pages
from splitserve.core.request import Request
from splitserve.core.sampling import ResolvedSampling

PAGE, PAGE_BYTES = 2, 10


class Pool:
    """What each page holds: all tokens up to its end, as its KV would depend on them."""

    bytes_per_page = PAGE_BYTES

    def __init__(self) -> None:
        self.content: dict[int, tuple[int, ...]] = {}
        self.has_memory = True
        self.num_saved = 0

    def bytes_of(self, pages):
        return len(pages) * PAGE_BYTES

    def save(self, pages):
        if not self.has_memory:
            raise MemoryError("no more")
        self.num_saved += len(pages)
        return [self.content[page] for page in pages]

    def restore(self, copy, first, pages):
        for i, page in enumerate(pages):
            self.content[page] = copy[first + i]

    def drop(self, copy):
        pass

    def compute(self, request: Request) -> None:
        """All pages of its prompt that are not computed yet."""
        for i in range(request.num_computed_tokens // PAGE, len(request.pages)):
            self.content[request.pages[i]] = tuple(request.prompt_ids[: (i + 1) * PAGE])


class World:
    """An account with `num_pages` pages on the device and `num_host_pages` on the host."""

    def __init__(self, num_pages=4, num_host_pages=8) -> None:
        self.pool = Pool()
        self.tier = HostTier(HostMemory(self.pool, num_host_pages * PAGE_BYTES), PAGE)
        rows = ReqToTokenPool(8, num_pages * PAGE, PAGE)
        self.cache = PagedKVCache(PageAllocator(num_pages), rows, RadixCache(PAGE), PAGE, host=self.tier)

    def admit(self, prompt) -> Request | None:
        request = Request(str(prompt), list(prompt), ResolvedSampling(max_new_tokens=1))
        n = len(prompt)
        if self.cache.holds(request) or not self.cache.try_admit(request, num_tokens=n, max_prefix=n - 1):
            return None
        for i in range(request.num_computed_tokens // PAGE):
            assert self.pool.content[request.pages[i]] == tuple(prompt[: (i + 1) * PAGE])
        assert self.cache.extend(request, n)
        self.pool.compute(request)
        request.num_computed_tokens = n
        return request

    def run(self, prompt) -> int:
        """Admit, compute and release; tokens that were found."""
        request = self.admit(prompt)
        assert request is not None
        self.cache.release(request, publish=True)
        return request.num_cached_tokens


# Beginnings of a few texts, of any length: they share pages and fork.
prompts = st.builds(lambda text, n, end: [text] * n + [end], st.integers(0, 2), st.integers(0, 11), st.integers(0, 2))
lives = st.lists(
    st.one_of(
        st.tuples(st.just("run"), prompts),
        st.tuples(st.sampled_from(["run", "admit"]), prompts),
        st.tuples(st.just("release"), st.integers(0, 9)),
        st.tuples(st.sampled_from(["full", "roomy", "roomy", "flush"]), st.none()),
    ),
    min_size=20,
    max_size=80,
)


@given(lives, st.integers(6, 10), st.integers(0, 20))
@settings(max_examples=100, deadline=None)
def test_whatever_is_found_is_what_was_computed_and_nothing_is_lost(life, num_pages, num_host_pages):
    world = World(num_pages, num_host_pages)
    held: list[Request] = []
    for action, argument in life:
        if action == "admit":
            held += filter(None, [world.admit(argument)])
        elif action == "release" and held:
            world.cache.release(held.pop(argument % len(held)), publish=True)
        elif action == "run" and (request := world.admit(argument)):
            world.cache.release(request, publish=True)
        elif action in ("full", "roomy"):
            world.pool.has_memory = action == "roomy"
        elif action == "flush":
            world.cache.flush()
            assert world.tier.num_pages == world.tier.num_bytes == 0
        world.cache.check(held)
        assert world.tier.num_bytes == world.tier.num_pages * PAGE_BYTES <= num_host_pages * PAGE_BYTES
        for request in held:
            whole = tuple(request.prompt_ids[: len(request.pages) * PAGE])
            assert world.pool.content[request.pages[-1]] == whole


def test_an_evicted_prefix_comes_back_and_counts_as_cached():
    world = World(num_pages=4)
    assert world.run([1] * 8) == 0
    assert world.run([2] * 8) == 0
    assert world.run([1] * 8) == 6
    assert (world.cache.prefix_hits, world.cache.prefix_host_hits) == (6, 6)
    # It is on the device again, where others find it.
    assert world.run([1] * 8) == 6
    assert world.cache.prefix_host_hits == 6


def test_what_the_device_still_has_is_not_fetched():
    world = World(num_pages=4)
    world.run([1, 1, 1, 1])
    world.run([1, 1, 1, 1, 2, 2])
    # One page short: the end of the longer one is evicted.
    world.run([3, 3])
    world.run([4, 4])
    assert world.run([1, 1, 1, 1, 2, 2, 5]) == 6
    assert world.cache.prefix_host_hits == 2


def test_the_end_of_a_run_is_fetched_where_its_beginning_is_on_the_device_again():
    world = World(num_pages=4)
    world.run([1, 1, 2, 2, 3, 3, 4, 4])
    world.run([5] * 8)
    # Fetches the first page, and evicts the others' successors.
    assert world.run([1, 1, 6]) == 2
    assert world.run([1, 1, 2, 2, 3, 3, 7]) == 6
    assert world.cache.prefix_host_hits == 2 + 4


def test_what_is_on_the_host_is_not_copied_again():
    world = World(num_pages=4)
    for prompt in ([1] * 8, [2] * 8, [1] * 8, [2] * 8):
        world.run(prompt)
    # The fourth page of a prompt is computed anew each time, and is the same.
    assert world.pool.num_saved == 8


def test_the_least_recently_used_makes_room():
    world = World(num_pages=4, num_host_pages=8)
    for token in (1, 2, 3):
        world.run([token] * 8)
    assert world.run([1] * 8) == 6
    # Evicted now, and as many are on the host: 2 was used before 1 and 3.
    world.run([4] * 8)
    assert world.tier.num_pages == 8
    assert world.run([2] * 8) == 0
    assert world.run([1] * 8) == 6


@pytest.fixture
def tier() -> HostTier:
    pool = Pool()
    pool.content = {page: (page,) for page in range(10)}
    return HostTier(HostMemory(pool, 3 * PAGE_BYTES), PAGE)


def evicted(tokens, pages) -> Evicted:
    return Evicted(split_pages(tokens, PAGE), pages)


def test_of_more_than_the_bound_holds_the_beginning_is_kept(tier):
    tier.keep(evicted(range(10), [0, 1, 2, 3, 4]))
    assert tier.num_pages == len(tier.find(range(10), 0)) == 3


def test_nothing_is_found_behind_a_gap(tier):
    tier.keep(evicted(range(6), [2]))
    assert tier.find(range(6), 0) == []
    assert len(tier.find(range(6), 2)) == 1
    tier.keep(evicted(range(2), [0]))
    assert len(tier.find(range(6), 0)) == 1


def test_the_same_page_after_other_tokens_is_another(tier):
    tier.keep(evicted([1, 1, 5, 5], [1]))
    assert tier.find([2, 2, 5, 5], 1) == []
    assert tier.find([5, 5], 0) == []


def test_a_host_without_memory_forgets_as_if_there_were_no_tier(tier):
    tier._memory._copies.has_memory = False
    tier.keep(evicted(range(4), [0, 1]))
    assert tier.num_pages == tier.num_bytes == 0
    tier.check()
