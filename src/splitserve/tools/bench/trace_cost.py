"""Throughput of a server with stored traces over that without, measured in turns.

Two routers with equal options run in front of the same workers. One stores no traces, and requests none from the
workers. In each round both get a load of the same lengths with new prompts, in alternating order. The median of the
ratios counts, because both halves of a ratio are from the same moments.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import msgspec

from splitserve.core.errors import SplitserveError
from splitserve.process.child import ChildProcess
from splitserve.process.owned_folder import OwnedFolder
from splitserve.tools.bench.load import Endpoint, run_load
from splitserve.tools.bench.stats import median
from splitserve.tools.bench.systems import Running
from splitserve.tools.bench.workload import Encode, LoadPlan

# Seconds for a router to start, and until it has its workers.
_READY_TIMEOUT = 60.0
# Seeds of the warm-up and of the idle TTFT are the two after that of the load.
_FIRST_SEED = 3


def trace_cost(running: Running, plan: LoadPlan, encode: Encode) -> dict[str, Any] | None:
    """Return the ratios of all rounds and their median. None: no rounds are requested.

    Raises ClusterError, RequestFailedError.
    """
    options = plan.options
    if not options.trace_rounds:
        return None

    with ExitStack() as stack:
        folder = stack.enter_context(OwnedFolder())
        endpoints = []
        for name, args in (("traces", ()), ("no-traces", ("--trace-records", "0"))):
            child = ChildProcess(name, ["router", *running.router_args, "--port", "0", *args], folder)
            stack.callback(child.close)
            url = f"http://127.0.0.1:{child.wait_ready(_READY_TIMEOUT).port}"
            endpoints.append(replace(running.endpoint, url=url))
            _warm_up(endpoints[-1], plan, encode)
        ratios = []
        for number in range(options.trace_rounds):
            rates = [0.0, 0.0]
            for which in (0, 1) if number % 2 == 0 else (1, 0):
                seed = options.seed + _FIRST_SEED + 2 * number + which
                requests = replace(plan, options=msgspec.structs.replace(options, seed=seed)).requests(encode)
                limits = {"concurrency": options.concurrency, "duration": options.duration or math.inf}
                done = asyncio.run(run_load(endpoints[which], requests, **limits))
                rates[which] = sum(record.num_output_tokens for record in done.complete()) / done.elapsed
            ratios.append(rates[0] / rates[1])
    return cost_figures(ratios)


def cost_figures(ratios: Sequence[float]) -> dict[str, Any]:
    """Return the ratios, their median, and the quartiles as a measure of their spread."""
    ordered, quarter = sorted(ratios), len(ratios) // 4
    quartiles = {"ratio_low": ordered[quarter], "ratio_high": ordered[-1 - quarter]}
    return {"ratio": median(ratios), **quartiles, "ratios": list(ratios)}


def _warm_up(endpoint: Endpoint, plan: LoadPlan, encode: Encode) -> None:
    """Send warm-up requests until the router has its workers. Raises SplitserveError."""
    deadline = time.monotonic() + _READY_TIMEOUT
    requests = plan.warm_up(encode) or list(plan.requests(encode))[:1]
    while (done := asyncio.run(run_load(endpoint, requests, concurrency=len(requests)))).errors:
        if time.monotonic() > deadline:
            raise SplitserveError(f"{endpoint.url} does not answer: {next(iter(done.errors))}")
        time.sleep(0.25)
