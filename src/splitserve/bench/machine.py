"""The machine and the software a benchmark runs on, as a reader of its figures needs to know them."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import time
from pathlib import Path

import psutil  # type: ignore[import-untyped]

from splitserve import __version__
from splitserve.errors import ConfigError
from splitserve.launch.local import num_cores

# Fields of the machine's CPU times that are no work, or are counted in another field.
_NOT_BUSY = frozenset({"idle", "iowait", "guest", "guest_nice"})


def describe_machine() -> dict[str, str]:
    """Name -> value."""
    return {
        "CPU": f"{_cpu_model()}, {num_cores()} cores usable of {os.cpu_count()}",
        "memory": f"{psutil.virtual_memory().total / 2**30:.0f} GiB",
        "python": platform.python_version(),
        "torch": importlib.metadata.version("torch"),
        "transformers": importlib.metadata.version("transformers"),
        "splitserve": __version__,
    }


def check_writable(path: Path) -> None:
    """Before minutes of measuring."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8"):
            pass
    except OSError as error:
        raise ConfigError(f"--append-to {path}: cannot be written ({error.strerror}): name another file") from error


class OthersWatch:
    """How much of the CPU went to anybody else since construction: on a shared machine, figures need it beside them."""

    def __init__(self) -> None:
        self._began = _cpu_seconds()

    def cores_taken(self) -> float:
        """On average. Children count as ours once they have been waited for, so ask when they are gone."""
        now, (everybody, ours, elapsed) = _cpu_seconds(), self._began
        return max(0.0, (now[0] - everybody - (now[1] - ours)) / (now[2] - elapsed))


def _cpu_seconds() -> tuple[float, float, float]:
    """Busy time of all cores, what of it was this process's and its ended children's, and the clock."""
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
