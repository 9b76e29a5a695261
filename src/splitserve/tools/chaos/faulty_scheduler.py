"""Scheduler process of a worker with fault orders (see `faulty.py`)."""

from __future__ import annotations

import os
from pathlib import Path

from splitserve.tools.chaos.orders import FAULT_FILE, Trap
from splitserve.tools.chaos.points import install
from splitserve.worker import scheduler_process


def main() -> int:
    # The front end fails with the scheduler, as on a machine that fails.
    install(Trap(Path(os.environ[FAULT_FILE]), (os.getppid(), os.getpid())).visit)
    return scheduler_process.main()
