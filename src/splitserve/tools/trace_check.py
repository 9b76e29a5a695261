"""Check that traces add up: send requests under load, and compare their TTFT at the client with their stages.

For each request the exclusive times of its stages must equal the TTFT that this client measured, and the unaccounted
time must be short: both within 2 ms or 2 %, whichever is more.
"""

from __future__ import annotations

import asyncio
import os
import random
import secrets
import time
from contextlib import suppress
from dataclasses import dataclass
from statistics import median
from urllib.parse import quote

import aiohttp
import msgspec
from rich.console import Console

from splitserve.core.errors import SplitserveError
from splitserve.observe.trace import TraceReport
from splitserve.tools.client import RequestFailedError, first_model, open_session, parse_event, send, stream
from splitserve.tools.options import TraceOptions
from splitserve.tools.passage import PASSAGE

# Allowed difference: milliseconds, or a share of the TTFT.
TOLERANCE_MS = 2.0
TOLERANCE_SHARE = 0.02
_MAX_TOKENS = 8
# Words per prompt, for prompts of one step and of several chunks.
_WORDS = (8, 30, 100, 300, 1000)


@dataclass(slots=True)
class CheckedRequest:
    rid: str
    # Milliseconds from sending to the first token. None: the request failed.
    ttft_ms: float | None = None
    failure: str = ""
    # Trace of the request. None: the router has none.
    report: TraceReport | None = None

    @property
    def accounted_ms(self) -> float:
        assert self.report is not None
        return sum(stage.exclusive_ms for stage in self.report.stages if stage.before_first_token)

    def problem(self) -> str:
        """Return why the trace does not add up. Empty: it adds up."""
        if self.report is None:
            return "has no trace"
        if self.ttft_ms is None:
            return "" if self.report.error else f"failed at the client ({self.failure}), but its trace has no error"
        allowed = max(TOLERANCE_MS, TOLERANCE_SHARE * self.ttft_ms)
        missing = self.ttft_ms - self.accounted_ms
        if abs(missing) > allowed:
            return f"took {self.ttft_ms:.1f} ms to its first token, its stages {self.accounted_ms:.1f} ms"
        if self.report.unaccounted_ms > allowed:
            return f"has {self.report.unaccounted_ms:.1f} ms unaccounted of {self.ttft_ms:.1f} ms"
        return ""


def run_check(url: str, options: TraceOptions) -> int:
    """Run the check and print the result. Return the exit code: 0 if every trace adds up."""
    # A client on a machine of its own would not wait for a core.
    with suppress(OSError):
        os.nice(-10)
    checked = asyncio.run(check(url, options.requests, options.concurrency))
    console = Console(highlight=False, markup=False, soft_wrap=True)
    problems = [(request.rid, problem) for request in checked if (problem := request.problem())]
    for rid, problem in problems[:20]:
        console.print(f"request {rid} {problem}")
    answered = [request for request in checked if request.ttft_ms is not None and request.report is not None]
    differences = [abs((request.ttft_ms or 0.0) - request.accounted_ms) for request in answered]
    console.print(f"requests {len(checked)}, failed at the client {len(checked) - len(answered)}")
    if answered:
        console.print(f"TTFT at the client, median {median(request.ttft_ms or 0.0 for request in answered):.1f} ms")
        console.print(f"client minus stages: median {median(differences):.2f} ms, largest {max(differences):.2f} ms")
        unaccounted = [request.report.unaccounted_ms for request in answered if request.report]
        console.print(f"unaccounted: median {median(unaccounted):.2f} ms, largest {max(unaccounted):.2f} ms")
    bound = f"{TOLERANCE_MS:g} ms or {TOLERANCE_SHARE:.0%}"
    console.print(f"traces that do not add up within {bound}: {len(problems)} of {len(checked)}")
    if problems and all(request.report and request.report.unaccounted_ms < TOLERANCE_MS for request in answered):
        console.print("no time is unaccounted in the router: this client, or the network to the router, was delayed")
    return 1 if problems or not answered else 0


async def check(url: str, num_requests: int, concurrency: int, model: str | None = None) -> list[CheckedRequest]:
    """Send requests in a closed loop, then read their traces."""
    name = await asyncio.to_thread(first_model, url) if model is None else model
    numbers = iter(range(num_requests))
    checked: list[CheckedRequest] = []
    async with open_session() as session:

        async def client() -> None:
            for number in numbers:
                request = CheckedRequest(f"check-{secrets.token_hex(8)}")
                checked.append(request)
                await _send(session, url, name, number, request)

        async with asyncio.TaskGroup() as clients:
            for _ in range(concurrency):
                clients.create_task(client())
        for request in checked:
            request.report = await _read(session, url, request.rid)
    return checked


async def _send(session: aiohttp.ClientSession, url: str, model: str, number: int, request: CheckedRequest) -> None:
    """Send a request of random length with words of its own, so that no prefix cache has all of it."""
    choose = random.Random(number)
    words = choose.choices(PASSAGE.split(), k=choose.choice(_WORDS))
    body = {
        "model": model,
        "rid": request.rid,
        "prompt": f"{number} {' '.join(words)}",
        "max_tokens": _MAX_TOKENS,
        "temperature": 0.0,
        "stream": True,
        "ignore_eos": True,
    }
    sent_at = time.perf_counter()

    def take(line: bytes) -> None:
        if request.ttft_ms is None and parse_event(line) is not None:
            request.ttft_ms = (time.perf_counter() - sent_at) * 1e3

    try:
        await stream(session, f"{url}/v1/completions", body, take)
    except RequestFailedError as error:
        request.failure, request.ttft_ms = error.message, None


async def _read(session: aiohttp.ClientSession, url: str, rid: str) -> TraceReport | None:
    """Return the trace of a request. None: the router has none."""
    try:
        return msgspec.convert(await send(session, f"{url}/v1/trace/{quote(rid, safe='')}"), TraceReport)
    except SplitserveError:
        return None
