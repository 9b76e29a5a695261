"""Which worker of a pool gets the next request. Pure: sees a non-empty list, picks one of it."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Protocol

from splitserve.errors import ConfigError
from splitserve.router.worker import Worker


class Policy(Protocol):
    def choose(self, workers: Sequence[Worker]) -> Worker:
        """One of `workers`, which is never empty."""
        ...


class RoundRobin:
    """Each in turn. A worker that leaves or comes does not disturb the turn of the others for long."""

    def __init__(self) -> None:
        self._turn = 0

    def choose(self, workers: Sequence[Worker]) -> Worker:
        worker = workers[self._turn % len(workers)]
        self._turn += 1
        return worker


class RandomChoice:
    def __init__(self) -> None:
        self._random = random.Random()

    def choose(self, workers: Sequence[Worker]) -> Worker:
        return self._random.choice(workers)


_POLICIES: dict[str, Callable[[], Policy]] = {"round_robin": RoundRobin, "random": RandomChoice}


def create_policy(name: str) -> Policy:
    """A policy for one pool: each pool has its own, so that their turns do not lock step."""
    try:
        return _POLICIES[name]()
    except KeyError:
        raise ConfigError(f"policy {name!r} is unknown: choose one of {', '.join(_POLICIES)}") from None
