"""Whole worker process around a fake scheduler: `python -m support.fake_worker SCENARIO serve ...`.

The command line after the scenario is the real one. Within the block of `forked_workers` it forks from the template.
"""

from __future__ import annotations

import sys

from splitserve import cli
from splitserve.process.process_end import install
from splitserve.ranks import processes
from support.fake_scheduler import FOLLOW, FOLLOWER_REFUSES, REFUSE_ALWAYS, STUCK

# Followed by the scenario.
PROGRAM = (sys.executable, "-m", "support.fake_worker")


def main() -> None:
    scenario, *command = sys.argv[1:]
    install()
    fake = (sys.executable, "-m", "support.fake_scheduler")
    processes.SCHEDULER_COMMAND = (*fake, scenario)
    processes.FOLLOWER_COMMAND = (*fake, REFUSE_ALWAYS if scenario == FOLLOWER_REFUSES else FOLLOW)
    if scenario == STUCK:
        # Only a kill ends it.
        processes.END_TIMEOUT = 600.0
    cli.main(command)


if __name__ == "__main__":
    main()
