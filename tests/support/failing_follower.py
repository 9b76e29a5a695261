"""Worker with followers that fail at their next step after a SIGUSR1.

Start it with `python -m support.failing_follower serve ...`. Otherwise it works as `splitserve serve ...`.
"""

from __future__ import annotations

import sys

PROGRAM = (sys.executable, "-m", "support.failing_follower")
MESSAGE = "no memory is left for this step"


def main() -> None:
    from splitserve import cli
    from splitserve.process.engine_start import QUICK_START
    from splitserve.ranks import processes

    processes.FOLLOWER_COMMAND = (*QUICK_START, "support.failing_rank")
    cli.main()


if __name__ == "__main__":
    main()
