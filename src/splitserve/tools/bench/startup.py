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

from splitserve.process.child import ChildProcess
from splitserve.process.owned_folder import OwnedFolder
from splitserve.tools.bench.load import Endpoint
from splitserve.tools.bench.report import OthersWatch, Report, ReportTable
from splitserve.tools.bench.stats import median
from splitserve.tools.bench.workload import Prompt
from splitserve.tools.options import StartupBenchOptions

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
class StartupTiming:
    """One start, in seconds from the start of the process."""

    ready: float
    first_token: float


def bench_startup(options: StartupBenchOptions, console: Console) -> Report:
    """Start workers and return the report. Raises ClusterError, RequestFailedError."""
    others = OthersWatch()
    starts = measure_starts(options, console)
    return startup_report(options, others.cores_taken(), *starts)


def startup_report(
    options: StartupBenchOptions, cores_taken: float, cold: Sequence[StartupTiming], warm: Sequence[StartupTiming]
) -> Report:
    """Return the report. JSON has times in seconds."""
    setting = f"{options.model} in {options.dtype}"
    kinds = {"cold": cold, "warm": warm}
    rows = [
        [
            kind,
            str(len(starts)),
            *(_spread([getattr(s, moment) for s in starts]) for moment in ("ready", "first_token")),
        ]
        for kind, starts in kinds.items()
        if starts
    ]
    return Report(
        title=f"Start-up to first token: {setting}",
        setting=setting,
        cores_taken_by_others=cores_taken,
        legend=_LEGEND,
        figures={"model": options.model, "dtype": options.dtype}
        | {kind: [asdict(start) for start in starts] for kind, starts in kinds.items()},
        tables=[ReportTable(["start", "runs", "ready, s", "first token, s"], rows)],
    )


def measure_starts(options: StartupBenchOptions, console: Console) -> tuple[list[StartupTiming], list[StartupTiming]]:
    """Return the timings of cold and of warm starts. Raises ClusterError, RequestFailedError."""
    cold, warm = [], []
    for number in range(options.cold_runs):
        with console.status(f"cold start {number + 1} of {options.cold_runs}"), OwnedFolder() as folder:
            caches = {"SPLITSERVE_CACHE": f"{folder}/models", "PYTHONPYCACHEPREFIX": f"{folder}/compiled"}
            cold.append(_start(options, caches))
    # The first warm start fills the caches and does not count.
    for number in range(options.warm_runs + 1 if options.warm_runs else 0):
        with console.status(f"warm start {number} of {options.warm_runs}"):
            warm.append(_start(options, {}))
    return cold, warm[1:]


def _start(options: StartupBenchOptions, env: Mapping[str, str]) -> StartupTiming:
    args = ["serve", options.model, "--dtype", options.dtype, "--port", "0", "--served-model-name", options.model]
    if options.threads is not None:
        args += ["--threads", str(options.threads)]
    with OwnedFolder() as folder:
        began = time.perf_counter()
        child = ChildProcess("worker", args, folder, env=env)
        try:
            url = child.wait_ready(_READY_TIMEOUT, _POLL_INTERVAL).url
            ready = time.perf_counter() - began
            [record] = Endpoint(url, options.model).ask([Prompt(ids=_PROMPT_IDS, text="")], 1)
            return StartupTiming(ready, record.arrived_at[0] - began)
        finally:
            child.close()


def _spread(seconds: Sequence[float]) -> str:
    return f"{median(seconds):.1f} ({min(seconds):.1f}-{max(seconds):.1f})"
