"""Detection of processes of a cluster that run, but answer nothing, because they are stopped or blocked."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping

import msgspec

from splitserve.deploy.placer import Observation, Phase

# Seconds in which a process must answer a check, and between two checks.
CHECK_SECONDS = 10.0
_PAUSE = 2.0
# Number of checks in a row without an answer after which a process counts as ended. They take as long as the heartbeats
# of a scheduler may be missing. Several, because the first one also fails if this process was stopped.
_MAX_MISSED = 3
_ENDED = f"answered no request for {_MAX_MISSED * CHECK_SECONDS:g} s"


class AnswerWatch:
    """Checks of all processes that serve. `answers`: returns whether a URL answers within CHECK_SECONDS."""

    def __init__(self, answers: Callable[[str, float], Awaitable[bool]]) -> None:
        self._answers = answers
        # By name and process id. Returned: the process answers nothing.
        self._watches: dict[tuple[str, int | None], asyncio.Task[None]] = {}

    def review(self, seen: Mapping[str, Observation]) -> dict[str, Observation]:
        """Return the observations, in which a process that answers nothing has ended. Start and end its checks."""
        ready = {(name, found.pid): found.ready.url for name, found in seen.items() if found.ready is not None}
        for key in self._watches.keys() - ready.keys():
            self._watches.pop(key).cancel()
        for key, url in ready.items():
            if key not in self._watches:
                self._watches[key] = asyncio.create_task(self._watch(url), name="answer-watch")
        hung = {name for (name, _), watch in self._watches.items() if watch.done() and watch.exception() is None}
        return {
            name: msgspec.structs.replace(found, phase=Phase.ENDED, detail=_ENDED)
            if name in hung and found.phase is Phase.READY
            else found
            for name, found in seen.items()
        }

    def close(self) -> None:
        self.review({})

    async def _watch(self, url: str) -> None:
        # A process that has never answered may be unreachable from here.
        num_missed = float("-inf")
        while num_missed < _MAX_MISSED:
            num_missed = 0 if await self._answers(url, CHECK_SECONDS) else num_missed + 1
            await asyncio.sleep(_PAUSE)
