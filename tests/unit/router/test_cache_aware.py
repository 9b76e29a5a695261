"""The cache-aware policy: the longest cached prefix wins, within bounds of load, and evicted prefixes are forgotten."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitserve.cache.kv_events import block_hash, page_names
from splitserve.cache.prefix import split_pages
from splitserve.core.clock import ManualClock
from splitserve.core.errors import ConfigError
from splitserve.core.request import DisaggregationMode
from splitserve.observe.events.schema import AllBlocksCleared, BlockIndex, BlockRemoved, BlockStored
from splitserve.router import prefixes
from splitserve.router.args import LBArgs
from splitserve.router.pairing import with_rooms
from splitserve.router.policies import Balance, CacheAware, RoutingQuery, routing_query
from splitserve.router.prefixes import EXPECTED_SECONDS, CachedPrefixes
from splitserve.router.registry import WorkerRegistry
from splitserve.router.worker import Worker, WorkerPair

SIZE = 2
BALANCE = Balance(abs_threshold=2, rel_threshold=1.5)
PROMPT = list(range(10))


def chain(tokens: list[int]) -> list[int]:
    return [block_hash(name) for name in page_names(split_pages(tokens, SIZE))]


def query(tokens: list[int]) -> RoutingQuery:
    return RoutingQuery(hashes={SIZE: chain(tokens)})


def stored(tokens: list[int]) -> BlockStored:
    names = chain(tokens)
    return BlockStored(names, None, tokens[: len(names) * SIZE], SIZE)


class World:
    """Return workers with these loads, each with `dp_size` data parallel ranks."""

    def __init__(self, *loads: int, dp_size: int = 1) -> None:
        self.clock = ManualClock()
        self.policy = CacheAware(BALANCE, seed=1)
        self.indexes = [[BlockIndex() for _ in range(dp_size)] for _ in loads]
        self.workers = [Worker(f"http://w{i}:1", DisaggregationMode.PREFILL) for i in range(len(loads))]
        for worker, load, indexes in zip(self.workers, loads, self.indexes, strict=True):
            worker.prefixes = CachedPrefixes(SIZE, indexes, self.clock)
            for _ in range(load):
                begin(worker)

    def tell(self, i: int, event: Any, rank: int = 0) -> None:
        self.indexes[i][rank].apply(event)

    def choose(self, tokens: list[int]) -> Worker:
        return self.policy.choose(self.workers, query(tokens))

    def send(self, tokens: list[int]) -> tuple[int, int | None]:
        """Start a request. Return its worker and rank."""
        worker = self.choose(tokens)
        rank = self.policy.place(worker, query(tokens))
        begin(worker)
        if rank is not None:
            worker.num_running_of_rank[rank] += 1
        return self.workers.index(worker), rank


def begin(worker: Worker) -> None:
    worker.calls.add(object())  # type: ignore[arg-type]


def common_blocks(a: list[int], b: list[int]) -> int:
    """Whole blocks that two prompts begin with, in tokens."""
    count = 0
    while count + SIZE <= min(len(a), len(b)) and a[count : count + SIZE] == b[count : count + SIZE]:
        count += SIZE
    return count


TOKENS = st.lists(st.integers(0, 1), max_size=8)
LOADS = st.lists(st.integers(0, 12), min_size=1, max_size=5)


@given(LOADS, st.lists(st.tuples(st.integers(0, 4), st.integers(0, 1), TOKENS), max_size=8), TOKENS)
def test_the_longest_match_wins_among_those_that_are_not_overloaded(loads, told, prompt) -> None:
    world = World(*loads, dp_size=2)
    cached = [0] * len(loads)
    for i, rank, tokens in told:
        i %= len(loads)
        world.tell(i, stored(tokens), rank)
        cached[i] = max(cached[i], common_blocks(tokens, prompt))
    chosen = world.workers.index(world.choose(prompt))
    fit = [i for i, load in enumerate(loads) if load <= max(min(loads) + 2, min(loads) * 1.5)]
    best = max(cached[i] for i in fit)
    assert chosen in fit
    assert cached[chosen] == best
    assert loads[chosen] == min(loads[i] for i in fit if cached[i] == best)


@given(LOADS, st.lists(st.sampled_from([PROMPT, [7, 7, 7, 7], []]), max_size=40))
def test_no_worker_is_drowned_for_the_sake_of_its_cache(loads, prompts) -> None:
    world = World(*loads)
    for prompt in prompts:
        least = min(w.num_running for w in world.workers)
        i, _ = world.send(prompt)
        assert world.workers[i].num_running - 1 <= max(least + 2, least * 1.5)


def test_a_burst_of_equal_prompts_goes_to_one_worker_before_any_event_came() -> None:
    world = World(0, 0, 0)
    assert len({world.send(PROMPT)[0] for _ in range(3)}) == 1


def test_prompts_that_nobody_has_go_where_load_is_low_and_spread_where_it_is_equal() -> None:
    assert World(3, 1, 2).send(PROMPT) == (1, None)
    world = World(*[0] * 4)
    homes = {world.workers.index(world.choose([i] * 4)) for i in range(40)}
    assert homes == {0, 1, 2, 3}


def test_what_was_given_to_a_worker_is_expected_there_for_a_bounded_time() -> None:
    world = World(0, 0)
    i, _ = world.send(PROMPT)
    known = world.workers[i].prefixes
    assert known is not None
    world.clock.advance(EXPECTED_SECONDS - 1)
    assert known.longest_match(chain(PROMPT)) == len(PROMPT)
    world.clock.advance(1)
    assert known.longest_match(chain(PROMPT)) == 0


@pytest.mark.parametrize("gone", [BlockRemoved(chain(PROMPT)[2:]), AllBlocksCleared()])
def test_an_evicted_block_is_forgotten_also_if_it_was_expected_before(gone) -> None:
    world = World(0)
    world.send(PROMPT)
    world.tell(0, stored(PROMPT))
    known = world.workers[0].prefixes
    assert known is not None
    assert known.longest_match(chain(PROMPT)) == len(PROMPT)
    world.tell(0, gone)
    assert known.longest_match(chain(PROMPT)) == (4 if isinstance(gone, BlockRemoved) else 0)


def test_what_the_index_has_is_not_expected_so_that_its_eviction_counts_at_once() -> None:
    world = World(0)
    world.tell(0, stored(PROMPT))
    known = world.workers[0].prefixes
    assert known is not None
    known.expect(chain(PROMPT), 0)
    world.tell(0, BlockRemoved(chain(PROMPT)))
    assert known.longest_match(chain(PROMPT)) == 0


def test_expectations_have_a_bound_and_the_oldest_go_first(monkeypatch) -> None:
    monkeypatch.setattr(prefixes, "MAX_EXPECTED", 6)
    known = CachedPrefixes(SIZE, [BlockIndex()], ManualClock())
    first, second = chain([1] * 8), chain([2] * 8)
    known.expect(first, 0)
    known.expect(second, 0)
    assert known.match(second, 0) == 8
    assert known.match(first, 0) == 0
    assert sum(len(e) for e in known._expected) == 6


def test_the_rank_that_has_the_prefix_gets_it_until_it_is_overloaded() -> None:
    world = World(0, dp_size=3)
    world.tell(0, stored(PROMPT), rank=1)
    ranks = [world.send(PROMPT)[1] for _ in range(4)]
    assert ranks[:3] == [1, 1, 1]
    assert ranks[3] in (0, 2)


@pytest.mark.parametrize("rank", [0, 2])
def test_a_prompt_is_expected_at_the_rank_that_the_client_names(rank: int) -> None:
    world = World(0, dp_size=3)
    world.tell(0, stored(PROMPT), rank=1)
    known = world.workers[0].prefixes
    assert known is not None
    named = RoutingQuery(hashes={SIZE: chain(PROMPT)}, rank=rank, leaves_rank=False)
    assert world.policy.place(world.workers[0], named) == rank
    assert [known.match(chain(PROMPT), r) for r in range(3)] == [10 * (r in (1, rank)) for r in range(3)]
    # Its blocks may be unknown. The request still counts at that rank.
    assert world.policy.place(world.workers[0], RoutingQuery(rank=rank, leaves_rank=False)) == rank


@pytest.mark.parametrize("rank", [3, -1, 2**70])
def test_a_request_counts_at_no_rank_that_the_worker_does_not_have(rank: int) -> None:
    world = World(0, dp_size=3)
    named = RoutingQuery(hashes={SIZE: chain(PROMPT)}, rank=rank, leaves_rank=False)
    assert world.policy.place(world.workers[0], named) is None


def test_the_ranks_of_a_batch_are_left_to_its_rooms() -> None:
    world = World(0, dp_size=3)
    batch = RoutingQuery(hashes={SIZE: chain(PROMPT)}, leaves_rank=False)
    known = world.workers[0].prefixes
    assert known is not None
    assert world.policy.place(world.workers[0], batch) is None
    assert known.longest_match(chain(PROMPT)) == 0
    # With one rank there is no choice.
    single = World(0)
    assert single.policy.place(single.workers[0], batch) is None
    assert single.workers[0].num_cached_tokens({SIZE: chain(PROMPT)}) == len(PROMPT)


@pytest.mark.parametrize(
    ("path", "body", "rank", "leaves_rank"),
    [
        ("/generate", {"text": "a"}, None, True),
        ("/generate", {"text": ["a"], "sampling_params": {"n": 2}}, None, True),
        ("/generate", {"text": ["a", "b"]}, None, False),
        ("/generate", {"input_ids": [[1], [2]]}, None, False),
        ("/v1/completions", {"prompt": [1, 2]}, None, True),
        ("/v1/completions", {"prompt": ["a", "b"]}, None, False),
        ("/v1/chat/completions", {"messages": [{}, {}], "n": 2}, None, True),
        ("/generate", {"text": "a", "data_parallel_rank": 1}, 1, False),
        ("/generate", {"text": ["a", "b"], "data_parallel_rank": 0}, 0, False),
        ("/generate", {"text": ["a", "b"], "data_parallel_rank": [0, 1]}, None, False),
        ("/generate", {"text": "a", "data_parallel_rank": "1"}, None, False),
    ],
)
def test_the_policy_chooses_a_rank_for_one_prompt_if_the_client_chose_none(path, body, rank, leaves_rank) -> None:
    found = routing_query(path, body, {})
    assert (found.rank, found.leaves_rank) == (rank, leaves_rank)


def test_a_prompt_without_known_blocks_leaves_the_rank_to_the_worker() -> None:
    world = World(0, dp_size=3)
    assert world.policy.place(world.workers[0], RoutingQuery()) is None
    assert world.policy.place(world.workers[0], RoutingQuery(hashes={SIZE: []})) is None
    # A worker with blocks of another size has none of these.
    assert world.policy.place(world.workers[0], RoutingQuery(hashes={SIZE + 1: [5]})) is None
    assert world.workers[0].num_cached_tokens({SIZE + 1: [5]}) == 0


def test_a_request_is_counted_at_its_rank_while_it_runs() -> None:
    worker = Worker("http://w:1", DisaggregationMode.PREFILL)
    with worker.serving_on(2), worker.serving_on(None):
        assert +worker.num_running_of_rank == {2: 1}
    assert not +worker.num_running_of_rank


def registry(**policies: str) -> WorkerRegistry:
    found = WorkerRegistry(LBArgs(**policies))
    for i in range(3):
        found.add(f"http://p{i}:1", DisaggregationMode.PREFILL, 1)
        found.add(f"http://d{i}:1", DisaggregationMode.DECODE)
    return found


def test_each_pool_looks_at_its_own_caches_and_the_pair_says_the_rank_of_prefill() -> None:
    found = registry(policy="cache_aware")
    for worker in found.all():
        ranks = 2 if worker.mode is DisaggregationMode.PREFILL else 1
        worker.prefixes = CachedPrefixes(SIZE, [BlockIndex() for _ in range(ranks)])
    p, d = found.get("http://p1:1").prefixes, found.get("http://d2:1").prefixes
    assert p is not None
    assert d is not None
    p.expect(chain(PROMPT), 1)
    d.expect(chain(PROMPT), 0)
    assert found.block_sizes == {SIZE}
    for _ in range(3):
        pair = found.select(query(PROMPT))
        assert isinstance(pair, WorkerPair)
        assert (pair.prefill.url, pair.decode.url, pair.prefill_rank) == ("http://p1:1", "http://d2:1", 1)


def test_only_the_pools_with_this_policy_are_cache_aware() -> None:
    assert registry(prefill_policy="cache_aware").cache_aware_modes == {DisaggregationMode.PREFILL}
    assert registry(policy="session").cache_aware_modes == frozenset()


def test_the_rank_goes_to_both_workers_unless_the_client_named_one() -> None:
    assert "data_parallel_rank" not in with_rooms("/generate", {"text": "a"}, "h", 1)
    assert with_rooms("/generate", {"text": "a"}, "h", 1, prefill_rank=0)["data_parallel_rank"] == 0
    own = {"text": "a", "data_parallel_rank": 2}
    assert with_rooms("/generate", own, "h", 1, prefill_rank=0)["data_parallel_rank"] == 2


@pytest.mark.parametrize("wrong", [{"balance_abs_threshold": -1}, {"balance_rel_threshold": 0.5}])
def test_thresholds_below_the_least_load_are_refused(wrong) -> None:
    with pytest.raises(ConfigError, match=r"--balance-.*-threshold must be (0 or more|at least 1), not"):
        LBArgs(**wrong)


def test_the_caches_of_a_worker_that_was_lost_are_unknown() -> None:
    worker = World(0, dp_size=2).workers[0]
    worker.mark_unhealthy()
    assert worker.prefixes is None
    worker.prefixes = again = CachedPrefixes(SIZE, [BlockIndex()])
    worker.mark_unhealthy()
    assert worker.prefixes is again
