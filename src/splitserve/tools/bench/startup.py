"""`splitserve bench startup`: from the start of a worker's process to the first token at a client.

cold   The model cache is empty, so MODEL is downloaded or converted if necessary (a folder of safetensors needs
       neither). Python's cache of compiled modules is empty, too. Files may still be in the system's page cache,
       because clearing it needs root.
warm   The user's own caches are used, after a start that filled them.

One worker in null mode, one prompt, one token, greedy. The processes are real and run one at a time.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from rich.console import Console

from splitserve.core.config import check_dtype
from splitserve.process.child import ChildProcess
from splitserve.process.owned_folder import OwnedFolder
from splitserve.tools.bench.load import Endpoint, ask
from splitserve.tools.bench.machine import OthersWatch, describe_machine
from splitserve.tools.bench.report import Cells, Report, ReportOutput, ReportTable
from splitserve.tools.bench.stats import median
from splitserve.tools.bench.workload import Prompt

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
    output: ReportOutput


@dataclass(frozen=True, slots=True)
class StartupTiming:
    """One start, in seconds from the start of the process."""

    ready: float
    first_token: float


def run_startup_bench(options: StartupOptions) -> int:
    """Return the exit code. Raises ConfigError, ClusterError, RequestFailedError."""
    check_dtype(options.dtype)
    options.output.check()
    console = Console(stderr=True)
    others = OthersWatch()
    cold, warm = measure_startup(options, console)
    report = startup_report(options, describe_machine(), others.cores_taken(), cold, warm)
    options.output.publish(report, console)
    return 0


def startup_report(
    options: StartupOptions,
    machine: dict[str, str],
    cores_taken_by_others: float,
    cold: Sequence[StartupTiming],
    warm: Sequence[StartupTiming],
) -> Report:
    """Return the report. JSON has times in seconds."""
    kinds = [kind for kind in (("cold", cold), ("warm", warm)) if kind[1]]
    return Report(
        title=f"Start-up to first token: {options.model} in {options.dtype}",
        command=options.command,
        machine=machine,
        setting=f"{options.model} in {options.dtype}",
        cores_taken_by_others=cores_taken_by_others,
        legend=_LEGEND,
        figures={
            "model": options.model,
            "dtype": options.dtype,
            "command": options.command,
            "machine": machine,
            "cores_taken_by_others": cores_taken_by_others,
            "cold": [asdict(start) for start in cold],
            "warm": [asdict(start) for start in warm],
        },
        tables=[ReportTable.by_row(_COLUMNS, kinds)],
    )


def measure_startup(options: StartupOptions, console: Console) -> tuple[list[StartupTiming], list[StartupTiming]]:
    """Return the timings of cold and of warm starts. Raises ClusterError, RequestFailedError."""
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
    return cold, warm


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


# Columns of a kind of start and its timings.
_COLUMNS: Cells[tuple[str, Sequence[StartupTiming]]] = [
    ("start", lambda kind: kind[0]),
    ("runs", lambda kind: str(len(kind[1]))),
    ("ready, s", lambda kind: _spread([s.ready for s in kind[1]])),
    ("first token, s", lambda kind: _spread([s.first_token for s in kind[1]])),
]
