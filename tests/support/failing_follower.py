"""Worker with followers that fail at their next step after a SIGUSR1.

Start it with `python -m support.failing_follower serve ...`. Otherwise it works as `splitserve serve ...`.
"""

from __future__ import annotations

import signal
import sys
import threading

_RANK = "rank"
PROGRAM = (sys.executable, "-m", "support.failing_follower")
MESSAGE = "no memory is left for this step"


def _run_rank() -> int:
    from splitserve.engine.parallel.steps import FollowerRunner
    from splitserve.ranks.rank_process import main

    is_ordered = threading.Event()
    signal.signal(signal.SIGUSR1, lambda *_: is_ordered.set())
    run = FollowerRunner._run

    def failing(self: FollowerRunner, data: bytes) -> None:
        if is_ordered.is_set():
            raise MemoryError(MESSAGE)
        run(self, data)

    FollowerRunner._run = failing  # type: ignore[method-assign]
    return main()


def _run_worker() -> None:
    from splitserve.cli import main
    from splitserve.ranks import processes

    processes.FOLLOWER_COMMAND = (*PROGRAM, _RANK)
    main()


if __name__ == "__main__":
    if sys.argv[1] == _RANK:
        sys.exit(_run_rank())
    _run_worker()
