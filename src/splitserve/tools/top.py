"""`splitserve top`: what a router, its workers and its requests do now, in the terminal. Reads `GET /v1/live`."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

import msgspec
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from splitserve.core.errors import OptionError
from splitserve.observe.live import LiveEvent, LiveUpdate, LiveWorker
from splitserve.observe.trace import TraceSummary
from splitserve.process.process_end import unwinding
from splitserve.tools.client import RequestFailedError, open_session, parse_event, router_or_default, stream
from splitserve.tools.figure_table import FigureTable, FlexibleColumn, shortened
from splitserve.tools.options import TopOptions

# Seconds between two attempts to reach the router.
_RETRY_SECONDS = 1.0
# Seconds without an update after which the stream is opened again, as on the page. A router sends one per second.
_SILENCE_SECONDS = 10.0
# Maximum number of stored requests, and of printed events.
_MAX_REQUESTS = 1000
_SHOWN_EVENTS = 5
_UPDATE = msgspec.json.Decoder(LiveUpdate)
# Left-aligned columns.
_TEXTS = ("worker", "role", "state", "prefill", "decode", "request", "route")
_STYLES = {"ready": "green", "draining": "yellow", "switching": "yellow", "unhealthy": "red", "gone": "red"}


class _PictureTakenError(Exception):
    """End of the stream, because one update is enough."""


@dataclass(slots=True)
class LivePicture:
    """State of one subscription, merged from its updates."""

    update: LiveUpdate | None = None
    # By trace id, in the order of their last change.
    requests: dict[str, TraceSummary] = field(default_factory=dict)
    events: deque[LiveEvent] = field(default_factory=lambda: deque(maxlen=_SHOWN_EVENTS))

    def add(self, update: LiveUpdate) -> None:
        self.update = update
        for request in update.requests:
            self.requests.pop(request.trace_id, None)
            self.requests[request.trace_id] = request
        while len(self.requests) > _MAX_REQUESTS:
            del self.requests[next(iter(self.requests))]
        self.events.extend(update.events)

    def latest(self, count: int) -> list[TraceSummary]:
        """Return requests that have not ended first, then those that ended last."""
        found = list(reversed(self.requests.values()))
        return sorted(found, key=lambda request: request.state == "done")[:count]


def run_top(options: TopOptions) -> int:
    """Show updates until Ctrl-C, or one picture. Return the exit code.

    Raises ConfigError, and RequestFailedError with --once.
    """
    if options.router is not None and options.url is not None:
        raise OptionError("--url", f"does not go together with the argument {options.router}: give one URL")
    url = f"{router_or_default(options.router or options.url)}/v1/live"
    # Wide enough for a row if the output is no terminal.
    console = Console(emoji=False, highlight=False, width=None if Console().is_terminal else 160)
    if options.once or not console.is_terminal:
        console.print(render(asyncio.run(_first_picture(url)), options.requests))
        return 0
    # The end of `Live` restores the terminal.
    with unwinding(), suppress(KeyboardInterrupt), Live(console=console, screen=True, auto_refresh=False) as screen:
        asyncio.run(_follow(url, screen, options.requests))
    return 0


async def _first_picture(url: str) -> LivePicture:
    picture = LivePicture()

    def take(update: LiveUpdate) -> None:
        picture.add(update)
        raise _PictureTakenError

    try:
        await _read(url, take)
    except _PictureTakenError:
        return picture
    raise RequestFailedError(f"{url}: the stream ended without an update: is it a router of this release?")


async def _follow(url: str, screen: Live, num_requests: int) -> None:
    """Show updates until cancelled. Reconnect if the router is lost."""
    while True:
        picture = LivePicture()

        def take(update: LiveUpdate, picture: LivePicture = picture) -> None:
            picture.add(update)
            screen.update(render(picture, num_requests), refresh=True)

        problem = f"{url}: the router has ended the stream"
        try:
            await _read(url, take)
        except RequestFailedError as error:
            problem = error.message
        screen.update(Group(render(picture, num_requests), Text(f"{problem}; retrying", "red")), refresh=True)
        await asyncio.sleep(_RETRY_SECONDS)


async def _read(url: str, take: Callable[[LiveUpdate], None]) -> None:
    """Call `take` with each update until the stream ends. Raises RequestFailedError, also if updates stop."""

    def take_line(line: bytes) -> None:
        silence.reschedule(asyncio.get_running_loop().time() + _SILENCE_SECONDS)
        if parse_event(line) is not None:
            take(_UPDATE.decode(line.removeprefix(b"data:")))

    try:
        async with open_session(timeout=None) as session, asyncio.timeout(_SILENCE_SECONDS) as silence:
            await stream(session, url, None, take_line)
    except TimeoutError:
        raise RequestFailedError(f"{url}: no update arrived for {_SILENCE_SECONDS:g} s") from None


def render(picture: LivePicture, num_requests: int) -> RenderableType:
    """Return the picture for the terminal."""
    update = picture.update
    if update is None:
        return Text("no update yet")
    parts: list[RenderableType] = [_head(update), _workers(update.workers)]
    if update.links:
        parts.append(_links(update))
    parts.append(_requests(picture.latest(num_requests), update.now))
    parts += [Text(f"{_clock_time(event.at)}  {event.text}  {event.worker} {event.rid}") for event in picture.events]
    return Group(*parts)


def _head(update: LiveUpdate) -> Text:
    router = update.router
    waiting = f"waiting {router.waiting} at the router, {router.queued} on workers"
    return Text(
        f"{update.model or 'no model'}  splitserve {update.version}  {_clock_time(update.now)}\n"
        f"running {router.running - router.queued}  {waiting}  {router.requests_per_s:g} requests/s  "
        f"{router.tokens_per_s:,.0f} tok/s  TTFT p50 {_ms(router.ttft_p50_ms)}  ITL p50 {_ms(router.itl_p50_ms)} "
        f"p99 {_ms(router.itl_p99_ms)}  loop lag {_ms(router.loop_lag_ms)}",
        "bold",
    )


def _table(rows: Sequence[tuple[Sequence[str | Text], str | Text]], *titles: str, note: str = "") -> FigureTable:
    """Return a table. `rows`: cells and note. The first column becomes narrower in a narrow terminal."""
    names = [str(cells[0]) for cells, _ in rows]
    width = max(map(len, (titles[0], *names)))
    table = FigureTable(titles, FlexibleColumn(0, width, width_beside_notes=width), left=_TEXTS, note=note)
    for name, (cells, text) in zip(names, rows, strict=True):
        table.add([partial(shortened, name), *cells[1:]], Text(text) if isinstance(text, str) else text)
    return table


def _workers(workers: Sequence[LiveWorker]) -> FigureTable:
    rows: list[tuple[Sequence[str | Text], str | Text]] = []
    for worker in workers:
        queues = [f"{name} {count}" for name, count in worker.queues.items() if count]
        cells = (
            worker.name,
            worker.role,
            Text(worker.state, _STYLES.get(worker.state, "")),
            str(worker.running),
            str(worker.waiting),
            _share(worker.kv_usage),
            _number(worker.step_ms),
            _number(worker.tokens_per_s),
            _share(worker.prefix_hit_rate),
            "-" if worker.transfer_gb_s is None else f"{worker.transfer_gb_s:.3f}",
        )
        waits = worker.waiting_reason and f"waits: {worker.waiting_reason}"
        rows.append((cells, "  ".join(filter(None, (" ".join(queues), waits, worker.reason)))))
    titles = ("worker", "role", "state", "running", "waiting", "KV", "step ms", "tok/s", "hits", "GB/s")
    return _table(rows, *titles, note="queues, reasons")


def _links(update: LiveUpdate) -> FigureTable:
    names = {worker.url: worker.name for worker in update.workers}
    rows: list[tuple[Sequence[str | Text], str | Text]] = []
    for link in update.links:
        ends = (names.get(link.prefill, link.prefill), names.get(link.decode, link.decode))
        rows.append(((*ends, str(link.requests), f"{link.bytes_per_s / 1e6:.1f}"), ""))
    return _table(rows, "prefill", "decode", "requests", "MB/s")


def _requests(requests: Sequence[TraceSummary], now: float) -> FigureTable:
    rows: list[tuple[Sequence[str | Text], str | Text]] = []
    for request in requests:
        is_done = request.state == "done"
        seconds = request.e2e_ms / 1e3 if is_done else now - request.started_at
        cells = (
            request.rid[:36],
            request.route,
            str(request.status) if is_done else _state(request),
            f"{max(0.0, seconds):.2f}",
            _number(request.ttft_ms),
            "-" if request.output_tokens is None else str(request.output_tokens),
            str(request.retries + request.migrations),
        )
        rows.append((cells, Text(request.error, "red")))
    return _table(rows, "request", "route", "state", "age s", "TTFT ms", "tokens", "moves", note="error")


def _state(request: TraceSummary) -> str:
    """Return the state of a request that has not ended. The router does not know if it waits on a worker."""
    if request.state == "waiting":
        return "waiting"
    return "dispatched" if request.ttft_ms is None else "streaming"


def _clock_time(at: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(at))


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f} ms"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.1f}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"
