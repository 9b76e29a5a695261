"""A whole worker process around a fake scheduler: `fake_worker.py SCENARIO serve ...`.

The command line after the scenario is the real one.
"""

from __future__ import annotations

import sys

from splitserve import cli
from splitserve.process.process_end import install
from splitserve.ranks import processes
from support.fake_scheduler import FOLLOW, FOLLOWER_REFUSES, REFUSE_ALWAYS, STUCK

if __name__ == "__main__":
    install()
    fake = (sys.executable, "-m", "support.fake_scheduler")
    processes.SCHEDULER_COMMAND = (*fake, sys.argv[1])
    processes.FOLLOWER_COMMAND = (*fake, REFUSE_ALWAYS if sys.argv[1] == FOLLOWER_REFUSES else FOLLOW)
    if sys.argv[1] == STUCK:
        # Only who kills it gets rid of it.
        processes.END_TIMEOUT = 600.0
    cli.main(sys.argv[2:])
