"""`splitserve chaos`: a local cluster under load while its workers die, stop and restart.

1. A router, prefill and decode workers start. A fixed set of requests of all forms runs undisturbed. All later outcomes
   are compared with its outcomes.
2. Clients repeat these requests, and some disconnect halfway. Two fault injectors break workers.
3. After the given time the faults end first, then the load. Then no worker may hold any resource.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import secrets
import signal
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
import psutil  # type: ignore[import-untyped]
from rich.console import Console

from splitserve.core.errors import ClusterError
from splitserve.core.request import DisaggregationMode
from splitserve.deploy.deployment import LocalDeployment
from splitserve.deploy.local import LocalCluster
from splitserve.engine.sources import resolve_model
from splitserve.observe.scheduler_metrics import held
from splitserve.process.child import POLL_INTERVAL, ChildProcess
from splitserve.tools.bench.options import ChaosOptions
from splitserve.tools.bench.report import Report, ReportTable
from splitserve.tools.bench.stats import percentile
from splitserve.tools.chaos.faults import PROGRAM, Fault, FaultOrder, FaultStage
from splitserve.tools.chaos.streams import (
    StreamOutcome,
    StreamRequest,
    Tally,
    follow,
    follow_undisturbed,
    make_requests,
)
from splitserve.tools.client import RequestFailedError, open_session, send, sum_samples
from splitserve.worker.checks import check_backend

# Maximum number of quoted texts of each kind.
_NUM_QUOTED = 5
# Number of different requests.
_NUM_REQUESTS = 30
# Share of the requests with a client that disconnects halfway.
_LEAVING = 0.05
# Seconds for the workers to load, for a stream, and for the release of all resources at the end.
_READY, _STREAM, _RELEASE = 600.0, 300.0, 60.0
# Seconds to reach a stage, for a worker to load, drain or end, and between two faults.
_REACH, _COME_BACK, _PAUSE = 10.0, 180.0, (1.0, 4.0)


@dataclass(frozen=True, slots=True)
class FaultInjector:
    """Fault injector for the workers of one role: it breaks one at a time and waits until each is back.

    A run has one for each role. So each role always has a working worker, and no request has a reason to fail.
    """

    cluster: LocalCluster
    role: DisaggregationMode
    tally: Tally
    # The router's, seconds.
    hang_timeout: float
    rng: random.Random

    async def run(self, is_over: asyncio.Event) -> None:
        """Inject faults until `is_over` is set.

        Raises ClusterError if a worker does not come back, and RequestFailedError.
        """
        while not is_over.is_set():
            victim = self.rng.choice(self.cluster.children_of(self.role))
            # Fault -> relative frequency. Faults that hit a chosen stage of a request are the most frequent.
            kinds: dict[Callable[[ChildProcess], Awaitable[str]], int] = {
                self._kill: 6,
                self._stop: 4,
                self._pause: 1,
                self._kill_one_process: 2,
                self._restart: 2,
                self._change_role: 3,
            }
            (kind,) = self.rng.choices(list(kinds), list(kinds.values()))
            self.tally.faults[f"{self.role} {await kind(victim)}"] += 1
            await self._wait_usable()
            try:
                async with asyncio.timeout(self.rng.uniform(*_PAUSE)):
                    await is_over.wait()
            except TimeoutError:
                continue

    async def _kill(self, victim: ChildProcess) -> str:
        stage = await self._strike(victim, signal.SIGKILL)
        await asyncio.to_thread(self.cluster.restart, victim)
        return f"killed {stage}"

    async def _stop(self, victim: ChildProcess) -> str:
        """Stop the worker long enough to be considered hung."""
        stage = await self._strike(victim, signal.SIGSTOP)
        await asyncio.sleep(self.hang_timeout * 2)
        signal_worker(victim, signal.SIGCONT)
        return f"stopped {stage}"

    async def _pause(self, victim: ChildProcess) -> str:
        """Stop the worker for less than the hang timeout."""
        signal_worker(victim, signal.SIGSTOP)
        await asyncio.sleep(self.hang_timeout / 3)
        signal_worker(victim, signal.SIGCONT)
        return "paused"

    async def _kill_one_process(self, victim: ChildProcess) -> str:
        assert victim.ready is not None
        part, pid = self.rng.choice([("scheduler", victim.ready.scheduler_pids[0]), ("front end", victim.pid)])
        os.kill(pid, signal.SIGKILL)
        await asyncio.to_thread(self.cluster.restart, victim)
        return f"{part} killed"

    async def _restart(self, victim: ChildProcess) -> str:
        """Restart the worker as an operator does: drain, stop, start."""
        assert victim.ready is not None
        await self._send("/workers/drain", {"url": victim.ready.url, "migrate": True})
        victim.send_signal()
        if not await asyncio.to_thread(victim.wait, _COME_BACK):
            raise ClusterError(f"{victim.name} was drained and does not end:\n{victim.log_tail()}")
        await asyncio.to_thread(self.cluster.restart, victim)
        return "drained and restarted"

    async def _change_role(self, victim: ChildProcess) -> str:
        """Change the worker to another role and back."""
        assert victim.ready is not None
        away = self.rng.choice([role for role in DisaggregationMode if role is not self.role])
        for role in (away, self.role):
            order = {"url": victim.ready.url, "role": role, "timeout": _COME_BACK, "force": True}
            await self._send("/role", order | {"drain": self.rng.choice(["complete", "migrate"])})
        return f"made {away} and {self.role} again"

    async def _strike(self, victim: ChildProcess, number: signal.Signals) -> str:
        """Fail the worker at a random stage. Return the stage, or "anywhere" if it was not reached in time."""
        stage = self.rng.choice(list(FaultStage))
        order = FaultOrder.give(victim.ready_path, Fault(stage, number, skip=self.rng.randrange(6)))
        deadline = time.monotonic() + _REACH
        while time.monotonic() < deadline:
            if order.is_taken:
                return str(stage)
            await asyncio.sleep(POLL_INTERVAL)
        if not order.withdraw():
            return str(stage)
        signal_worker(victim, number)
        return "anywhere"

    async def _wait_usable(self) -> None:
        """Wait until the router uses every worker of the role. Raises ClusterError."""
        began = time.monotonic()
        while True:
            children = self.cluster.children_of(self.role)
            usable = {w["url"] for w in (await self._send("/workers"))["workers"] if w["healthy"] and w["ready"]}
            if all(child.ready is not None and child.ready.url in usable for child in children):
                break
            if time.monotonic() - began > _COME_BACK:
                states = "\n".join(child.log_tail() for child in children)
                raise ClusterError(f"not all {self.role} workers came back within {_COME_BACK:g} s:\n{states}")
            await asyncio.sleep(POLL_INTERVAL * 4)
        self.tally.recoveries.append(time.monotonic() - began)

    async def _send(self, path: str, body: dict[str, Any] | None = None) -> Any:
        async with open_session() as session:
            return await send(session, self.cluster.router_url + path, body)


def signal_worker(child: ChildProcess, number: signal.Signals) -> None:
    """Send a signal to the front end and all schedulers of a worker, as if its whole machine failed or resumed."""
    assert child.ready is not None
    for pid in (child.pid, *child.ready.scheduler_pids, *child.ready.follower_pids):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


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
            asyncio.run(_disturb(cluster, options, seed, requests, expected, tally))
            leaks = asyncio.run(_await_release(cluster))
            # Requests continued elsewhere: "migration" in a stream, "retry" before the first byte.
            num_moves = {
                kind: int(sum_samples(cluster.router_url, kind=kind).get("splitserve_router:retries_total", 0.0))
                for kind in ("migration", "retry")
            }
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
    family = psutil.Process().children(recursive=True)
    leaks += [f"process {p.pid} is left" for p in family if p.status() != psutil.STATUS_ZOMBIE]
    return chaos_report(options.seconds, seed, tally, num_moves, leaks)


def chaos_report(seconds: float, seed: int, tally: Tally, num_moves: Mapping[str, int], leaks: Sequence[str]) -> Report:
    """Return the report. JSON has times in seconds.

    `num_moves`: number of requests continued elsewhere, by "migration" and "retry". `leaks`: descriptions of resources
    that were still held at the end.
    """
    pauses = tally.longest_pauses or [0.0]
    median, most, largest = percentile(pauses, 50), percentile(pauses, 99), max(pauses)
    num_requests = tally.num_equal + tally.num_left + len(tally.errors) + len(tally.differences)
    recovery_max = max(tally.recoveries, default=0.0)
    figures: dict[str, Any] = {
        "seed": seed,
        "seconds": seconds,
        "requests": num_requests,
        "equal": tally.num_equal,
        "left_by_client": tally.num_left,
        "faults": dict(tally.faults),
        "migrations": num_moves["migration"],
        "retries": num_moves["retry"],
        "errors": tally.errors,
        "differences": tally.differences,
        "leaks": list(leaks),
        "longest_pause_p50": median,
        "longest_pause_p99": most,
        "longest_pause_max": largest,
        "recovery_max": recovery_max,
    }
    rows = [
        ("seconds, seed", f"{seconds:.0f}, {seed}"),
        ("requests", str(num_requests)),
        ("equal to an undisturbed run", str(tally.num_equal)),
        ("left by their clients", str(tally.num_left)),
        ("faults", str(tally.faults.total())),
        *((f"- {name}", str(count)) for name, count in sorted(tally.faults.items())),
        ("migrations", str(num_moves["migration"])),
        ("retries before the first byte", str(num_moves["retry"])),
        ("longest pause of a stream, p50 / p99 / max", f"{median:.1f} / {most:.1f} / {largest:.1f} s"),
        ("until a worker was back, max", f"{recovery_max:.1f} s"),
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
            dtype=options.dtype,
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


async def _disturb(
    cluster: LocalCluster,
    options: ChaosOptions,
    seed: int,
    requests: Sequence[StreamRequest],
    expected: Mapping[int, StreamOutcome],
    tally: Tally,
) -> None:
    """Run clients and fault injectors for the given time. `expected`: outcomes of the undisturbed requests."""
    faults_over, load_over = asyncio.Event(), asyncio.Event()
    rng = random.Random(f"clients {seed}")

    async def client(session: aiohttp.ClientSession) -> None:
        while not load_over.is_set():
            i = rng.randrange(len(requests))
            leaves_after = rng.uniform(0.1, 5.0) if rng.random() < _LEAVING else None
            outcome, name = StreamOutcome(), f"request {i} ({requests[i].path})"
            try:
                async with asyncio.timeout(leaves_after):
                    await follow(session, cluster.router_url, requests[i], outcome)
            except RequestFailedError as error:
                tally.errors.append(f"{name}: {error}")
            except TimeoutError:
                tally.num_left += 1
            else:
                tally.judge(name, outcome, expected[i])

    async with open_session(_STREAM) as session, asyncio.TaskGroup() as group:
        for _ in range(options.streams):
            group.create_task(client(session))
        injectors = [
            FaultInjector(cluster, role, tally, options.hang_timeout, random.Random(f"{role} {seed}"))
            for role in (DisaggregationMode.PREFILL, DisaggregationMode.DECODE)
        ]
        running = [group.create_task(injector.run(faults_over)) for injector in injectors]
        await asyncio.wait(running, timeout=options.seconds, return_when=asyncio.FIRST_EXCEPTION)
        faults_over.set()
        # The injectors restart the workers that they broke.
        await asyncio.wait(running)
        load_over.set()


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
