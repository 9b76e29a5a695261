"""The scheduler's process of a worker that fails on order (see `faulty.py`)."""

from __future__ import annotations

import os
from pathlib import Path

from splitserve.chaos.orders import FAULT_FILE, Trap
from splitserve.chaos.points import install
from splitserve.core.process_end import leave
from splitserve.launch.scheduler_process import main

if __name__ == "__main__":
    # The front end goes with it, as on a machine that fails.
    install(Trap(Path(os.environ[FAULT_FILE]), (os.getppid(), os.getpid())).visit)
    leave(main())
