"""Which worker of a pool gets the next request. Pure: sees a non-empty list and what is known of the request.

round_robin   each in turn.
random        any.
least_load    of two drawn at random the one with less under way: nearly as even as asking all, and no herd.
session       requests of one session go to one worker while that has room: its prefix cache knows their history.
cache_aware   the worker whose prefix cache has most of the prompt, unless it is loaded far above the least loaded.

Load is what this router has under way at a worker, in requests.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, Protocol, TypeVar

from splitserve.errors import ConfigError
from splitserve.router.local_prefill import PromptBlocks
from splitserve.router.worker import Worker

T = TypeVar("T")

# Of the mean load: a worker above that is passed over by sessions that want it.
_MAX_LOAD = 1.25


@dataclass(frozen=True, slots=True)
class Balance:
    """When a load is far above the least: where it is so by both measures. The first is for small loads, where a factor
    means nothing, the second for large ones, where a difference does."""

    # Requests. More in line than this cost a prompt more time than its cached prefix saves.
    abs_threshold: int = 8
    rel_threshold: float = 1.5

    def is_overloaded(self, load: int, least: int) -> bool:
        return load > least + self.abs_threshold and load > least * self.rel_threshold


@dataclass(frozen=True, slots=True)
class Wish:
    """What of a request a policy may look at."""

    # Requests with the same one want the same worker; None: it does not matter.
    session: str | None = None
    # Hashes of its prompt's whole blocks, by block size; empty: they are not known.
    hashes: Mapping[int, Sequence[int]] = field(default_factory=dict)
    # All its prompts, where that matters and is known; and tokens of output that must be computed with them.
    prompts: Sequence[PromptBlocks] = ()
    num_told: int = 0


ANY = Wish()
SESSION_HEADER = "x-session-id"


def wish_of(body: Mapping[str, Any], headers: Mapping[str, str]) -> Wish:
    """The session is what the client says it is, or what OpenAI's API has for requests that share a beginning."""
    named = (headers.get(SESSION_HEADER), body.get("prompt_cache_key"), body.get("user"))
    return Wish(next((name for name in named if name and isinstance(name, str)), None))


class Policy(Protocol):
    def choose(self, workers: Sequence[Worker], wish: Wish) -> Worker:
        """One of `workers`, which is never empty."""
        ...


class RoundRobin:
    """Each in turn. A worker that leaves or comes does not disturb the turn of the others for long."""

    def __init__(self) -> None:
        self._turn = 0

    def choose(self, workers: Sequence[Worker], wish: Wish) -> Worker:
        worker = workers[self._turn % len(workers)]
        self._turn += 1
        return worker


class RandomChoice:
    def __init__(self) -> None:
        self._random = random.Random()

    def choose(self, workers: Sequence[Worker], wish: Wish) -> Worker:
        return self._random.choice(workers)


class LeastLoad:
    def __init__(self, seed: int | None = None) -> None:
        self._random = random.Random(seed)

    def choose(self, workers: Sequence[Worker], wish: Wish) -> Worker:
        drawn = self._random.sample(workers, min(2, len(workers)))
        return min(drawn, key=lambda worker: worker.num_running)


class SessionAffinity:
    """Each session has an order of all workers of its own, the same at every router. The first that is not loaded far
    above the mean gets the request, so one that goes or comes moves the sessions it has to, and no busy session drowns
    a worker. A request without a session goes where load is low."""

    def __init__(self, seed: int | None = None) -> None:
        self._without_session = LeastLoad(seed)

    def choose(self, workers: Sequence[Worker], wish: Wish) -> Worker:
        session = wish.session
        if session is None:
            return self._without_session.choose(workers, wish)
        # With this request.
        total = 1 + sum(worker.num_running for worker in workers)
        bound = math.ceil(_MAX_LOAD * total / len(workers))
        # One is at the mean or below, so somebody has room.
        with_room = [worker for worker in workers if worker.num_running < bound]
        return max(with_room, key=lambda worker: _weight(session, worker.url))


def _weight(session: str, url: str) -> bytes:
    return blake2b(f"{session}\0{url}".encode(errors="replace"), digest_size=8).digest()


class CacheAware:
    """The longest cached prefix wins among those that are not overloaded, and of equal ones the least loaded."""

    def __init__(self, balance: Balance, seed: int | None = None) -> None:
        self._balance = balance
        self._random = random.Random(seed)

    def choose(self, workers: Sequence[Worker], wish: Wish) -> Worker:
        return self._best([(w, w.num_cached_tokens(wish.hashes), w.num_running) for w in workers])

    def place(self, worker: Worker, wish: Wish) -> int | None:
        """The prompt goes to this worker: from now on its blocks are expected there. Which data parallel rank is best,
        by the same rule; None: there is no choice, or nothing to choose by."""
        prefixes = worker.prefixes
        hashes = wish.hashes.get(prefixes.block_size) if prefixes is not None else None
        if prefixes is None or not hashes:
            return None
        loads = worker.num_running_of_rank
        rank = self._best([(r, prefixes.match(hashes, r), loads[r]) for r in prefixes.ranks])
        prefixes.expect(hashes, rank)
        return rank if len(prefixes.ranks) > 1 else None

    def _best(self, candidates: Sequence[tuple[T, int, int]]) -> T:
        """Each with its cached tokens of the prompt, and its load."""
        least = min(load for _, _, load in candidates)
        fit = [c for c in candidates if not self._balance.is_overloaded(c[2], least)]
        # Where nothing tells them apart, by chance: prefixes that nobody has spread over all.
        return max(fit, key=lambda c: (c[1], -c[2], self._random.random()))[0]


_POLICIES: dict[str, Callable[[Balance], Policy]] = {
    "round_robin": lambda _: RoundRobin(),
    "random": lambda _: RandomChoice(),
    "least_load": lambda _: LeastLoad(),
    "session": lambda _: SessionAffinity(),
    "cache_aware": CacheAware,
}
POLICIES = tuple(_POLICIES)
_BALANCE = Balance()


def create_policy(name: str, balance: Balance = _BALANCE) -> Policy:
    """A policy for one pool: each pool has its own, so that their turns do not lock step."""
    try:
        return _POLICIES[name](balance)
    except KeyError:
        raise ConfigError(f"policy {name!r} is unknown: choose one of {', '.join(POLICIES)}") from None
