"""A worker that fails on order: `python -m splitserve.chaos.faulty serve ...`, like `splitserve serve ...` otherwise.

Its schedulers look for orders in a file beside its ready file (see `orders.py`).
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from splitserve.chaos.orders import FAULT_FILE, fault_file
from splitserve.cli import main
from splitserve.core.process_end import leave
from splitserve.launch import scheduler_link


def run() -> None:
    ready_file = Path(sys.argv[sys.argv.index("--ready-file") + 1])
    os.environ[FAULT_FILE] = str(fault_file(ready_file))
    scheduler_link.SCHEDULER_COMMAND = (sys.executable, "-m", "splitserve.chaos.faulty_scheduler")
    try:
        main()
    except SystemExit as end:
        leave(end.code)


if __name__ == "__main__":
    run()
