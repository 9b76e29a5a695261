"""Follower of `failing_follower`: its `main` runs one."""

from __future__ import annotations

import signal
import threading

from splitserve.engine.parallel.steps import FollowerRunner
from splitserve.ranks import rank_process
from support.failing_follower import MESSAGE


def main() -> int:
    is_ordered = threading.Event()
    signal.signal(signal.SIGUSR1, lambda *_: is_ordered.set())
    run = FollowerRunner._run

    def failing(self: FollowerRunner, data: bytes) -> None:
        if is_ordered.is_set():
            raise MemoryError(MESSAGE)
        run(self, data)

    FollowerRunner._run = failing  # type: ignore[method-assign]
    return rank_process.main()
