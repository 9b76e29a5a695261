"""Cost of traces at the router: requests/s and CPU time per request with stored traces over those without.

    PYTHONPATH=src python bench/router_traces.py [SECONDS]

Workers, load and options are those of `splitserve bench router`. That command starts a process per router, and
processes of equal routers differ by up to 4 %, by luck of their memory. Here one process serves both routers, and they
take turns of 0.1 s. Four such processes are measured. SECONDS: duration of all loads of each router, 60 by default.
"""

from __future__ import annotations

import asyncio
import math
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path

import uvloop

from splitserve.api.http_server import HttpServer, bind, port_of
from splitserve.core.errors import SplitserveError
from splitserve.process.settings import collect_rarely, setup_logger
from splitserve.router.app import build_router_app
from splitserve.router.args import LBArgs, PrefillConfig
from splitserve.tools.bench.router_load import MockWorkers, RouterLoad
from splitserve.tools.bench.second_process import SecondProcess
from splitserve.tools.bench.stats import median

_NUM_PROCESSES = 4
# Seconds of one load, and until both routers have served as many requests as they store traces.
_LOAD_SECONDS = 0.1
_FILL_TIMEOUT = 120.0


def trace_cost(mock: MockWorkers, connections: int, seconds: float, folder: Path) -> list[list[tuple[float, float]]]:
    """Return ratios with / without traces of requests/s and CPU time, per process and pair of loads.

    `seconds`: duration of the loads of each router. Raises SplitserveError if an answer was wrong.
    """
    ratios = []
    for number in range(_NUM_PROCESSES):
        log = folder / f"traces-{number}.log"
        with SecondProcess(_serve_both, mock.prefill_port, mock.decode_port, log) as process:
            ports = process.receive()
            for port in ports:
                _fill(mock, port, connections)
            pairs = []
            for pair in range(math.ceil(seconds / _LOAD_SECONDS / _NUM_PROCESSES)):
                found = {}
                for port in ports if pair % 2 else reversed(ports):
                    load, before = RouterLoad(port, connections, 0, _LOAD_SECONDS), _cpu_seconds(process.pid)
                    mock.run(load)
                    if load.num_wrong:
                        raise SplitserveError(f"a router answered wrongly: {load.wrong}")
                    count = len(load.latencies)
                    found[port] = count / load.elapsed, (_cpu_seconds(process.pid) - before) / count
                (rate, cpu), (rate_without, cpu_without) = (found[port] for port in ports)
                pairs.append((rate / rate_without, cpu / cpu_without))
            ratios.append(pairs)
    return ratios


def described(ratios: Sequence[float]) -> str:
    """Return the median, its 95 % interval and the quartiles."""
    ordered, count = sorted(ratios), len(ratios)
    # The ranks of a 95 % interval of a median are about sqrt(n) from the middle.
    ranks = max(0.0, count / 2 - math.sqrt(count)), count / 4, 3 * count / 4, count / 2 + math.sqrt(count)
    low, first, third, high = (ordered[min(count - 1, int(rank))] for rank in ranks)
    return f"{median(ratios):.4f} (95 %: {low:.4f} to {high:.4f}; quartiles: {first:.4f}, {third:.4f}; {count} pairs)"


def _fill(mock: MockWorkers, port: int, connections: int) -> None:
    """Wait until a router answers, and fill its store of traces. Raises SplitserveError."""
    deadline, left = time.monotonic() + _FILL_TIMEOUT, LBArgs().trace_records
    while left > 0:
        load = RouterLoad(port, connections, 0, _FILL_TIMEOUT, left)
        mock.run(load)
        left -= 0 if load.num_wrong else len(load.latencies)
        if time.monotonic() > deadline:
            raise SplitserveError(f"a router does not answer as the workers do: {load.wrong}")


def _cpu_seconds(pid: int) -> float:
    """Return the CPU seconds of a process so far, in nanoseconds' resolution, as `clock_getcpuclockid` does."""
    return time.clock_gettime((~pid << 3) | 2)


def _serve_both(connection: Connection, prefill_port: int, decode_port: int, log: Path) -> None:
    """Serve a router with default options and one without traces. Send their ports, and serve until EOF."""
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT), 2)
    setup_logger("info")
    uvloop.run(_serve(connection, f"http://127.0.0.1:{prefill_port}", f"http://127.0.0.1:{decode_port}"))


async def _serve(connection: Connection, prefill: str, decode: str) -> None:
    servers, ports = [], []
    for records in (LBArgs().trace_records, 0):
        args = LBArgs(prefill=(PrefillConfig(prefill),), decode=(decode,), trace_records=records)
        sock = bind("127.0.0.1", 0)
        ports.append(port_of(sock))
        servers.append(HttpServer(build_router_app(args), sock, limits=args.limits))
        await servers[-1].start()
    with collect_rarely():
        connection.send(ports)
        await asyncio.to_thread(connection.poll, None)
        for server in servers:
            await server.stop(0.0)


if __name__ == "__main__":
    with MockWorkers() as mock, tempfile.TemporaryDirectory() as folder:
        found = trace_cost(mock, 32, float(sys.argv[1]) if len(sys.argv) > 1 else 60.0, Path(folder))
    for name, which in (("requests/s", 0), ("CPU time", 1)):
        each = ", ".join(f"{median([pair[which] for pair in pairs]):.4f}" for pairs in found)
        whole = described([pair[which] for pairs in found for pair in pairs])
        sys.stdout.write(f"{name}, with / without traces: {whole}, per process {each}\n")
