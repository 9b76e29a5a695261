"""Worker with fault orders: `python -m splitserve.cli.faulty serve ...`, otherwise like `splitserve serve ...`.

Its schedulers read orders from a file beside its ready file (see `tools/chaos/faults.py`).
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from splitserve import cli
from splitserve.process.engine_start import QUICK_START
from splitserve.process.process_end import leave
from splitserve.ranks import processes
from splitserve.tools.chaos.faults import FAULT_FILE, fault_file


def main() -> None:
    ready_file = Path(sys.argv[sys.argv.index("--ready-file") + 1])
    os.environ[FAULT_FILE] = str(fault_file(ready_file))
    processes.SCHEDULER_COMMAND = (*QUICK_START, "splitserve.tools.chaos.faults")
    try:
        cli.main()
    except SystemExit as end:
        leave(end.code)


if __name__ == "__main__":
    main()
