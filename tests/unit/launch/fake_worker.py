"""A whole worker process around a fake scheduler: `fake_worker.py SCENARIO serve ...`.

The command line after the scenario is the real one.
"""

from __future__ import annotations

import sys

from splitserve import cli
from splitserve.launch import scheduler_link

if __name__ == "__main__":
    scheduler_link.SCHEDULER_COMMAND = (sys.executable, "-m", "splitserve.testing.fake_scheduler", sys.argv[1])
    cli.main(sys.argv[2:])
