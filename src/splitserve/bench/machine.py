"""The machine and the software a benchmark ran on, as a reader of its figures needs to know them."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from pathlib import Path

import psutil  # type: ignore[import-untyped]

from splitserve import __version__
from splitserve.launch.local import num_cores


def describe_machine() -> dict[str, str]:
    """Name -> value. The load average tells whether others were at work."""
    return {
        "CPU": f"{_cpu_model()}, {num_cores()} cores usable of {os.cpu_count()}",
        "memory": f"{psutil.virtual_memory().total / 2**30:.0f} GiB",
        "load average before": f"{os.getloadavg()[0]:.1f}",
        "python": platform.python_version(),
        "torch": importlib.metadata.version("torch"),
        "transformers": importlib.metadata.version("transformers"),
        "splitserve": __version__,
    }


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())
