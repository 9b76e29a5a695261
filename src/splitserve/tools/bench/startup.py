"""`splitserve bench startup`: from the start of a worker's process to the first token at a client.

cold   The model cache is empty, so MODEL is downloaded or converted if necessary (a folder of safetensors needs
       neither). Python's cache of compiled modules is empty, too. Files may still be in the system's page cache,
       because clearing it needs root.
warm   The user's own caches are used, after a start that filled them.

One worker in null mode, one prompt, one token, greedy. The processes are real and run one at a time.
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from splitserve.core.config import DTYPES
from splitserve.core.errors import ConfigError
from splitserve.process.child import ChildProcess
from splitserve.process.owned_folder import OwnedFolder
from splitserve.tools.bench.load import Endpoint, ask
from splitserve.tools.bench.machine import OthersWatch, check_writable, describe_machine
from splitserve.tools.bench.markdown import listed, table_of
from splitserve.tools.bench.page import check_page, replace_section
from splitserve.tools.bench.publish import publish
from splitserve.tools.bench.stats import median
from splitserve.tools.bench.workload import Prompt

SECTION = "bench startup"
# Seconds for a worker to be ready, which may include a download.
_READY_TIMEOUT = 1800.0
# Seconds between two checks: the resolution of the measurement.
_POLL_INTERVAL = 0.01
_PROMPT_IDS = list(range(10, 42))
_LEGEND = (
    "Seconds from the start of the process, medians (min-max). Ready: it answers HTTP and the model is loaded. First "
    "token: at the client of a streamed completion that is sent then. Cold: the cache of models is empty (so a "
    "download or a conversion is part of it), and so is Python's cache of compiled modules. Warm: both are filled."
)


@dataclass(frozen=True, slots=True)
class StartupOptions:
    # Command line that repeats this benchmark.
    command: str
    model: str
    dtype: str
    # None: the default of `splitserve serve`.
    threads: int | None
    # Number of starts of each kind. 0: none.
    cold_runs: int
    warm_runs: int
    append_to: Path | None
    # Markdown file with a section "bench startup" to replace. None: no page.
    page: Path | None
    as_json: bool


@dataclass(frozen=True, slots=True)
class StartupTiming:
    """One start, in seconds from the start of the process."""

    ready: float
    first_token: float


@dataclass(frozen=True, slots=True)
class StartupReport:
    model: str
    dtype: str
    command: str
    machine: Mapping[str, str]
    # Average number of cores that other processes kept busy.
    cores_taken_by_others: float
    cold: Sequence[StartupTiming]
    warm: Sequence[StartupTiming]

    def to_json(self) -> dict[str, Any]:
        """Return the figures as JSON values. Times are in seconds."""
        return asdict(self)

    def rows(self) -> list[list[str]]:
        return [
            [kind, str(len(starts)), _spread([s.ready for s in starts]), _spread([s.first_token for s in starts])]
            for kind, starts in (("cold", self.cold), ("warm", self.warm))
            if starts
        ]

    def table(self) -> Table:
        table = Table(*_HEADER, title=f"{self.model} in {self.dtype}", caption=_LEGEND)
        for row in self.rows():
            table.add_row(*row)
        return table

    def markdown(self, date: datetime.date) -> str:
        """Return a section to append to a log."""
        return f"\n## {date.isoformat()} · Start-up to first token: {self.model} in {self.dtype}\n\n{self.section()}"

    def section(self) -> str:
        """Return Markdown without a heading."""
        return (
            f"`{self.command}`\n\n{listed(self.machine)}. {self.model} in {self.dtype}; others kept "
            f"{self.cores_taken_by_others:.1f} cores busy meanwhile.\n\n{_LEGEND}\n\n" + table_of(_HEADER, self.rows())
        )


_HEADER = ["start", "runs", "ready, s", "first token, s"]


def run_startup_bench(options: StartupOptions) -> int:
    """Return the exit code. Raises ConfigError, ClusterError, RequestFailedError."""
    if options.dtype not in DTYPES:
        raise ConfigError(f"--dtype {options.dtype!r}: choose one of {', '.join(DTYPES)}")
    if options.append_to is not None:
        check_writable(options.append_to)
    if options.page is not None:
        check_page(options.page, SECTION)
    console = Console(stderr=True)
    report = measure_startup(options, console)
    publish(report, as_json=options.as_json, append_to=options.append_to, console=console)
    if options.page is not None:
        today = datetime.date.today().isoformat()
        replace_section(options.page, SECTION, f"Measured {today} by {report.section()}")
        console.print(f"wrote {options.page}", highlight=False)
    return 0


def measure_startup(options: StartupOptions, console: Console) -> StartupReport:
    """Run all starts. Raises ClusterError, RequestFailedError."""
    others = OthersWatch()
    cold, warm = [], []
    for number in range(options.cold_runs):
        with console.status(f"cold start {number + 1} of {options.cold_runs}"):
            cold.append(_cold_start(options))
    if options.warm_runs:
        with console.status("a start that fills the caches"):
            _start(options, {})
    for number in range(options.warm_runs):
        with console.status(f"warm start {number + 1} of {options.warm_runs}"):
            warm.append(_start(options, {}))
    return StartupReport(
        options.model, options.dtype, options.command, describe_machine(), others.cores_taken(), cold, warm
    )


def _cold_start(options: StartupOptions) -> StartupTiming:
    with OwnedFolder() as folder:
        return _start(options, {"SPLITSERVE_CACHE": f"{folder}/models", "PYTHONPYCACHEPREFIX": f"{folder}/compiled"})


def _start(options: StartupOptions, env: Mapping[str, str]) -> StartupTiming:
    args = ["serve", options.model, "--dtype", options.dtype, "--port", "0", "--served-model-name", options.model]
    if options.threads is not None:
        args += ["--threads", str(options.threads)]
    with OwnedFolder() as folder:
        began = time.perf_counter()
        child = ChildProcess("worker", args, folder, env=env)
        try:
            url = child.wait_ready(_READY_TIMEOUT, _POLL_INTERVAL).url
            ready = time.perf_counter() - began
            [record] = ask(Endpoint(url, options.model), [Prompt(ids=_PROMPT_IDS, text="")], 1)
            return StartupTiming(ready, record.arrived_at[0] - began)
        finally:
            child.close()


def _spread(seconds: Sequence[float]) -> str:
    return f"{median(seconds):.1f} ({min(seconds):.1f}-{max(seconds):.1f})"
