"""Cause one of six reasons for slow requests on this machine, and print the stages that took the time.

    python examples/why_slow.py CASE          exit code 0: the expected stage has the largest part
    python examples/why_slow.py CASE --stay   then serve until Enter, to look at the requests by yourself

1. Start a router and workers of smollm2, with the options that cause the problem.
2. Send a small load with the load generator of `splitserve bench serve`.
3. Read the traces of the slowest requests from the router.
4. Add up their times by stage, and print the median over these requests.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import os
import shlex
import signal
import socket
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from statistics import median

import psutil
from rich.console import Console
from rich.table import Table

from splitserve.core.request import DisaggregationMode
from splitserve.deploy.deployment import LocalDeployment
from splitserve.deploy.local import LocalCluster
from splitserve.engine.sources import resolve_model
from splitserve.observe.trace import TraceReport, TraceStage
from splitserve.tools.bench.load import Endpoint, run_load
from splitserve.tools.bench.systems import encoder_of
from splitserve.tools.bench.workload import LoadRequest, PromptMaker
from splitserve.tools.client import call
from splitserve.tools.trace import read_report

MODEL = "smollm2"
# Requests whose times are printed.
NUM_SLOWEST = 3
# Bytes per second of the slow link.
LINK_RATE = 2_000_000
# Milliseconds of each 100 in which the slow worker runs.
RUNNING_MS = 20
# Tokens of the first prompt of each conversation, and that the second one adds.
TURN_TOKENS = 512
# Linux: socket option for the maximum rate of a connection, and system call that copies a descriptor of a process.
_SO_MAX_PACING_RATE = 47
_PIDFD_GETFD = 438

# Name of a stage, and where it is.
StageName = tuple[str, str]
Load = Callable[[PromptMaker], list[LoadRequest]]
Reports = Sequence[TraceReport]


@dataclass(frozen=True, slots=True)
class SlowCase:
    """One reason for slow requests."""

    reason: str
    # Stage that takes the largest part of the time.
    expected: StageName
    load: Load
    # Requests in flight at the same time.
    concurrency: int
    # Whether the time after the first byte is the long one.
    is_after_first_byte: bool = False
    num_prefill: int = 1
    worker_args: Sequence[str] = ()
    # Causes the problem while the load runs, if options do not.
    disturbance: Callable[[LocalCluster], AbstractContextManager[object]] = lambda _: nullcontext()
    # Returns whether the slowest requests also have the other mark of this case.
    has_mark: Callable[[Reports], bool] = lambda _: True


@contextmanager
def slow_link(cluster: LocalCluster) -> Iterator[None]:
    """Limit the KV transfer to LINK_RATE: the kernel paces the connections from the prefill to the decode worker."""
    (prefill,), (decode,) = (_scheduler_pids(cluster, mode) for mode in ("prefill", "decode"))
    ports = {c.laddr.port for c in psutil.Process(decode).net_connections("tcp") if c.status == psutil.CONN_LISTEN}
    connections = [c for c in psutil.Process(prefill).net_connections("tcp") if c.raddr and c.raddr.port in ports]
    if not connections:
        raise RuntimeError("cannot limit the KV transfer: the workers are not connected")
    process = os.pidfd_open(prefill)
    try:
        for connection in connections:
            _limit(process, connection.fd)
    finally:
        os.close(process)
    yield


def _limit(process: int, descriptor: int) -> None:
    """Limit the rate at which another process sends on a connection. Raises OSError if that is not permitted."""
    libc = ctypes.CDLL(None, use_errno=True)
    copy = libc.syscall(_PIDFD_GETFD, process, descriptor, 0)
    if copy < 0:
        raise OSError(ctypes.get_errno(), "cannot limit the KV transfer: the kernel denies access to the connection")
    with socket.socket(fileno=copy) as connection:
        connection.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, LINK_RATE)


@contextmanager
def slow_worker(cluster: LocalCluster) -> Iterator[None]:
    """Stop the first prefill worker for most of each 100 ms, as a CPU limit of its container would."""
    pid = _scheduler_pids(cluster, "prefill")[0]
    has_ended = threading.Event()

    def throttle() -> None:
        while not has_ended.wait(RUNNING_MS / 1e3):
            os.kill(pid, signal.SIGSTOP)
            has_ended.wait((100 - RUNNING_MS) / 1e3)
            os.kill(pid, signal.SIGCONT)

    thread = threading.Thread(target=throttle)
    thread.start()
    try:
        yield
    finally:
        has_ended.set()
        thread.join()


def _scheduler_pids(cluster: LocalCluster, mode: str) -> list[int]:
    children = cluster.children_of(DisaggregationMode(mode))
    return [pid for child in children if child.ready is not None for pid in child.ready.scheduler_pids]


def new_prompts(number: int, num_tokens: int, max_tokens: int) -> Load:
    """Return a load of prompts that share no prefix."""
    return lambda maker: [LoadRequest(maker.make(num_tokens), max_tokens) for _ in range(number)]


def conversations(maker: PromptMaker) -> list[LoadRequest]:
    """Return two prompts of each of three conversations. The second one begins with the first one."""
    prompts = [maker.make_of_blocks([name], TURN_TOKENS, TURN_TOKENS * turn) for turn in (1, 2) for name in "abc"]
    return [LoadRequest(prompt, 8) for prompt in prompts]


def is_second_turn_without_cache(reports: Reports) -> bool:
    return all(report.prompt_tokens == 2 * TURN_TOKENS and report.num_cached_tokens == 0 for report in reports)


def is_one_prefill_worker(reports: Reports) -> bool:
    return len({report.workers["prefill"] for report in reports}) == 1


CASES = {
    "prefill": SlowCase(
        "too little prefill",
        ("waiting", "prefill"),
        new_prompts(12, 256, 8),
        concurrency=12,
        worker_args=("--chunked-prefill-size", "256"),
    ),
    "decode": SlowCase(
        "too little decode",
        ("prebuilt", "decode"),
        new_prompts(12, 16, 64),
        concurrency=12,
        is_after_first_byte=True,
        worker_args=("--max-running-requests", "2"),
    ),
    "pool": SlowCase(
        "KV pool too small",
        ("prealloc", "decode"),
        new_prompts(8, 300, 64),
        concurrency=8,
        worker_args=("--max-total-tokens", "800"),
    ),
    "link": SlowCase(
        "slow link",
        ("transfer", "prefill"),
        new_prompts(3, 200, 8),
        concurrency=1,
        disturbance=slow_link,
        # Through the connection, as between hosts.
        worker_args=("--transfer-option", "direct=false"),
    ),
    "cache": SlowCase(
        "cold prefix cache",
        ("prefill_chunk", "prefill"),
        conversations,
        concurrency=1,
        num_prefill=2,
        has_mark=is_second_turn_without_cache,
    ),
    "worker": SlowCase(
        "one slow worker",
        ("prefill_chunk", "prefill"),
        new_prompts(8, 300, 8),
        concurrency=1,
        num_prefill=2,
        disturbance=slow_worker,
        has_mark=is_one_prefill_worker,
    ),
}


def run(case: SlowCase, console: Console, *, stay: bool = False) -> bool:
    """Cause the problem and print where the time went. Return whether the trace shows what was expected."""
    args = [*(("--prefill", str(case.num_prefill)) if case.num_prefill > 1 else ()), *case.worker_args]
    console.print(f"{case.reason}: {shlex.join(['splitserve', 'up', MODEL, *args])}")
    deployment = LocalDeployment(model=MODEL, prefill=case.num_prefill, worker_args=case.worker_args)
    maker = PromptMaker(encoder_of(resolve_model(MODEL)))
    with LocalCluster(deployment) as cluster:
        cluster.wait_ready()
        url = cluster.router_url
        endpoint = Endpoint(url, MODEL)
        # After these the workers are connected.
        asyncio.run(run_load(endpoint, new_prompts(2 * case.num_prefill, 16, 2)(maker), concurrency=1)).complete()
        with case.disturbance(cluster):
            asyncio.run(run_load(endpoint, case.load(maker), concurrency=case.concurrency)).complete()
            is_found = show(console, case, slowest(url, is_after_first_byte=case.is_after_first_byte))
            if stay:
                console.input(f"serving: try `splitserve trace --url {url} --slowest 3`. Enter stops it. ")
    return is_found


def slowest(url: str, *, is_after_first_byte: bool) -> list[TraceReport]:
    """Return the requests with the longest time up to the first byte, or after it."""
    traces = call(f"{url}/v1/traces?limit=1000")["traces"]

    def duration(trace: dict[str, float]) -> float:
        return trace["e2e_ms"] - trace["ttft_ms"] if is_after_first_byte else trace["ttft_ms"]

    return [read_report(url, trace["rid"]) for trace in sorted(traces, key=duration, reverse=True)[:NUM_SLOWEST]]


def medians(reports: Reports, *, is_after_first_byte: bool) -> list[tuple[StageName, float]]:
    """Return per stage the median over the requests of its milliseconds, the largest first.

    Up to the first byte these are the exclusive times, after it the lengths. A stage may occur several times in a
    request, such as one chunk after another: its times are added up.
    """
    times: dict[StageName, list[float]] = defaultdict(lambda: [0.0] * len(reports))
    for number, report in enumerate(reports):
        for stage in report.stages:
            after = _after(stage, report.ttft_ms or 0.0)
            times[stage.name, stage.where][number] += after if is_after_first_byte else stage.exclusive_ms
    found = [(name, median(milliseconds)) for name, milliseconds in times.items()]
    return sorted(found, key=lambda item: item[1], reverse=True)


def _after(stage: TraceStage, first_byte_ms: float) -> float:
    return max(0.0, stage.end_ms - max(stage.start_ms, first_byte_ms))


def show(console: Console, case: SlowCase, reports: Reports) -> bool:
    """Print the slowest requests and their stages. Return whether they are as expected."""
    title = "after the first byte" if case.is_after_first_byte else "up to the first byte"
    requests = Table("slowest", "first byte ms", "whole ms", "prompt", "cached", "prefill worker", box=None)
    for report in reports:
        row = (report.rid[:8], f"{report.ttft_ms:.0f}", f"{report.e2e_ms:.0f}", report.prompt_tokens)
        requests.add_row(*map(str, (*row, report.num_cached_tokens, report.workers["prefill"])))
    found = medians(reports, is_after_first_byte=case.is_after_first_byte)
    stages = Table("stage", "where", f"ms {title}, median", box=None)
    for (name, where), milliseconds in found[:4]:
        stages.add_row(name, where, f"{milliseconds:.1f}")
    console.print(requests, stages)
    is_found = found[0][0] == case.expected and case.has_mark(reports)
    console.print(f"expected: {' of '.join(case.expected)}: {'found' if is_found else 'NOT found'}")
    return is_found


def main() -> int:
    parser = argparse.ArgumentParser(description="Cause one reason for slow requests, and show its stage.")
    parser.add_argument("case", choices=CASES)
    parser.add_argument("--stay", action="store_true", help="Serve until Enter, to look at the requests.")
    options = parser.parse_args()
    console = Console(highlight=False, markup=False, width=None if Console().is_terminal else 100)
    try:
        return 0 if run(CASES[options.case], console, stay=options.stay) else 1
    except KeyboardInterrupt:
        # Every process that it started has ended.
        return 130


if __name__ == "__main__":
    sys.exit(main())
