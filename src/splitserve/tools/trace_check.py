"""Check that traces add up: send requests under load, and compare their TTFT at the client with their stages.

For each request the exclusive times of its stages must equal the TTFT that this client measured, and the unaccounted
time must be short: both within 2 ms or 2 %, whichever is more.

The client measures from the time in its header x-request-start, taken before it writes the request, to the time at
which the kernel of its host received the first event of the answer (SO_TIMESTAMPNS). The time at which the client's
process has read this event is measured, too, but not compared: beside busy cores a process waits for one.

The kernel keeps the time of the latest bytes only. If the process reads so late that a second event has arrived, the
measured time is an upper bound, and the stages may add up to less. Real-time scheduling avoids that, if it is allowed.
"""

from __future__ import annotations

import asyncio
import os
import random
import secrets
import socket
import struct
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from statistics import median
from urllib.parse import quote

import aiohttp
import msgspec
from rich.console import Console

from splitserve.core.errors import SplitserveError
from splitserve.observe.trace import TraceReport
from splitserve.router.request_trace import START_HEADER
from splitserve.tools.client import RequestFailedError, first_model, open_session, parse_event, send, stream
from splitserve.tools.options import TraceOptions
from splitserve.tools.passage import PASSAGE

# Allowed difference: milliseconds, or a share of the TTFT.
TOLERANCE_MS = 2.0
TOLERANCE_SHARE = 0.02
_MAX_TOKENS = 8
# Minimum number of requests between two lines of progress.
_REQUESTS_PER_LINE = 100
# Words per prompt, for prompts of one step and of several chunks.
_WORDS = (8, 30, 100, 300, 1000)
# Option of sockets, and type of their control messages with the arrival time; Python does not name it.
_SO_TIMESTAMPNS = 35
_TIMESPEC = struct.Struct("@ll")


@dataclass(slots=True)
class CheckedRequest:
    rid: str
    # Milliseconds from sending to the arrival of the first token at this host. None: the request failed.
    ttft_ms: float | None = None
    # The same to the time at which this process had read it.
    read_ttft_ms: float = 0.0
    # Whether this process read the first token so late that `ttft_ms` is an upper bound.
    is_late: bool = False
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
        if missing < -allowed or (missing > allowed and not self.is_late):
            return f"took {self.ttft_ms:.1f} ms to its first token, its stages {self.accounted_ms:.1f} ms"
        if self.report.unaccounted_ms > allowed:
            return f"has {self.report.unaccounted_ms:.1f} ms unaccounted of {self.ttft_ms:.1f} ms"
        return ""


def run_check(url: str, options: TraceOptions) -> int:
    """Run the check and print the result. Return the exit code: 0 if every trace adds up."""
    checked = asyncio.run(check(url, options.requests, options.concurrency))
    console = Console(emoji=False, highlight=False, markup=False, soft_wrap=True)
    problems = [(request.rid, problem) for request in checked if (problem := request.problem())]
    for rid, problem in problems[:20]:
        console.print(f"request {rid} {problem}")
    answered = [request for request in checked if request.ttft_ms is not None and request.report is not None]
    in_time = [request for request in answered if not request.is_late]
    console.print(f"requests {len(checked)}, failed at the client {len(checked) - len(answered)}")
    for failure, count in Counter(request.failure for request in checked if request.failure).most_common(10):
        console.print(f"- {count} x {failure}")
    if answered:
        console.print(f"TTFT at the client, median {median(request.ttft_ms or 0.0 for request in answered):.1f} ms")
        differences = (abs((request.ttft_ms or 0.0) - request.accounted_ms) for request in in_time)
        _print_times(console, "client minus stages", differences)
        _print_times(console, "unaccounted", (request.report.unaccounted_ms for request in answered if request.report))
        delays = (request.read_ttft_ms - (request.ttft_ms or 0.0) for request in answered)
        _print_times(console, "first token at this host, but not yet read by this process (not counted)", delays)
        console.print(f"read so late that the TTFT is an upper bound: {len(answered) - len(in_time)}")
    bound = f"{TOLERANCE_MS:g} ms or {TOLERANCE_SHARE:.0%}"
    console.print(f"traces that do not add up within {bound}: {len(problems)} of {len(checked)}")
    if any(request.report and request.report.start == "ignored" for request in answered):
        console.print("the router ignored the time of sending: set the clocks of both hosts, or run this on its host")
    return 1 if problems or not in_time else 0


def _print_times(console: Console, what: str, times: Iterable[float]) -> None:
    values = [*times]
    if values:
        console.print(f"{what}: median {median(values):.2f} ms, largest {max(values):.2f} ms")


@contextmanager
def _real_time() -> Iterator[None]:
    """Let this thread run as soon as it has something to read, if the system allows it."""
    with suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_RR | os.SCHED_RESET_ON_FORK, os.sched_param(1))
    try:
        yield
    finally:
        with suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


async def check(url: str, num_requests: int, concurrency: int, model: str | None = None) -> list[CheckedRequest]:
    """Send requests in a closed loop, then read their traces."""
    name = await asyncio.to_thread(first_model, url) if model is None else model
    numbers = iter(range(num_requests))
    checked: list[CheckedRequest] = []
    console = Console(stderr=True)

    async def client() -> None:
        arrivals = EventArrivals()
        async with open_session(socket_factory=arrivals.open_socket) as session:
            for number in numbers:
                request = CheckedRequest(f"check-{secrets.token_hex(8)}")
                checked.append(request)
                # A live display would use CPU time of this process, so progress is a few plain lines.
                if number % max(_REQUESTS_PER_LINE, num_requests // 10) == 0:
                    console.print(f"request {number + 1} of {num_requests}", highlight=False)
                await _send(session, arrivals, url, name, number, request)

    with _real_time():
        async with asyncio.TaskGroup() as clients:
            for _ in range(concurrency):
                clients.create_task(client())
    async with open_session() as session:
        for request in checked:
            request.report = await _read(session, url, request.rid)
    return checked


class EventArrivals:
    """Sockets of one client, with the arrival time of the first event of an answer.

    With TLS there is no time, because the events are encrypted.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Prepare for the next answer."""
        # Seconds since 1970. None: no event has been read.
        self.first_event_at: float | None = None
        # Whether the read that returned it returned later events, too. Then the time is that of the last one.
        self.is_late = False

    def open_socket(self, address: aiohttp.AddrInfoType) -> socket.socket:
        opened = _StampedSocket(*address[:3])
        opened.arrivals = self
        opened.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPNS, 1)
        return opened


class _StampedSocket(socket.socket):
    arrivals: EventArrivals

    def recv(self, size: int, flags: int = 0, /) -> bytes:
        """Do the same as a usual socket, and record the time of the first event."""
        data, control, _, _ = self.recvmsg(size, socket.CMSG_SPACE(_TIMESPEC.size), flags)
        if self.arrivals.first_event_at is None and b"data:" in data:
            for level, kind, value in control:
                if (level, kind) == (socket.SOL_SOCKET, _SO_TIMESTAMPNS):
                    seconds, nanoseconds = _TIMESPEC.unpack(value)
                    self.arrivals.first_event_at = seconds + nanoseconds / 1e9
                    self.arrivals.is_late = data.count(b"data:") > 1
        return data


async def _send(
    session: aiohttp.ClientSession, arrivals: EventArrivals, url: str, model: str, number: int, request: CheckedRequest
) -> None:
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
    arrivals.reset()
    sent_at = time.time()

    def take(line: bytes) -> None:
        if request.ttft_ms is None and parse_event(line) is not None:
            now = time.time()
            request.read_ttft_ms = (now - sent_at) * 1e3
            request.is_late = arrivals.is_late
            request.ttft_ms = ((arrivals.first_event_at or now) - sent_at) * 1e3

    try:
        await stream(session, f"{url}/v1/completions", body, take, {START_HEADER: f"t={sent_at:.6f}"})
    except RequestFailedError as error:
        request.failure, request.ttft_ms = error.message, None


async def _read(session: aiohttp.ClientSession, url: str, rid: str) -> TraceReport | None:
    """Return the trace of a request. None: the router has none."""
    try:
        return msgspec.convert(await send(session, f"{url}/v1/trace/{quote(rid, safe='')}"), TraceReport)
    except SplitserveError:
        return None
