"""Description of the machine and the software that a benchmark runs on."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import time
from pathlib import Path

import psutil  # type: ignore[import-untyped]

from splitserve import __version__
from splitserve.core.machine import num_cores

# CPU time fields that are idle time, or that are included in another field.
_NOT_BUSY = frozenset({"idle", "iowait", "guest", "guest_nice"})


def describe_machine() -> dict[str, str]:
    """Return facts about the machine: name -> value."""
    return {
        "CPU": f"{_cpu_model()}, {num_cores()} cores usable of {os.cpu_count()}",
        "memory": f"{psutil.virtual_memory().total / 2**30:.0f} GiB",
        "python": platform.python_version(),
        "torch": importlib.metadata.version("torch"),
        "transformers": importlib.metadata.version("transformers"),
        "splitserve": __version__,
    }


class OthersWatch:
    """CPU use of other processes since construction. On a shared machine, it qualifies the figures."""

    def __init__(self) -> None:
        self._began = _cpu_seconds()

    def cores_taken(self) -> float:
        """Return the average number of busy cores. A child counts as ours only after it has been waited for."""
        now, (busy, ours, elapsed) = _cpu_seconds(), self._began
        return max(0.0, (now[0] - busy - (now[1] - ours)) / (now[2] - elapsed))


def _cpu_seconds() -> tuple[float, float, float]:
    """Return busy seconds of all cores, those of this process and its ended children, and the clock."""
    busy = {name: value for name, value in psutil.cpu_times()._asdict().items() if name not in _NOT_BUSY}
    ours = os.times()
    return sum(busy.values()), ours.user + ours.system + ours.children_user + ours.children_system, time.monotonic()


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())
