"""`splitserve bench router`: the overhead of our router per request, compared with other routers in the same run.

1. A prefill and a decode worker answer at once, without a model. Every router starts in front of these two: ours with
   its default options, and those of the package sglang-router, `sglang-router` in Rust and `mini_lb` in Python.
2. In each round every router receives its load in turn: one request after another, many at once, many streams at once.
   The floor is the same load sent directly to the decode worker.
3. Every answer is compared with what the worker sent, and both workers must have received every request. Exit code 1:
   an answer was wrong.

docs/benchmarks.md defines the figures, which are medians of the rounds. All times are in seconds.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
from rich.console import Console

from splitserve.core.errors import SplitserveError
from splitserve.process.owned_folder import OwnedFolder
from splitserve.tools.bench.options import RouterBenchOptions
from splitserve.tools.bench.report import Cells, Report, ReportTable
from splitserve.tools.bench.router_load import MockWorkers, RouterLoad
from splitserve.tools.bench.stats import median, percentile
from splitserve.tools.bench.systems import PeerUnavailableError, free_ports, running_peer, running_router

DIRECT, OURS, MINI_LB, RUST = "direct", "splitserve", "mini_lb", "sglang-router"
UNTRACED = "splitserve without traces"
PEER_ROUTERS = (MINI_LB, RUST)
# Events of a stream.
NUM_CHUNKS = 64
# Bootstrap port of the prefill worker, an option of every router. Nothing listens there.
_BOOTSTRAP_PORT = 8998
# Seconds for a router to start, and until a new router has its workers.
_READY_TIMEOUT = 60.0
_WARM_UP_TIMEOUT = 60.0
_WARM_UP_REQUESTS = 200
# Prints the packages of the peers' interpreter.
_LIST_PACKAGES = """
import importlib.metadata, json
print(json.dumps({d.name: d.version for d in importlib.metadata.distributions()}))
"""
# Packages that affect the figures.
_PEER_PACKAGES = (RUST, "aiohttp", "httptools", "uvicorn", "uvloop")
_LEGEND = (
    "Times in ms. Added latency: one connection, minus direct. Chunks: events of streams, of which no two travel "
    "together. CPU: of the router's process. Medians of the rounds, in which all take turns. direct: the mock worker "
    "without a router."
)
_FEW_LEGEND = " The p99 of fewer than 100 requests is the largest value."


@dataclass(frozen=True, slots=True)
class RunningRouter:
    """Router that accepts requests. `pid`: None for the worker itself, which is no router."""

    name: str
    port: int
    pid: int | None

    def cpu_seconds(self) -> float:
        """Return the CPU seconds of the process and its children so far."""
        if self.pid is None:
            return 0.0
        process = psutil.Process(self.pid)
        times = [p.cpu_times() for p in (process, *process.children(recursive=True))]
        return float(sum(t.user + t.system for t in times))


# Figures of one router in one round, by name.
RoundFigures = Mapping[str, float]


def router_figures(name: str, rounds: Sequence[RoundFigures], direct: Sequence[RoundFigures]) -> dict[str, Any]:
    """Return the figures of a router over all rounds, times in seconds.

    `direct`: the same rounds without a router, or `rounds` itself. Then figures of a router alone are None.
    """
    is_router = rounds is not direct
    found = {figure: [one[figure] for one in rounds] for figure in rounds[0]}
    added = {
        f"added_{figure}": median([a - b[figure] for a, b in zip(found[figure], direct, strict=True)])
        for figure in ("latency_p50", "latency_p99")
    }
    of_router = {figure: median(found[figure]) for figure in ("cpu_per_request", "cpu_per_chunk")} | added
    return {
        "name": name,
        # Of the smallest round.
        "num_latencies": min(found["num_latencies"]),
        **{figure: median(found[figure]) for figure in ("requests_per_second", "latency_p50", "chunks_per_second")},
        **(of_router if is_router else dict.fromkeys(of_router)),
    }


@dataclass(slots=True)
class RouterResults:
    connections: int
    num_rounds: int
    # Packages of the peers' interpreter -> version.
    peer_versions: Mapping[str, str] = field(default_factory=dict)
    # Direct first, then our router, then others.
    figures: Sequence[Mapping[str, Any]] = ()
    # Router -> why it was not measured.
    skipped: dict[str, str] = field(default_factory=dict)
    # Wrong answers of all routers. Empty: every answer was as the worker sent it.
    wrong: list[str] = field(default_factory=list)

    def report(self) -> Report:
        remarks = [f"{name} was not measured: {reason}" for name, reason in self.skipped.items()]
        remarks += [f"WRONG: {what}" for what in self.wrong]
        if self.peer_versions:
            versions = "; ".join(f"{name}: {version}" for name, version in self.peer_versions.items())
            remarks.append(f"the others' environment: {versions}")
        return Report(
            title="Routers before mock workers",
            figures=asdict(self),
            tables=[ReportTable.by_row(_COLUMNS, self.figures)],
            setting=f"{self.connections} connections, {self.num_rounds} rounds",
            legend=_LEGEND + (_FEW_LEGEND if any(f["num_latencies"] < 100 for f in self.figures) else ""),
            remarks=remarks,
            failed=bool(self.wrong),
        )


_COLUMNS: Cells[Mapping[str, Any]] = (
    ("", "{name}"),
    ("requests/s", "{requests_per_second:,.0f}"),
    ("added p50", "{added_latency_p50:ms.3f}"),
    ("added p99", "{added_latency_p99:ms.3f}"),
    ("CPU a request", "{cpu_per_request:ms.3f}"),
    ("chunks/s", "{chunks_per_second:,.0f}"),
    ("CPU a chunk", "{cpu_per_chunk:ms.3f}"),
)


def bench_router(options: RouterBenchOptions, console: Console) -> Report:
    """Measure all routers and return the report, which has failed if an answer was wrong."""
    results = RouterResults(options.connections, options.rounds)
    with ExitStack() as stack:
        folder = stack.enter_context(OwnedFolder())
        mock = stack.enter_context(MockWorkers())
        direct = RunningRouter(DIRECT, mock.decode_port, None)
        routers = [direct]
        for name, more in ((OURS, []), (UNTRACED, ["--trace-records", "0"])):
            args = [*_worker_options(mock), *more]
            ready = stack.enter_context(running_router(name.replace(" ", "-"), args, folder))
            routers.append(RunningRouter(name, ready.port, ready.pid))
        if options.peers:
            routers += _start_peers(stack, mock, folder, options.peers_python or Path(sys.executable), results)
        for router in routers:
            _warm_up(router, mock, options.connections)
        rounds: dict[str, list[RoundFigures]] = {router.name: [] for router in routers}
        for number in range(1, options.rounds + 1):
            # Not a progress line: the load runs in a thread of this process.
            console.print(f"round {number} of {options.rounds}", highlight=False)
            for router in routers:
                rounds[router.name].append(_measure(router, mock, options, results.wrong))
    results.figures = [router_figures(name, found, rounds[DIRECT]) for name, found in rounds.items()]
    return results.report()


def _warm_up(router: RunningRouter, mock: MockWorkers, connections: int) -> None:
    """Wait until the router answers correctly: it may be ready before it has its workers. Raises SplitserveError."""
    deadline = time.monotonic() + _WARM_UP_TIMEOUT
    for num_chunks in (0, NUM_CHUNKS):
        while True:
            load = RouterLoad(router.port, connections, num_chunks, seconds=5.0, max_requests=_WARM_UP_REQUESTS)
            mock.run(load)
            if not load.num_wrong:
                break
            if time.monotonic() > deadline:
                raise SplitserveError(f"{router.name} does not answer as the workers do: {load.wrong}")
            time.sleep(0.25)


def _measure(router: RunningRouter, mock: MockWorkers, options: RouterBenchOptions, wrong: list[str]) -> RoundFigures:
    """Run the loads of a round, and add their problems to `wrong`. Raises SplitserveError if nothing was answered."""
    one_by_one = RouterLoad(router.port, 1, 0, 10 * options.seconds, options.requests)
    at_once = RouterLoad(router.port, options.connections, 0, options.seconds)
    streams = RouterLoad(router.port, options.connections, NUM_CHUNKS, options.seconds)
    cpu_seconds = []
    for load in (one_by_one, at_once, streams):
        before = router.cpu_seconds()
        mock.run(load)
        cpu_seconds.append(router.cpu_seconds() - before)
        wrong += [f"{router.name}: {what}" for what in load.wrong]
        if not mock.all_pairs_match():
            wrong.append(f"{router.name}: not every request came to both workers with the same room, once")
        if not load.latencies:
            raise SplitserveError(f"{router.name} answered nothing: {load.wrong}")
    num_chunks = NUM_CHUNKS * len(streams.latencies)
    return {
        "num_latencies": len(one_by_one.latencies),
        "latency_p50": percentile(one_by_one.latencies, 50),
        "latency_p99": percentile(one_by_one.latencies, 99),
        "requests_per_second": len(at_once.latencies) / at_once.elapsed,
        # CPU seconds of the router.
        "cpu_per_request": cpu_seconds[1] / len(at_once.latencies),
        "chunks_per_second": num_chunks / streams.elapsed,
        "cpu_per_chunk": cpu_seconds[2] / num_chunks,
    }


def _worker_options(mock: MockWorkers) -> list[str]:
    prefill, decode = (f"http://127.0.0.1:{port}" for port in (mock.prefill_port, mock.decode_port))
    return ["--prefill", prefill, str(_BOOTSTRAP_PORT), "--decode", decode]


def _start_peers(
    stack: ExitStack, mock: MockWorkers, folder: Path, python: Path, results: RouterResults
) -> list[RunningRouter]:
    """Start the other routers. `results` receives why some are missing, and the package versions of the rest."""
    routers = []
    try:
        results.peer_versions = peer_versions(python)
    except PeerUnavailableError as error:
        results.skipped = dict.fromkeys(PEER_ROUTERS, error.message)
        return []
    for name in PEER_ROUTERS:
        port, metrics_port = free_ports(2)
        command = [str(python), "-m", "sglang_router.launch_router", "--pd-disaggregation", "--host", "127.0.0.1"]
        command += ["--port", str(port), "--prometheus-port", str(metrics_port), *_worker_options(mock)]
        command += ["--mini-lb", "--policy", "random"] if name == MINI_LB else ["--policy", "round_robin"]
        try:
            url, log = f"http://127.0.0.1:{port}", folder / f"{name}.log"
            process = stack.enter_context(running_peer(command, url, log, _READY_TIMEOUT))
            routers.append(RunningRouter(name, port, process.pid))
        except PeerUnavailableError as error:
            results.skipped[name] = error.message
    return routers


def peer_versions(python: Path) -> dict[str, str]:
    """Return package -> version of the peers' packages. Raises PeerUnavailableError if they are not installed."""
    try:
        done = subprocess.run([python, "-c", _LIST_PACKAGES], capture_output=True, text=True, timeout=60)
        found: dict[str, str] = json.loads(done.stdout)
    except (OSError, subprocess.TimeoutExpired, ValueError) as error:
        raise PeerUnavailableError(f"{python} is no Python that works: give --peers-python another") from error
    if RUST not in found:
        raise PeerUnavailableError(f"not installed: {python} -m pip install sglang-router httptools uvloop")
    return {name: found[name] for name in _PEER_PACKAGES if name in found}
