"""`splitserve bench router`: the overhead of our router per request, compared with other routers in the same run.

1. One process runs a prefill and a decode worker that answer at once. Every router starts in front of these two.
2. In each round every router receives its load in turn, from a separate process: one request after another, many at
   once, many streams at once. The floor is the same load sent directly to the decode worker.
3. Every answer is compared with what the worker sent, and both workers must have received every request. Exit code 1:
   an answer was wrong.
"""

from __future__ import annotations

import subprocess
import sys
import time
import urllib.request
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
from rich.console import Console

from splitserve.core.errors import SplitserveError
from splitserve.process.owned_folder import OwnedFolder
from splitserve.tools.bench import router_systems as systems
from splitserve.tools.bench.machine import OthersWatch, check_writable, describe_machine
from splitserve.tools.bench.publish import publish
from splitserve.tools.bench.router_figures import Round, RouterFigures
from splitserve.tools.bench.router_load import Load, RouterLoadResult
from splitserve.tools.bench.router_mock import Pairs
from splitserve.tools.bench.router_report import RouterReport
from splitserve.tools.bench.router_systems import Mock, RouterUnavailableError, RunningRouter

# Events of a stream.
NUM_CHUNKS = 64
# Seconds: for a load beyond its duration; until a new router has its workers; until both workers have a request.
_LOAD_TIMEOUT = 90.0
_WARM_UP_TIMEOUT = 60.0
_PAIRS_TIMEOUT = 5.0
_WARM_UP_REQUESTS = 200


@dataclass(frozen=True, slots=True)
class RouterBenchOptions:
    # Command line that repeats this benchmark.
    command: str
    connections: int
    # Requests one after another, for the latency.
    num_requests: int
    # Seconds of each load on all connections.
    seconds: float
    rounds: int
    # Whether to measure other routers, and the Python interpreter that has them. None: this one.
    with_peers: bool
    peers_python: Path | None
    append_to: Path | None
    as_json: bool


def run_router_bench(options: RouterBenchOptions) -> int:
    """Run the benchmark and return the exit code: 1 if an answer was wrong. Raises ConfigError."""
    if options.append_to is not None:
        check_writable(options.append_to)
    console = Console(stderr=True)
    report = measure_routers(options, console)
    publish(report, as_json=options.as_json, append_to=options.append_to, console=console)
    return 1 if report.wrong else 0


def measure_routers(options: RouterBenchOptions, console: Console) -> RouterReport:
    others = OthersWatch()
    with ExitStack() as stack:
        folder = stack.enter_context(OwnedFolder())
        status = stack.enter_context(console.status("starting"))
        mock = stack.enter_context(systems.running_mock(folder))
        bench = _Bench(mock, options)
        direct = RunningRouter(systems.DIRECT, mock.decode, None)
        routers = [direct, stack.enter_context(systems.running_ours(mock, folder))]
        skipped, versions = _start_peers(stack, routers, mock, folder, options)
        for router in routers:
            status.update(f"{router.name}: warming up")
            bench.warm_up(router)
        rounds: dict[str, list[Round]] = {router.name: [] for router in routers}
        for number in range(1, options.rounds + 1):
            for router in routers:
                status.update(f"round {number} of {options.rounds}: {router.name}")
                rounds[router.name].append(bench.measure(router))
    floor = rounds[systems.DIRECT]
    figures = [RouterFigures.of(name, found, None if found is floor else floor) for name, found in rounds.items()]
    return RouterReport(
        command=options.command,
        machine=describe_machine(),
        connections=options.connections,
        num_rounds=options.rounds,
        peer_versions=versions,
        figures=figures,
        skipped=skipped,
        wrong=bench.wrong,
        cores_taken_by_others=others.cores_taken(),
    )


def _start_peers(
    stack: ExitStack, routers: list[RunningRouter], mock: Mock, folder: Path, options: RouterBenchOptions
) -> tuple[dict[str, str], dict[str, str]]:
    """Start the other routers. Return why some are missing, and the package versions of the rest."""
    skipped: dict[str, str] = {}
    if not options.with_peers:
        return skipped, {}
    python = options.peers_python or Path(sys.executable)
    try:
        versions = systems.peer_versions(python)
    except RouterUnavailableError as error:
        return dict.fromkeys(systems.PEER_ROUTERS, error.message), {}
    for name in systems.PEER_ROUTERS:
        try:
            routers.append(stack.enter_context(systems.running_peer(name, mock, folder, python)))
        except RouterUnavailableError as error:
            skipped[name] = error.message
    return skipped, versions


@dataclass(slots=True)
class _Bench:
    mock: Mock
    options: RouterBenchOptions
    wrong: list[str] = field(default_factory=list)
    _next_number: int = 1

    def warm_up(self, router: RunningRouter) -> None:
        """Wait until the router answers correctly: it may be ready before it has its workers.

        Raises SplitserveError.
        """
        deadline = time.monotonic() + _WARM_UP_TIMEOUT
        for num_chunks in (0, NUM_CHUNKS):
            while (result := self._run(router, self.options.connections, num_chunks, 5.0, _WARM_UP_REQUESTS)).num_wrong:
                if time.monotonic() > deadline:
                    raise SplitserveError(f"{router.name} does not answer as the workers do: {result.wrong}")
                time.sleep(0.25)

    def measure(self, router: RunningRouter) -> Round:
        options = self.options
        one_by_one = self._checked(router, 1, 0, 10 * options.seconds, options.num_requests)
        before = router.cpu_seconds()
        at_once = self._checked(router, options.connections, 0, options.seconds)
        between = router.cpu_seconds()
        streams = self._checked(router, options.connections, NUM_CHUNKS, options.seconds)
        after = router.cpu_seconds()
        return Round(
            latency_p50=one_by_one.latency_p50,
            latency_p99=one_by_one.latency_p99,
            requests_per_second=at_once.num_requests / at_once.seconds,
            cpu_per_request=(between - before) / max(1, at_once.num_requests),
            chunks_per_second=streams.num_chunks / streams.seconds,
            cpu_per_chunk=(after - between) / max(1, streams.num_chunks),
        )

    def _checked(
        self, router: RunningRouter, connections: int, num_chunks: int, seconds: float, max_requests: int | None = None
    ) -> RouterLoadResult:
        """Run a load and add its problems to `wrong`. Raises SplitserveError if nothing was answered."""
        result = self._run(router, connections, num_chunks, seconds, max_requests)
        self.wrong += [f"{router.name}: {what}" for what in result.wrong]
        if not self._all_pairs_match():
            self.wrong.append(f"{router.name}: not every request came to both workers with the same room, once")
        if not result.num_requests:
            raise SplitserveError(f"{router.name} answered nothing: {result.wrong}")
        return result

    def _run(
        self, router: RunningRouter, connections: int, num_chunks: int, seconds: float, max_requests: int | None
    ) -> RouterLoadResult:
        load = Load(
            port=router.port,
            ack_port=self.mock.acks,
            connections=connections,
            num_chunks=num_chunks,
            seconds=seconds,
            max_requests=max_requests,
            first_number=self._next_number,
        )
        command = [sys.executable, "-m", "splitserve.tools.bench.router_load"]
        done = subprocess.run(
            command, input=msgspec.json.encode(load), capture_output=True, timeout=seconds + _LOAD_TIMEOUT
        )
        if done.returncode != 0:
            raise SplitserveError(f"the load generator failed: {done.stderr.decode(errors='replace')[-1000:]}")
        result = msgspec.json.decode(done.stdout, type=RouterLoadResult)
        self._next_number += result.num_requests + result.num_wrong + connections
        return result

    def _all_pairs_match(self) -> bool:
        """Wait for the second request of the last pair, and return whether all pairs match."""
        deadline = time.monotonic() + _PAIRS_TIMEOUT
        while True:
            with urllib.request.urlopen(f"{self.mock.decode_url}/pairs", timeout=_PAIRS_TIMEOUT) as response:
                pairs = msgspec.json.decode(response.read(), type=Pairs)
            if pairs.all_match or time.monotonic() > deadline:
                return pairs.all_match
            time.sleep(0.05)
