"""`splitserve chaos`: a local cluster under load while its workers die, stop and restart.

1. A router, prefill and decode workers start. A fixed set of requests of all forms runs undisturbed. All later outcomes
   are compared with its outcomes, bit for bit if the workers are batch invariant.
2. Clients repeat these requests, and some disconnect halfway. Two fault injectors break workers.
3. After the given time the faults end first, then the load. Then no worker may hold any resource.
"""

from __future__ import annotations

import asyncio
import random
import secrets
import shlex
import time
from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from typing import Any

import aiohttp
import psutil  # type: ignore[import-untyped]
from rich.console import Console

from splitserve.core.request import DisaggregationMode
from splitserve.deploy.deployment import LocalDeployment
from splitserve.deploy.local import LocalCluster
from splitserve.engine.sources import resolve_model
from splitserve.observe.scheduler_metrics import held
from splitserve.process.child import POLL_INTERVAL
from splitserve.process.owned_folder import OwnedFolder
from splitserve.tools.bench.options import ChaosOptions
from splitserve.tools.bench.report import Report, ReportTable
from splitserve.tools.bench.stats import percentile
from splitserve.tools.chaos.faults import PROGRAM
from splitserve.tools.chaos.injector import COME_BACK, FaultInjector
from splitserve.tools.chaos.streams import (
    StreamOutcome,
    StreamRequest,
    Tally,
    follow,
    follow_undisturbed,
    make_requests,
)
from splitserve.tools.client import RequestFailedError, call, open_session, send, sum_samples
from splitserve.tools.verify_compare import Numerics
from splitserve.worker.checks import check_backend

# Maximum number of quoted texts of each kind.
_NUM_QUOTED = 5
# Number of different requests.
_NUM_REQUESTS = 30
# Share of the requests with a client that disconnects halfway.
_LEAVING = 0.05
# Seconds for the workers to load, for a stream, and for the release of all resources at the end.
_READY, _STREAM, _RELEASE = 600.0, 300.0, 60.0
# Counter of a scheduler -> its row in the report. Each counts since the last start of its worker.
_COUNTERS = {
    "num_retracted_requests_total": "retractions, since the last start of each worker",
    "num_retracted_resumed_whole_total": "- resumed without recomputation",
    "num_retracted_recomputed_tokens_total": "- tokens computed again for the others",
    "spec_decode_num_draft_tokens_total": "draft tokens, since the last start of each worker",
    "spec_decode_num_accepted_tokens_total": "- accepted",
}


def weight_folders(model: str, links: Path) -> list[Path]:
    """Return the folder of a model, and a link to it in `links`: equal weights of another folder, for updates."""
    # The target of a link is relative to the link, not to this process.
    folder = resolve_model(model).resolve()
    link = links / "model"
    link.symlink_to(folder)
    return [folder, link]


def child_processes() -> set[psutil.Process]:
    """Return the descendants of this process that have not ended."""
    return {p for p in psutil.Process().children(recursive=True) if p.status() != psutil.STATUS_ZOMBIE}


def ended_children(names: Set[str], cluster: LocalCluster) -> list[str]:
    """Return which of these processes have ended. Faults are over, and each victim was started again."""
    return [f"{name} ended, and no fault ended it" for name in sorted(names - {c.name for c in cluster.children})]


def bench_chaos(options: ChaosOptions, console: Console) -> Report:
    """Run the test and return the report, which has failed if a client lost anything or something leaked."""
    check_backend(options.transfer_backend, "--transfer-backend")
    seed = secrets.randbelow(1 << 16) if options.seed is None else options.seed
    requests = make_requests(_NUM_REQUESTS, options.max_tokens, wide=True)
    tally = Tally()
    # A program that calls this function may have processes of its own.
    earlier = child_processes()
    with OwnedFolder() as links, _cluster(options) as cluster:
        folders = weight_folders(options.model, links)
        console.print(f"starting {options.prefill} prefill and {options.decode} decode workers", highlight=False)
        cluster.wait_ready(_READY)
        names = {child.name for child in cluster.children}
        workers = [url for role in DisaggregationMode for url in cluster.urls(role)]
        tally.tolerance = Numerics.of([call(f"{url}/server_info") for url in workers]).max_logprob_delta
        expected = follow_undisturbed(cluster.router_url, requests, timeout=_STREAM)
        console.print(f"now with faults, for {options.seconds:.0f} s (seed {seed})", highlight=False)
        try:
            asyncio.run(_disturb(cluster, options, seed, requests, expected, tally, folders))
            leaks = asyncio.run(_await_release(cluster, tally)) + ended_children(names, cluster)
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
    leaks += [f"process {p.pid} is left" for p in child_processes() - earlier]
    return chaos_report(options.seconds, seed, tally, num_moves, leaks)


def chaos_report(seconds: float, seed: int, tally: Tally, num_moves: Mapping[str, int], leaks: Sequence[str]) -> Report:
    """Return the report. JSON has times in seconds.

    `num_moves`: number of requests continued elsewhere, by "migration" and "retry". `leaks`: descriptions of resources
    that were still held at the end.
    """
    pauses = tally.longest_pauses or [0.0]
    # Key in the figures -> label of its row, and value.
    facts: dict[str, tuple[str, Any]] = {
        "seed": ("seed", seed),
        "seconds": ("seconds of faults", seconds),
        "requests": ("requests", tally.num_requests),
        "equal": ("equal to an undisturbed run", tally.num_equal),
        "left_by_client": ("left by their clients", tally.num_left),
        "faults": ("faults", dict(sorted(tally.faults.items()))),
        "migrations": ("migrations", num_moves["migration"]),
        "retries": ("retries before the first byte", num_moves["retry"]),
        "longest_pause_p50": ("longest pause of a stream, p50, s", percentile(pauses, 50)),
        "longest_pause_p99": ("longest pause of a stream, p99, s", percentile(pauses, 99)),
        "longest_pause_max": ("longest pause of a stream, max, s", max(pauses)),
        "recovery_max": ("until a worker was back, max, s", max(tally.recoveries, default=0.0)),
        **{counter: (text, tally.counters[counter]) for counter, text in _COUNTERS.items()},
        "tolerance": ("allowed difference of logprobs and hidden states", tally.tolerance),
        "errors": ("errors", tally.errors),
        "differences": ("differing outputs", tally.differences),
        "leaks": ("leaks", list(leaks)),
    }
    rows: list[tuple[str, str]] = []
    for label, value in facts.values():
        if isinstance(value, dict):
            rows += [(label, str(sum(value.values()))), *((f"- {name}", str(count)) for name, count in value.items())]
        else:
            number = len(value) if isinstance(value, list) else value
            rows.append((label, f"{number:.3g}" if isinstance(number, float) else str(number)))
    return Report(
        title="Chaos",
        figures={key: value for key, (_, value) in facts.items()},
        tables=[ReportTable(["", ""], rows)],
        # Killed workers do not wait for their schedulers: the time of these would count as that of others.
        has_others=True,
        remarks=[text for found in (tally.errors, tally.differences, leaks) for text in found[:_NUM_QUOTED]],
        failed=bool(tally.errors or tally.differences or leaks) or not tally.num_equal or not tally.faults,
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
            worker_args=[
                *("--max-total-tokens", "20000", "--chunked-prefill-size", "64"),
                # On a busy machine a grammar takes minutes.
                *("--enable-return-hidden-states", "--grammar-timeout", "300"),
                *shlex.split(options.serve_options),
            ],
            # A request has more faults in a minute than others in a year. With slow workers each fault of a run may end
            # an attempt of it.
            router_args=[
                *("--hang-timeout", str(options.hang_timeout), "--health-interval", "0.5"),
                *("--max-retries", "32", "--max-prefill-retries", "32"),
                # With several workers of a role one always serves.
                *("--worker-wait-timeout", str(COME_BACK if min(options.prefill, options.decode) == 1 else 0)),
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
    models: Sequence[Path],
) -> None:
    """Run clients and fault injectors for the given time.

    `expected`: outcomes of the undisturbed requests. `models`: folders with the weights of the workers.
    """
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
            FaultInjector(cluster, role, tally, options.hang_timeout, random.Random(f"{role} {seed}"), models)
            for role in (DisaggregationMode.PREFILL, DisaggregationMode.DECODE)
        ]
        running = [group.create_task(injector.run(faults_over)) for injector in injectors]
        await asyncio.wait(running, timeout=options.seconds, return_when=asyncio.FIRST_EXCEPTION)
        faults_over.set()
        # The injectors restart the workers that they broke.
        await asyncio.wait(running)
        load_over.set()


async def _await_release(cluster: LocalCluster, tally: Tally) -> list[str]:
    """Wait until workers have released everything. Return what they still hold after the timeout.

    Add their counters to `tally`.
    """
    deadline = time.monotonic() + _RELEASE
    urls = [url for role in DisaggregationMode for url in cluster.urls(role)]
    async with open_session() as session:
        while True:
            states, problems = list[dict[str, Any]](), list[str]()
            for url in urls:
                try:
                    found = (await send(session, f"{url}/server_info"))["internal_states"]
                except RequestFailedError as error:
                    problems.append(f"{url} does not answer: {error}")
                else:
                    states += found
                    problems += [f"{url} keeps {what}" for state in found if (what := held(state))]
            if not problems or time.monotonic() > deadline:
                break
            await asyncio.sleep(POLL_INTERVAL * 10)
    for state in states:
        tally.counters.update({counter: state[counter] for counter in _COUNTERS})
    return problems
