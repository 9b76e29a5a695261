"""Choice of workers: load is balanced, sessions stay on their worker, and no worker is overloaded for that."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitserve.core.errors import ConfigError
from splitserve.core.request import DisaggregationMode
from splitserve.router.args import LBArgs
from splitserve.router.policies import (
    ANY,
    POLICIES,
    LeastLoad,
    RoutingQuery,
    SessionAffinity,
    create_policy,
    routing_query,
)
from splitserve.router.registry import WorkerRegistry


@dataclass(eq=False)
class Loaded:
    """The fields of a worker that policies use."""

    url: str
    num_running: int

    def num_cached_tokens(self, hashes: object) -> int:
        return 0


def workers(*loads: int) -> list[Loaded]:
    return [Loaded(f"http://w{i}:1", load) for i, load in enumerate(loads)]


loads = st.lists(st.integers(0, 50), min_size=1, max_size=9)


@given(st.sampled_from(POLICIES), loads, st.none() | st.text())
def test_every_policy_chooses_one_of_those_there_are(name, loads, session):
    pool = workers(*loads)
    assert create_policy(name).choose(pool, RoutingQuery(session)) in pool


def test_an_unknown_policy_is_named_with_those_there_are():
    with pytest.raises(
        ConfigError, match="'best' is unknown: choose one of round_robin, random, least_load, session, cache_aware"
    ):
        create_policy("best")


@given(st.integers(0, 1000), loads.filter(lambda loads: len(loads) > 1))
def test_the_busiest_of_all_never_gets_a_request_by_load(seed, loads):
    pool = workers(*loads)
    chosen = LeastLoad(seed).choose(pool, ANY)
    assert sum(worker.num_running >= chosen.num_running for worker in pool) >= 2


def test_two_choices_even_out_what_one_would_not():
    pool, policy = workers(*[0] * 10), LeastLoad(seed=1)
    for _ in range(1000):
        policy.choose(pool, ANY).num_running += 1
    # One random choice each would leave a spread of about 60.
    assert max(w.num_running for w in pool) - min(w.num_running for w in pool) <= 10


def test_a_session_stays_where_it_is_and_sessions_spread():
    pool = workers(*[0] * 8)
    homes = {f"s{i}": SessionAffinity().choose(pool, RoutingQuery(f"s{i}")).url for i in range(400)}
    # Another router, which lists the workers in another order, sends them to the same.
    assert {s: SessionAffinity().choose(pool[::-1], RoutingQuery(s)).url for s in homes} == homes
    assert min(Counter(homes.values()).values()) > 400 / 8 / 2


def test_only_the_sessions_of_a_worker_that_goes_move():
    pool, policy = workers(*[0] * 8), SessionAffinity()
    sessions = [RoutingQuery(f"s{i}") for i in range(200)]
    before = [policy.choose(pool, query) for query in sessions]
    after = [policy.choose(pool[1:], query) for query in sessions]
    moved = [(a, b) for a, b in zip(before, after, strict=True) if a is not b]
    assert {a for a, _ in moved} == {pool[0]}
    assert len({b for _, b in moved}) > 3


@given(loads, st.lists(st.sampled_from(["a", "b", "c"]), max_size=60))
def test_no_worker_is_loaded_far_above_the_mean_for_a_session(loads, sessions):
    pool, policy = workers(*loads), SessionAffinity()
    for session in sessions:
        chosen = policy.choose(pool, RoutingQuery(session))
        chosen.num_running += 1
        assert chosen.num_running <= 1.25 * sum(w.num_running for w in pool) / len(pool) + 1


def test_a_session_whose_worker_is_full_has_a_second_home():
    pool, policy = workers(0, 0, 0), SessionAffinity()
    first = policy.choose(pool, RoutingQuery("s"))
    first.num_running = 30
    seconds = {policy.choose(pool, RoutingQuery("s")).url for _ in range(10)}
    assert len(seconds) == 1
    assert first.url not in seconds


def test_a_request_without_a_session_goes_where_load_is_low():
    pool = workers(9, 0)
    assert [SessionAffinity(seed).choose(pool, ANY) for seed in range(5)] == [pool[1]] * 5


def test_round_robin_takes_turns_whatever_the_wish():
    pool, policy = workers(5, 0, 0), create_policy("round_robin")
    turns = [policy.choose(pool, RoutingQuery(s)) for s in itertools.islice(itertools.cycle("ab"), 6)]
    assert turns == pool * 2


def test_each_kind_of_worker_may_have_its_own_policy():
    args = LBArgs(policy="least_load", decode_policy="session")
    assert [args.policy_of(mode) for mode in DisaggregationMode] == ["least_load", "least_load", "session"]
    with pytest.raises(ConfigError, match="--prefill-policy best: choose one of round_robin"):
        LBArgs(prefill_policy="best")


@pytest.mark.parametrize(
    ("body", "headers", "session"),
    [
        ({}, {}, None),
        ({"user": "u"}, {}, "u"),
        ({"user": "u", "prompt_cache_key": "k"}, {}, "k"),
        ({"user": "u", "prompt_cache_key": "k"}, {"x-session-id": "s"}, "s"),
        ({"user": 7, "prompt_cache_key": ""}, {}, None),
    ],
)
def test_a_session_is_what_the_client_says_it_is(body, headers, session):
    assert routing_query("/generate", body, headers) == RoutingQuery(session)


def test_the_pools_of_a_registry_choose_by_their_own_policies():
    registry = WorkerRegistry(LBArgs(prefill_policy="round_robin", decode_policy="session"))
    for i in range(3):
        registry.add(f"http://p{i}:1", DisaggregationMode.PREFILL, 1)
        registry.add(f"http://d{i}:1", DisaggregationMode.DECODE)
    pairs = [registry.select(RoutingQuery("s")) for _ in range(3)]
    assert len({pair.prefill.url for pair in pairs}) == 3
    assert len({pair.decode.url for pair in pairs}) == 1
