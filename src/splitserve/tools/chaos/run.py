"""`splitserve chaos`: a local cluster under load while its workers die, stop and restart.

1. A router, prefill and decode workers start. A fixed set of requests of all forms runs undisturbed. All later outcomes
   are compared with its outcomes.
2. Clients repeat these requests, and some disconnect halfway. Two fault injectors (see `injector.py`) break workers.
3. After the given time the faults end first, then the load. Then no worker may hold any resource.
"""

from __future__ import annotations

import asyncio
import random
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
import psutil  # type: ignore[import-untyped]
from rich.console import Console

from splitserve.core.request import DisaggregationMode
from splitserve.deploy.deployment import LocalDeployment
from splitserve.deploy.local import LocalCluster
from splitserve.engine.sources import resolve_model
from splitserve.observe.worker_metrics import held
from splitserve.process.child import POLL_INTERVAL
from splitserve.tools.bench.report import Report, ReportTable
from splitserve.tools.bench.stats import percentile
from splitserve.tools.chaos.faults import PROGRAM
from splitserve.tools.chaos.injector import FaultInjector
from splitserve.tools.chaos.streams import (
    StreamOutcome,
    StreamRequest,
    Tally,
    follow,
    follow_undisturbed,
    make_requests,
)
from splitserve.tools.client import RequestFailedError, open_session, send
from splitserve.tools.metrics import sum_samples
from splitserve.tools.options import ChaosOptions
from splitserve.worker.checks import check_backend

# Maximum number of quoted texts of each kind.
_NUM_QUOTED = 5
# Number of different requests.
_NUM_REQUESTS = 30
# Share of the requests with a client that disconnects halfway.
_LEAVING = 0.05
# Seconds for the workers to load, for a stream, and for the release of all resources at the end.
_READY, _STREAM, _RELEASE = 600.0, 300.0, 60.0


def bench_chaos(options: ChaosOptions, console: Console) -> Report:
    """Run the test and return the report, which has failed if a client lost anything or something leaked."""
    check_backend(options.transfer_backend, "--transfer-backend")
    seed = secrets.randbelow(1 << 16) if options.seed is None else options.seed
    resolve_model(options.model)
    requests = make_requests(_NUM_REQUESTS, options.max_tokens)
    tally = Tally()
    with _cluster(options) as cluster:
        console.print(f"starting {options.prefill} prefill and {options.decode} decode workers", highlight=False)
        cluster.wait_ready(_READY)
        expected = follow_undisturbed(cluster.router_url, requests, timeout=_STREAM)
        console.print(f"now with faults, for {options.seconds:.0f} s (seed {seed})", highlight=False)
        try:
            asyncio.run(_Disturbance(options, seed, cluster, requests, expected, tally).run())
            leaks = asyncio.run(_await_release(cluster))
            num_moves = {kind: _count_moves(cluster.router_url, kind) for kind in ("migration", "retry")}
        except ExceptionGroup as group:
            cluster.keep_logs()
            # The first error is the cause. The others were cancelled for it, or have the same cause.
            raise group.exceptions[0] from None
        except BaseException:
            cluster.keep_logs()
            raise
        if tally.errors or tally.differences or leaks:
            cluster.keep_logs()
            console.print(f"the logs stay in {cluster.log_folder}", highlight=False)
    return chaos_report(options.seconds, seed, tally, num_moves, leaks + _processes_left())


def chaos_report(seconds: float, seed: int, tally: Tally, num_moves: Mapping[str, int], leaks: Sequence[str]) -> Report:
    """Return the report. JSON has times in seconds.

    `num_moves`: number of requests continued elsewhere, by "migration" and "retry". `leaks`: descriptions of resources
    that were still held at the end.
    """
    pauses = tally.longest_pauses or [0.0]
    figures: dict[str, Any] = {
        "seed": seed,
        "seconds": seconds,
        "requests": tally.num_equal + tally.num_left + len(tally.errors) + len(tally.differences),
        "equal": tally.num_equal,
        "left_by_client": tally.num_left,
        "faults": dict(tally.faults),
        "migrations": num_moves["migration"],
        "retries": num_moves["retry"],
        "errors": tally.errors,
        "differences": tally.differences,
        "leaks": list(leaks),
        "longest_pause_p50": percentile(pauses, 50),
        "longest_pause_p99": percentile(pauses, 99),
        "longest_pause_max": max(pauses),
        "recovery_max": max(tally.recoveries, default=0.0),
    }
    rows = [
        ("seconds, seed", f"{seconds:.0f}, {seed}"),
        ("requests", str(figures["requests"])),
        ("equal to an undisturbed run", str(tally.num_equal)),
        ("left by their clients", str(tally.num_left)),
        ("faults", str(tally.faults.total())),
        *((f"- {name}", str(count)) for name, count in sorted(tally.faults.items())),
        ("migrations", str(num_moves["migration"])),
        ("retries before the first byte", str(num_moves["retry"])),
        (
            "longest pause of a stream, p50 / p99 / max",
            "{longest_pause_p50:.1f} / {longest_pause_p99:.1f} / {longest_pause_max:.1f} s".format(**figures),
        ),
        ("until a worker was back, max", f"{figures['recovery_max']:.1f} s"),
        ("errors", str(len(tally.errors))),
        ("differing outputs", str(len(tally.differences))),
        ("leaks", str(len(leaks))),
    ]
    return Report(
        title="Chaos",
        figures=figures,
        tables=[ReportTable(["", ""], rows)],
        remarks=[text for found in (tally.errors, tally.differences, leaks) for text in found[:_NUM_QUOTED]],
        failed=bool(tally.errors or tally.differences or leaks) or tally.num_equal == 0,
    )


def _cluster(options: ChaosOptions) -> LocalCluster:
    return LocalCluster(
        LocalDeployment(
            model=options.model,
            prefill=options.prefill,
            decode=options.decode,
            # Outputs are compared. In other dtypes the sums of a step depend on its other requests.
            dtype="float32",
            backend=options.transfer_backend,
            threads=1,
            # Long prompts take several chunks.
            worker_args=["--max-total-tokens", "20000", "--chunked-prefill-size", "64"],
            # A request has more faults in a minute than others in a year, so three retries are not enough.
            router_args=[
                *("--hang-timeout", str(options.hang_timeout), "--health-interval", "0.5"),
                *("--max-retries", "8", "--max-prefill-retries", "8"),
            ],
        ),
        worker_program=PROGRAM,
    )


@dataclass(frozen=True, slots=True)
class _Disturbance:
    options: ChaosOptions
    seed: int
    cluster: LocalCluster
    requests: list[StreamRequest]
    # Outcomes of the undisturbed requests.
    expected: dict[int, StreamOutcome]
    tally: Tally

    async def run(self) -> None:
        options = self.options
        faults_over, load_over = asyncio.Event(), asyncio.Event()
        clients_rng = random.Random(f"clients {self.seed}")
        async with open_session(_STREAM) as session, asyncio.TaskGroup() as group:
            for _ in range(options.streams):
                group.create_task(self._client(session, clients_rng, load_over))
            injectors = []
            for role in (DisaggregationMode.PREFILL, DisaggregationMode.DECODE):
                rng = random.Random(f"{role} {self.seed}")
                injector = FaultInjector(self.cluster, role, self.tally, options.hang_timeout, rng)
                injectors.append(group.create_task(injector.run(faults_over)))
            await asyncio.wait(injectors, timeout=options.seconds, return_when=asyncio.FIRST_EXCEPTION)
            faults_over.set()
            # The injectors restart the workers that they broke.
            await asyncio.wait(injectors)
            load_over.set()

    async def _client(self, session: aiohttp.ClientSession, rng: random.Random, is_over: asyncio.Event) -> None:
        while not is_over.is_set():
            i = rng.randrange(len(self.requests))
            leaves_after = rng.uniform(0.1, 5.0) if rng.random() < _LEAVING else None
            outcome, name = StreamOutcome(), f"request {i} ({self.requests[i].path})"
            try:
                async with asyncio.timeout(leaves_after):
                    await follow(session, self.cluster.router_url, self.requests[i], outcome)
            except RequestFailedError as error:
                self.tally.errors.append(f"{name}: {error}")
            except TimeoutError:
                self.tally.num_left += 1
            else:
                self.tally.judge(name, outcome, self.expected[i])


async def _await_release(cluster: LocalCluster) -> list[str]:
    """Wait until workers have released everything. Return what they still hold after the timeout."""
    deadline = time.monotonic() + _RELEASE
    urls = [url for role in DisaggregationMode for url in cluster.urls(role)]
    async with open_session() as session:
        while found := [problem for url in urls if (problem := await _problem(session, url))]:
            if time.monotonic() > deadline:
                return found
            await asyncio.sleep(POLL_INTERVAL * 10)
    return []


async def _problem(session: aiohttp.ClientSession, url: str) -> str:
    try:
        states = (await send(session, f"{url}/server_info"))["internal_states"]
    except RequestFailedError as error:
        return f"{url} does not answer: {error}"
    return "; ".join(f"{url} keeps {what}" for state in states if (what := held(state)))


def _count_moves(router_url: str, kind: str) -> int:
    """Return the number of requests continued elsewhere: "migration" in a stream, "retry" before the first byte."""
    return int(sum_samples(router_url, kind=kind).get("splitserve_router:retries_total", 0.0))


def _processes_left() -> list[str]:
    """Return the processes that are left after the end of the cluster."""
    family = psutil.Process().children(recursive=True)
    return [f"process {p.pid} is left" for p in family if p.status() != psutil.STATUS_ZOMBIE]
