"""Window pages under random lives of requests: none lost, none with two owners, and each read finds its content.

What is in each slot is kept beside the account: the tokens up to it, of which KV is a function.
"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from splitserve.cache.kv_cache import PagedKVCache
from splitserve.cache.pages import PageAllocator, ReqToTokenPool
from splitserve.cache.prefix import PrefixCache, RadixCache
from splitserve.cache.window_pages import WindowPages, least_window_pages
from splitserve.core.layout import first_token_read
from splitserve.core.request import Request
from splitserve.core.sampling import ResolvedSampling

STEP = 6


class World:
    """A cache with pages of both kinds, and what lies in them."""

    def __init__(
        self, *, window: int = 5, page_size: int = 2, num_pages: int = 24, spare: int = 4, prefix: bool = True
    ) -> None:
        num_window_pages = min(num_pages, least_window_pages(window, page_size, STEP) + spare)
        self.windows = WindowPages(num_pages, num_window_pages, page_size, window, step_tokens=STEP)
        self.window, self.page_size = window, page_size
        self.cache = PagedKVCache(
            PageAllocator(num_pages),
            ReqToTokenPool(8, num_pages * page_size, page_size),
            RadixCache(page_size) if prefix else PrefixCache(),
            page_size,
            windows=self.windows,
        )
        self.held: list[Request] = []
        # (page, slot) -> tokens up to there; of the full layers and of the others.
        self.full: dict[tuple[int, int], tuple[int, ...]] = {}
        self.windowed: dict[tuple[int, int], tuple[int, ...]] = {}
        # Of each step in flight: the pages its requests read, and their expected content.
        self.reads: list[list[tuple[tuple[int, int], tuple[int, ...]]]] = []

    def admit(self, prompt: list[int], max_new_tokens: int = 30, *, arrives: bool = False) -> Request | None:
        request = Request(f"r{len(prompt)}", list(prompt), ResolvedSampling(max_new_tokens=max_new_tokens))
        request.rid = f"r{id(request)}"
        limit = len(prompt) if arrives else len(prompt) - 1
        if not self.cache.try_admit(request, num_tokens=len(prompt), max_prefix=limit, num_foreseen=len(prompt) + 3):
            return None
        self.held.append(request)
        self.expect(request)
        if arrives:
            start = request.num_computed_tokens
            assert self.cache.extend(request, len(prompt), is_arriving=True), "what arrives was promised"
            self.write(request, start, len(prompt), first_token_read(self.window, len(prompt)))
            self.cache.share(request)
        return request

    def compute(self, request: Request, num_tokens: int) -> bool:
        """Compute a chunk of the prompt, or a sampled token. Return False if there is no room for it."""
        start = request.num_computed_tokens
        if start >= len(request.prompt_ids):
            num_tokens = 1
        end = min(start + min(num_tokens, STEP), max(len(request.prompt_ids), start + 1), request.num_tokens_at_most)
        if end <= start or not self.cache.extend(request, end):
            return False
        request.output_ids.extend([0] * (end - request.num_tokens))
        self.expect(request)
        self.write(request, start, end, start)
        return True

    def write(self, request: Request, start: int, end: int, first_windowed: int) -> None:
        tokens = tuple(request.tokens(0, end))
        for t in range(start, end):
            page, slot = request.pages[t // self.page_size], t % self.page_size
            self.full[page, slot] = tokens[: t + 1]
            if t >= first_windowed:
                window_page = int(self.windows.table[page])
                assert window_page >= 0, "a token is written where no window page is"
                self.windowed[window_page, slot] = tokens[: t + 1]
        request.num_computed_tokens = end

    def places(self, request: Request) -> list[tuple[tuple[int, int], tuple[int, ...]]]:
        """Return what the request's next token reads in the windowed layers, and its expected content."""
        tokens = tuple(request.tokens(0, request.num_computed_tokens))
        found = []
        for t in range(first_token_read(self.window, len(tokens)), len(tokens)):
            window_page = int(self.windows.table[request.pages[t // self.page_size]])
            found.append(((window_page, t % self.page_size), tokens[: t + 1]))
        return found

    def expect(self, request: Request) -> None:
        for t in range(request.num_computed_tokens):
            place = request.pages[t // self.page_size], t % self.page_size
            assert self.full[place] == tuple(request.tokens(0, t + 1))
        for place, tokens in self.places(request):
            assert self.windowed.get(place) == tokens, "what is in the window is not there"

    def begin_step(self) -> None:
        self.cache.step_began(self.held)
        self.reads.append([read for request in self.held for read in self.places(request)])

    def end_step(self) -> None:
        for place, tokens in self.reads.pop(0):
            assert self.windowed.get(place) == tokens, "a step in flight lost a page that it reads"
        self.cache.step_ended()

    def release(self, request: Request, publish: bool) -> None:
        self.held.remove(request)
        self.cache.release(request, publish=publish)

    def check(self) -> None:
        self.cache.check(self.held)
        for request in self.held:
            self.expect(request)

    def close(self) -> None:
        for request in list(self.held):
            self.release(request, True)
        while self.reads:
            self.end_step()
        self.cache.check([])
        self.cache.flush()
        assert self.cache.pages.available() == self.cache.pages.num_pages
        assert self.windows.num_available == self.windows.num_pages
        assert (self.windows.table == -1).all()


prompts = st.lists(st.integers(0, 1), min_size=1, max_size=26)
lives = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["admit", "arrive"]), prompts, st.integers(1, 12)),
        st.tuples(st.just("compute"), st.integers(0, 9), st.integers(1, STEP)),
        st.tuples(st.sampled_from(["forget", "share"]), st.integers(0, 9), st.none()),
        st.tuples(st.just("release"), st.integers(0, 9), st.booleans()),
        st.tuples(st.sampled_from(["begin", "end"]), st.none(), st.none()),
    ),
    max_size=70,
)


@given(lives, st.integers(1, 9), st.sampled_from([1, 2, 3]), st.integers(0, 9), st.booleans())
@settings(max_examples=250, deadline=None)
def test_nothing_is_lost_and_whoever_reads_finds_it(life, window, page_size, spare, prefix):
    world = World(window=window, page_size=page_size, num_pages=40 // page_size, spare=spare, prefix=prefix)
    for action, a, b in life:
        if action in ("admit", "arrive"):
            world.admit(a, b, arrives=action == "arrive")
        elif action == "begin" and len(world.reads) < 2:
            world.begin_step()
        elif action == "end" and world.reads:
            world.end_step()
        elif world.held and isinstance(a, int):
            request = world.held[a % len(world.held)]
            if action == "compute":
                world.compute(request, b)
            elif action == "forget":
                world.cache.forget(request)
            elif action == "share":
                world.cache.share(request)
            elif action == "release":
                world.release(request, b)
        world.check()
    world.close()


@given(
    st.lists(st.tuples(prompts, st.booleans()), min_size=1, max_size=8), prompts, st.integers(1, 9), st.integers(1, 3)
)
@settings(max_examples=200, deadline=None)
def test_a_match_is_the_longest_behind_which_all_that_is_seen_is_there(published, prompt, window, page_size):
    world = World(window=window, page_size=page_size, num_pages=60, spare=2)
    for prompt, arrives in published:
        request = world.admit(prompt, arrives=arrives)
        assert request is not None
        while request.num_computed_tokens < len(prompt):
            assert world.compute(request, STEP)
            world.cache.forget(request)
        world.release(request, True)
        world.check()
    pages = world.cache.prefix.match(prompt).pages

    def is_usable(num_pages: int) -> bool:
        end = num_pages * page_size
        seen = range(first_token_read(window, end), end)
        table = world.windows.table
        places = [(int(table[pages[t // page_size]]), t % page_size, t) for t in seen]
        return all(p >= 0 and world.windowed.get((p, slot)) == tuple(prompt[: t + 1]) for p, slot, t in places)

    longest = max(n for n in range(len(pages) + 1) if is_usable(n))
    assert world.windows.num_usable(pages) <= longest
    if not any(arrives for _, arrives in published):
        # Some other slots may be right by chance: the former owner of their page had the same tokens.
        assert world.windows.num_usable(pages) == longest


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(1, STEP)), min_size=1, max_size=6), st.integers(1, 12))
@settings(max_examples=200, deadline=None)
def test_with_no_step_in_flight_all_that_are_admitted_can_take_a_step_of_its_budget(wanted, window):
    """However prompts share a step, what it takes beyond promises was kept free."""
    world = World(window=window, page_size=2, num_pages=200, spare=3, prefix=False)
    for length, _ in wanted:
        world.admit([7] * length)
    for _ in range(40):
        budget = STEP
        for request, (_, chunk) in zip(list(world.held), wanted, strict=False):
            missing = len(request.prompt_ids) - request.num_computed_tokens
            end = request.num_computed_tokens + min(missing, chunk, budget)
            if end == request.num_computed_tokens:
                continue
            budget -= end - request.num_computed_tokens
            assert world.cache.extend(request, end)
            world.write(request, request.num_computed_tokens, end, request.num_computed_tokens)
        for request in world.held:
            world.cache.forget(request)
    world.check()
    world.close()


def test_a_prompt_of_many_chunks_pins_a_window_and_a_chunk_and_others_take_the_rest():
    world = World(window=6, page_size=2, num_pages=100, spare=0, prefix=False)
    request = world.admit([1] * 90)
    assert request is not None
    most = 0
    while request.num_computed_tokens < 90:
        assert world.compute(request, STEP)
        most = max(most, world.windows.num_pages - world.windows.num_available)
        world.cache.forget(request)
        world.check()
    assert 5 < most <= 7
    assert world.windows.num_pages == 3 + 2 + 3
    world.close()


def test_a_published_prompt_keeps_its_window_pages_until_others_need_them():
    world = World(window=4, page_size=2, num_pages=60, spare=14)
    first = world.admit(list(range(20)))
    assert first is not None
    while first.num_computed_tokens < 20:
        world.compute(first, STEP)
        world.cache.forget(first)
    world.release(first, True)
    # All of it, because a request can also continue from a shorter prefix.
    shorter = world.admit([*range(12), 99, 98])
    assert shorter is not None
    assert shorter.num_computed_tokens == 12
    world.release(shorter, False)
    taker = world.admit([100 + i for i in range(60)])
    assert taker is not None
    while taker.num_computed_tokens < 60:
        world.compute(taker, STEP)
        world.cache.forget(taker)
    world.release(taker, True)
    # Its pages of the full layers are there, and of no use.
    assert len(world.cache.prefix.match(list(range(20))).pages) == 10
    again = world.admit(list(range(20)))
    assert again is not None
    assert again.num_computed_tokens == 0
    world.close()


def test_of_what_arrives_the_page_that_is_filled_from_its_middle_on_serves_nobody_who_sees_more():
    world = World(window=4, page_size=4, num_pages=40, spare=8)
    request = world.admit(list(range(14)), arrives=True)
    assert request is not None
    # Tokens 11 to 13 came; behind page 2 tokens 9 and 10 would be seen, too.
    assert world.windows.num_usable(request.pages[:3]) == 0
    for _ in range(5):
        world.compute(request, 1)
    world.release(request, True)
    again = world.admit([*range(14), 0, 0, 0])
    assert again is not None
    # Behind token 15 it is all there.
    assert again.num_computed_tokens == 16
    world.close()


def test_copies_of_one_prompt_keep_the_better_filled_window_page():
    world = World(window=4, page_size=4, num_pages=40, spare=8)
    arrived, computed = world.admit(list(range(14)), arrives=True), world.admit([5])
    assert arrived is not None
    assert computed is not None
    world.release(computed, False)
    whole = Request("whole", list(range(14)), ResolvedSampling(max_new_tokens=3))
    assert world.cache.try_admit(whole, num_tokens=14, max_prefix=0)
    world.held.append(whole)
    while whole.num_computed_tokens < 14:
        world.compute(whole, STEP)
    world.begin_step()
    world.cache.share(whole)
    world.check()
    assert whole.pages[:3] == arrived.pages[:3]
    assert world.windows.num_usable(whole.pages[:3]) == 3
    world.end_step()
    world.check()
    world.close()


def test_window_pages_left_over_wait_for_the_end_of_the_step_that_may_look_at_them():
    world = World(window=4, page_size=2, num_pages=40, spare=12)
    first, second = world.admit([3] * 9), world.admit([3] * 9)
    assert first is not None
    assert second is not None
    for request in (first, second):
        while request.num_computed_tokens < 9:
            world.compute(request, STEP)
    world.cache.share(first)
    available = world.windows.num_available
    world.begin_step()
    world.cache.share(second)
    assert second.pages[:4] == first.pages[:4]
    # Those of its own copies of the first four pages, of which five were in its window of this step.
    assert world.windows.num_available == available
    world.check()
    world.end_step()
    assert world.windows.num_available == available + 4
    world.close()


def test_more_than_is_promised_is_refused_and_less_than_everything_is_not():
    world = World(window=6, page_size=2, num_pages=100, spare=5, prefix=False)
    # Five pages each, three of a step, and there are thirteen.
    assert world.admit([1] * 40) is not None
    assert world.admit([2] * 40) is not None
    assert world.admit([3] * 40) is None
    world.check()
    world.release(world.held[0], False)
    assert world.admit([3] * 40) is not None
    world.close()


def test_who_outgrew_a_promise_took_none_of_what_steps_need():
    world = World(window=6, page_size=2, num_pages=100, spare=4, prefix=False)
    # With pages promised for four tokens, it pins five of twelve. Three of a step must be free beside the promises.
    outgrown = world.admit([1])
    assert outgrown is not None
    while outgrown.num_computed_tokens < 10:
        assert world.compute(outgrown, 1)
    assert world.admit([2] * 40) is None
    world.cache.forget(outgrown)
    newcomer = world.admit([2] * 40)
    assert newcomer is not None
    while newcomer.num_computed_tokens < 40:
        assert world.compute(newcomer, STEP)
        world.cache.forget(newcomer)
    world.check()
    world.close()


def test_a_window_that_moves_on_within_its_promise_makes_no_room():
    """A rejected request is not checked again, because the check takes time in proportion to the prompt."""
    world = World(window=6, page_size=2, num_pages=100, prefix=False)
    request = world.admit([1] * 12)
    assert request is not None
    while request.num_tokens < 40:
        assert world.compute(request, STEP)
        num_releases, secured = world.cache.num_releases, world.windows._secured
        world.cache.forget(request)
        assert (world.cache.num_releases > num_releases) == (world.windows._secured < secured)
    world.close()


def test_a_found_prefix_that_arriving_tokens_leave_is_not_the_first_to_be_taken():
    world = World(window=4, page_size=2, num_pages=60, spare=8)
    old, new = world.admit([5] * 6), world.admit(list(range(8)))
    for request in (old, new):
        assert request is not None
        while request.num_computed_tokens < request.num_prompt_tokens:
            assert world.compute(request, STEP)
        world.release(request, True)
    arriving = world.admit([*range(8), *[9] * 20], arrives=True)
    assert arriving is not None
    assert arriving.num_computed_tokens == 28
    first_idle = next(iter(world.windows._idle))
    assert first_idle in world.cache.prefix.match([5] * 6).pages
    world.close()


@pytest.mark.parametrize("window", [1, 2, 100])
def test_windows_of_any_size(window):
    world = World(window=window, page_size=3, num_pages=80, spare=0)
    request = world.admit(list(range(50)), max_new_tokens=40)
    assert request is not None
    while world.compute(request, STEP):
        world.cache.forget(request)
        world.check()
    assert request.num_tokens == request.num_tokens_at_most == 90
    world.close()
