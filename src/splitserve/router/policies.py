"""Routing policies: choice of the worker of a pool that gets the next request. Pure.

A policy gets a non-empty list of workers and the known properties of the request.

round_robin   each worker in turn.
random        any worker.
least_load    the less loaded of two random workers: nearly as even as comparing all, and without herding.
session       all requests of a session go to one worker while it has room: its prefix cache holds their history.
cache_aware   the worker that has most of the prompt cached, unless its load is far above the least load.

Load is the number of requests that this router has in flight at a worker.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, TypeVar

from splitserve.core.errors import ConfigError
from splitserve.router.pairing import count_prompts
from splitserve.router.prefixes import PromptBlocks
from splitserve.router.worker import Worker

T = TypeVar("T")

# Factor of the mean load. Sessions that prefer a worker above it go to another.
_MAX_LOAD = 1.25


@dataclass(frozen=True, slots=True)
class Balance:
    """Thresholds above which a load is far above the least one. Both must be exceeded.

    A factor is meaningless for small loads, and a difference for large ones.
    """

    # Requests. A longer waiting queue costs a prompt more time than its cached prefix saves.
    abs_threshold: int = 8
    rel_threshold: float = 1.5

    def is_overloaded(self, load: int, least: int) -> bool:
        return load > least + self.abs_threshold and load > least * self.rel_threshold


_BALANCE = Balance()


@dataclass(frozen=True, slots=True)
class RoutingQuery:
    """Properties of a request that a policy may use."""

    # Requests of one session prefer the same worker. None: no preference.
    session: str | None = None
    # Hashes of its prompt's whole blocks, by block size. Empty: unknown.
    hashes: Mapping[int, Sequence[int]] = field(default_factory=dict)
    # All its prompts (empty: not needed, or unknown), and the number of output tokens to compute with them.
    prompts: Sequence[PromptBlocks] = ()
    num_output_tokens: int = 0
    # Data parallel rank of the prefill worker that the client chose. None: none, or one for each sample.
    rank: int | None = None
    # Whether the policy may choose the rank: the client chose none, and all samples have the same prompt.
    leaves_rank: bool = True


ANY = RoutingQuery()
SESSION_HEADER = "x-session-id"


def routing_query(path: str, body: Mapping[str, Any], headers: Mapping[str, str]) -> RoutingQuery:
    """Return the routing query of a request. Its session: the client's, or an OpenAI field that groups requests."""
    named = (headers.get(SESSION_HEADER), body.get("prompt_cache_key"), body.get("user"))
    session = next((name for name in named if name and isinstance(name, str)), None)
    rank = body.get("data_parallel_rank")
    leaves_rank = rank is None and count_prompts(path, body) == 1
    return RoutingQuery(session, rank=rank if isinstance(rank, int) else None, leaves_rank=leaves_rank)


class Policy:
    """Policy of one pool. Pools do not share one, so that their turns are independent. `seed`: of its randomness."""

    def __init__(self, balance: Balance = _BALANCE, seed: int | None = None) -> None:
        self._balance = balance
        self._random = random.Random(seed)

    def choose(self, workers: Sequence[Worker], query: RoutingQuery) -> Worker:
        """Return one of `workers`, which is never empty."""
        raise NotImplementedError

    def place(self, worker: Worker, query: RoutingQuery) -> int | None:
        """Record that the request is sent to `worker`. Return the data parallel rank for it. None: any."""
        return None


class RoundRobin(Policy):
    """Each worker in turn. Workers that join or leave disturb the order only briefly."""

    _turn = -1

    def choose(self, workers: Sequence[Worker], query: RoutingQuery) -> Worker:
        self._turn += 1
        return workers[self._turn % len(workers)]


class RandomChoice(Policy):
    def choose(self, workers: Sequence[Worker], query: RoutingQuery) -> Worker:
        return self._random.choice(workers)


class LeastLoad(Policy):
    def choose(self, workers: Sequence[Worker], query: RoutingQuery) -> Worker:
        sampled = self._random.sample(workers, min(2, len(workers)))
        return min(sampled, key=lambda worker: worker.num_running)


class SessionAffinity(LeastLoad):
    """Policy that keeps the requests of a session at one worker.

    Each session has its own order of all workers, the same at every router. The first one that is not far above the
    mean load gets the request. So a worker that joins or leaves moves few sessions, and no busy session overloads a
    worker. A request without a session goes to a worker with low load.
    """

    def choose(self, workers: Sequence[Worker], query: RoutingQuery) -> Worker:
        session = query.session
        if session is None:
            return super().choose(workers, query)
        # Total load including this request.
        total = 1 + sum(worker.num_running for worker in workers)
        bound = math.ceil(_MAX_LOAD * total / len(workers))
        # At least one worker is at the mean or below, so `with_room` is not empty.
        with_room = [worker for worker in workers if worker.num_running < bound]
        return max(with_room, key=lambda worker: _weight(session, worker.url))


def _weight(session: str, url: str) -> bytes:
    return blake2b(f"{session}\0{url}".encode(errors="replace"), digest_size=8).digest()


class CacheAware(Policy):
    """Longest cached prefix among workers that are not overloaded; of equal ones, the least loaded."""

    def choose(self, workers: Sequence[Worker], query: RoutingQuery) -> Worker:
        return self._best([(w, w.num_cached_tokens(query.hashes), w.num_running) for w in workers])

    def place(self, worker: Worker, query: RoutingQuery) -> int | None:
        """Expect the prompt's blocks at this worker from now on. Return its data parallel rank.

        The rank is the client's, or the best one by the same rule. None: the worker has only one rank, nothing is known
        of the blocks, or the rooms of a batch determine the ranks.
        """
        prefixes = worker.prefixes
        if prefixes is None:
            return None
        hashes, loads, rank = query.hashes.get(prefixes.block_size, ()), worker.num_running_of_rank, query.rank
        if len(prefixes.ranks) == 1:
            rank = 0
        elif query.leaves_rank and hashes:
            rank = self._best([(r, prefixes.match(hashes, r), loads[r]) for r in prefixes.ranks])
        if rank is None or rank not in prefixes.ranks:
            return None
        prefixes.expect(hashes, rank)
        return rank if len(prefixes.ranks) > 1 else None

    def _best(self, candidates: Sequence[tuple[T, int, int]]) -> T:
        """Return the best candidate. A candidate: item, cached tokens of the prompt, load."""
        least = min(load for _, _, load in candidates)
        fit = [c for c in candidates if not self._balance.is_overloaded(c[2], least)]
        # Ties are broken at random, so that uncached prefixes spread over all workers.
        return max(fit, key=lambda c: (c[1], -c[2], self._random.random()))[0]


_POLICIES: dict[str, type[Policy]] = {
    "round_robin": RoundRobin,
    "random": RandomChoice,
    "least_load": LeastLoad,
    "session": SessionAffinity,
    "cache_aware": CacheAware,
}
POLICIES = tuple(_POLICIES)


def create_policy(name: str, balance: Balance = _BALANCE) -> Policy:
    """Return a new policy for one pool."""
    try:
        return _POLICIES[name](balance)
    except KeyError:
        raise ConfigError(f"policy {name!r} is unknown: choose one of {', '.join(POLICIES)}") from None
