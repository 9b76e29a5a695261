"""Which worker of a pool gets the next request. Pure: sees a non-empty list and what is known of the request.

round_robin   each in turn.
random        any.
least_load    of two drawn at random the one with less under way: nearly as even as asking all, and no herd.
session       requests of one session go to one worker while that has room: its prefix cache knows their history.

Load is what this router has under way at a worker, in requests.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Protocol

from splitserve.errors import ConfigError
from splitserve.router.worker import Worker

# Of the mean load: a worker above that is passed over by sessions that want it.
_MAX_LOAD = 1.25


@dataclass(frozen=True, slots=True)
class Wish:
    """What of a request a policy may look at."""

    # Requests with the same one want the same worker; None: it does not matter.
    session: str | None = None


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


_POLICIES: dict[str, Callable[[], Policy]] = {
    "round_robin": RoundRobin,
    "random": RandomChoice,
    "least_load": LeastLoad,
    "session": SessionAffinity,
}
POLICIES = tuple(_POLICIES)


def create_policy(name: str) -> Policy:
    """A policy for one pool: each pool has its own, so that their turns do not lock step."""
    try:
        return _POLICIES[name]()
    except KeyError:
        raise ConfigError(f"policy {name!r} is unknown: choose one of {', '.join(POLICIES)}") from None
