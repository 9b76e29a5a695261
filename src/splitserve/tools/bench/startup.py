"""`splitserve bench startup`: from the start of a process to the first token at a client, and memory of workers.

The legend defines the kinds of starts: cold and warm ones of one worker in null mode, and those of `splitserve up`. A
cold start downloads or converts MODEL if necessary: a folder of safetensors needs neither. Its files may still be in
the system's page cache, because clearing it needs root. One prompt, one token, greedy, one start at a time.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass

import psutil  # type: ignore[import-untyped]
from rich.console import Console

from splitserve.core.errors import ConfigError
from splitserve.process.child import PROGRAM, ChildProcess, ForeignServer
from splitserve.process.owned_folder import OwnedFolder
from splitserve.tools.bench.load import Endpoint
from splitserve.tools.bench.options import StartupBenchOptions
from splitserve.tools.bench.report import Report, ReportTable
from splitserve.tools.bench.stats import median
from splitserve.tools.bench.systems import free_ports
from splitserve.tools.bench.workload import Prompt

# Seconds for a worker to be ready, which may include a download.
_READY_TIMEOUT = 1800.0
# Seconds between two checks: the resolution of the measurement.
_POLL_INTERVAL = 0.01
# Tokens of a KV pool. By default it is much larger, and some of its memory is provided ahead of use.
_POOL_TOKENS = 256
# A start in which Python may not write compiled modules is no warm one. Empty: the variable is not set.
_WRITES_COMPILED = {"PYTHONDONTWRITEBYTECODE": ""}
_PROMPT_IDS = list(range(10, 42))
_LEGEND = (
    "Seconds from the start of the process, medians (min-max). Ready: it answers HTTP and the model is loaded. First "
    "token: at the client of a streamed completion that is sent then. Cold: the cache of models is empty (so a "
    "download or a conversion is part of it), and so is Python's cache of compiled modules. Warm: both are filled. Up: "
    "splitserve up with one prefill and one decode worker, warm. Memory: proportional set size of all processes of the "
    f"workers, and of their template, after that token, so shared memory counts once. KV pools have {_POOL_TOKENS:,} "
    "tokens each."
)


@dataclass(frozen=True, slots=True)
class StartupTiming:
    """One start, in seconds from the start of the process."""

    ready: float
    first_token: float
    # Bytes of the workers' processes: proportional set size.
    memory: int


def bench_startup(options: StartupBenchOptions, console: Console) -> Report:
    """Start workers and return the report. Raises ConfigError, ClusterError, RequestFailedError."""
    if not options.cold_runs + options.warm_runs:
        raise ConfigError("--cold-runs 0 --warm-runs 0 starts nothing: give at least 1 run of one kind")
    return startup_report(options, measure_starts(options, console))


def startup_report(options: StartupBenchOptions, starts: Mapping[str, Sequence[StartupTiming]]) -> Report:
    """Return the report of starts by kind. JSON has times in seconds and memory in bytes."""
    setting = f"{options.model} in {options.dtype}"
    one = median([start.memory for start in starts["warm"]]) if starts["warm"] else None
    return Report(
        title=f"Start-up to first token: {setting}",
        setting=setting,
        legend=_LEGEND,
        figures={"model": options.model, "dtype": options.dtype}
        | {kind: [asdict(start) for start in found] for kind, found in starts.items()},
        tables=[
            ReportTable(
                ["start", "runs", "ready, s", "first token, s", "memory, MB", "x warm"],
                [_row(kind, found, one) for kind, found in starts.items() if found],
            )
        ],
    )


def _row(kind: str, starts: Sequence[StartupTiming], one_worker: float | None) -> list[str]:
    memory = median([start.memory for start in starts])
    return [
        kind,
        str(len(starts)),
        _spread([start.ready for start in starts]),
        _spread([start.first_token for start in starts]),
        f"{memory / 1e6:,.0f}",
        "" if one_worker is None else f"{memory / one_worker:.2f}",
    ]


def measure_starts(options: StartupBenchOptions, console: Console) -> dict[str, list[StartupTiming]]:
    """Return the starts by kind: cold, warm, up. Raises ClusterError, RequestFailedError."""
    # The first warm start fills the caches and does not count.
    num_warm = options.warm_runs + 1 if options.warm_runs else 0
    kinds = {
        "cold": (options.cold_runs, _cold_start),
        "warm": (num_warm, _start),
        "up": (options.warm_runs, _start_pair),
    }
    found: dict[str, list[StartupTiming]] = {kind: [] for kind in kinds}
    for kind, (count, start) in kinds.items():
        for number in range(1, count + 1):
            with console.status(f"{kind}: start {number} of {count}"):
                found[kind].append(start(options))
    return {**found, "warm": found["warm"][1:]}


def _cold_start(options: StartupBenchOptions) -> StartupTiming:
    with OwnedFolder() as folder:
        return _start(options, SPLITSERVE_CACHE=f"{folder}/models", PYTHONPYCACHEPREFIX=f"{folder}/compiled")


def _start(options: StartupBenchOptions, **env: str) -> StartupTiming:
    args = ["serve", *_args(options), "--port", "0", "--served-model-name", options.model]
    with OwnedFolder() as folder:
        began = time.perf_counter()
        return _measure(options, ChildProcess("worker", args, folder, env={**_WRITES_COMPILED, **env}), began)


def _start_pair(options: StartupBenchOptions) -> StartupTiming:
    (port,) = free_ports(1)
    command = [*PROGRAM, "up", *_args(options), "--host", "127.0.0.1", "--port", str(port)]
    with OwnedFolder() as folder:
        began = time.perf_counter()
        url = f"http://127.0.0.1:{port}/ready"
        return _measure(options, ForeignServer("up", command, folder, url, env=_WRITES_COMPILED), began)


def _args(options: StartupBenchOptions) -> list[str]:
    threads = [] if options.threads is None else ["--threads", str(options.threads)]
    return [options.model, "--dtype", options.dtype, "--max-total-tokens", str(_POOL_TOKENS), *threads]


def _measure(options: StartupBenchOptions, child: ChildProcess, began: float) -> StartupTiming:
    """Return the figures of a process that was started at `began`, and end it."""
    with closing(child):
        url = child.wait_ready(_READY_TIMEOUT, _POLL_INTERVAL).url
        ready = time.perf_counter() - began
        [record] = Endpoint(url, options.model).ask([Prompt(ids=_PROMPT_IDS, text="")], 1)
        return StartupTiming(ready, record.arrived_at[0] - began, _memory(child.pid))


def _memory(pid: int) -> int:
    """Return the proportional set size of the processes of workers at or below `pid`, and their template, in bytes."""
    top = psutil.Process(pid)
    workers = [process for process in top.children() if "router" not in process.cmdline()]
    workers += [top] if "serve" in top.cmdline() else []
    processes = {process for worker in workers for process in (worker, *worker.children(recursive=True))}
    return sum(process.memory_full_info().pss for process in processes)


def _spread(seconds: Sequence[float]) -> str:
    return f"{median(seconds):.1f} ({min(seconds):.1f}-{max(seconds):.1f})"
