"""Detection of processes of a cluster that run, but answer nothing, because they are stopped or blocked."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping

import msgspec

from splitserve.deploy.placer import Observation, Phase

# Seconds in which a process must answer a check, and from an answer to the next check.
_CHECK_SECONDS = 10.0
_PAUSE = 2.0
# Checks in a row without an answer after which a process counts as ended: 30 s, as for a scheduler without heartbeats.
# More than one, because a check also fails if the supervisor was stopped.
_MAX_MISSED = 3
_ENDED = f"answered no request for {_MAX_MISSED * _CHECK_SECONDS:g} s"


class AnswerWatch:
    """Checks of all processes that serve. `answers`: returns whether a URL answers within these seconds."""

    def __init__(self, answers: Callable[[str, float], Awaitable[bool]]) -> None:
        self._answers = answers
        # Checks by name of the process. A task that has finished: its process answers nothing.
        self._watches: dict[str, asyncio.Task[None]] = {}

    def review(self, seen: Mapping[str, Observation]) -> dict[str, Observation]:
        """Return the observations, with phase ENDED for each process that answers nothing.

        Start checks of new processes, and cancel those of processes that are gone.
        """
        ready = {name: found.ready.url for name, found in seen.items() if found.ready is not None}
        for name in self._watches.keys() - ready.keys():
            self._watches.pop(name).cancel()
        for name, url in ready.items():
            if name not in self._watches:
                self._watches[name] = asyncio.create_task(self._watch(url), name="answer-watch")
        return {
            name: msgspec.structs.replace(found, phase=Phase.ENDED, detail=_ENDED)
            if name in self._watches and self._watches[name].done()
            else found
            for name, found in seen.items()
        }

    def close(self) -> None:
        self.review({})

    async def _watch(self, url: str) -> None:
        # -inf: a process that has never answered may be unreachable from this host, so it never counts as hung.
        num_missed = float("-inf")
        while num_missed < _MAX_MISSED:
            if await self._answers(url, _CHECK_SECONDS):
                num_missed = 0
                await asyncio.sleep(_PAUSE)
            else:
                num_missed += 1
