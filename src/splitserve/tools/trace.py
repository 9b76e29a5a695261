"""`splitserve trace`: waterfalls of requests in the terminal, and the check that the times of stages add up."""

from __future__ import annotations

import re
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from heapq import nlargest
from operator import itemgetter
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import msgspec
from rich.console import Console
from rich.text import Text

from splitserve.core.errors import OptionError
from splitserve.core.steps import MAX_STEPS, StepPage
from splitserve.core.timeline import Attribute, Stage
from splitserve.observe.perfetto import perfetto_trace, shift_of
from splitserve.observe.trace import TraceReport, TraceStage
from splitserve.tools.client import RequestFailedError, call, router_or_default
from splitserve.tools.figure_table import FigureTable, FlexibleColumn
from splitserve.tools.options import TraceOptions

# Function that returns the last steps of a worker, by its URL. It raises RequestFailedError.
StepReader = Callable[[str], StepPage]
# Minimum time of a stage that gets a row without --whole, milliseconds.
_SHOWN_MS = 0.05
# Share of the time to the first byte from which the line `longest` has a stage, and the time between steps is a wait.
_LONG_SHARE = 0.05
# Seconds for an answer of the router, which waits a few seconds for a request that is about to end.
_ANSWER_SECONDS = 10.0
# Status of a request that ended because its client left.
_CLIENT_LEFT = 499
# The bars are the last column before the details.
_TITLES = ("stage", "where", "start ms", "length ms", "exclusive ms", "up to the first byte")
_BARS = FlexibleColumn(index=5, width=40, width_beside_notes=20)
# Stages in which a request waits while the scheduler runs steps without it.
_STEP_WAITS = (Stage.WAITING, Stage.BETWEEN_STEPS, Stage.PREBUILT, Stage.RETRACTED)
# Stages that no token follows meanwhile, if they begin after the first one.
_PAUSES = (
    Stage.ROUTER_CHOOSE,
    Stage.BOOTSTRAP,
    Stage.PREALLOC,
    Stage.WAITING,
    Stage.PREFILL_CHUNK,
    Stage.TRANSFER,
    Stage.RETRACTED,
)
# Start of a trace -> remark after its times.
_STARTS = {"client": " after the client sent it", "ignored": " (x-request-start was ignored: see form and clocks)"}


def run_trace(options: TraceOptions) -> int:
    """Print traces, or check them. Return the exit code. Raises OptionError for options that exclude each other."""
    check_selection(options)
    url = router_or_default(options.url)
    if options.check:
        from splitserve.tools.trace_check import run_check

        return run_check(url, options)
    reports = read_reports(url, options)
    # Wide enough for a row if the output is no terminal.
    console = Console(emoji=False, highlight=False, width=None if Console().is_terminal else 200)
    if options.as_json:
        sys.stdout.write(msgspec.json.encode(reports).decode() + "\n")
        return 0
    if not reports:
        console.print("no finished request matches: send one, or select others (--slowest N, --errors)")
        return 1
    if options.perfetto is not None:
        write_perfetto(console, url, reports, options.perfetto)
        return 0
    steps = cache(partial(read_steps, url))
    for report in reports:
        print_waterfall(console, report, steps, is_whole=options.whole)
    return 0


def check_selection(options: TraceOptions) -> None:
    """Raise OptionError for an option that would have no effect beside another one."""
    if options.rid is not None and options.rid.startswith(("http://", "https://")):
        raise OptionError("RID", f"{options.rid} is a URL: give it by --url")
    values = {"--slowest": options.slowest, "--since": options.since, "--limit": options.limit}
    given = [flag for flag, value in (*values.items(), ("--errors", options.errors or None)) if value is not None]
    if options.check and (options.rid is not None or given):
        raise OptionError("--check", f"sends requests of its own: leave out {given[0] if given else 'RID'}")
    if options.perfetto is not None and (options.check or options.as_json):
        raise OptionError("--perfetto", f"does not go together with {'--check' if options.check else '--json'}")
    if options.check and options.as_json:
        raise OptionError("--json", "does not go together with --check, which prints text")
    if options.rid is not None and given:
        raise OptionError(given[0], f"selects among all finished requests: leave it out, or RID {options.rid}")
    if options.slowest is not None and options.limit is not None:
        raise OptionError("--limit", "does not go together with --slowest, which has the number of requests")


def read_reports(url: str, options: TraceOptions) -> list[TraceReport]:
    """Return the traces that the options select. Raises RequestFailedError."""
    if options.rid is not None:
        return [read_report(url, options.rid)]
    query: dict[str, Any] = {"limit": options.limit or 1}
    if options.slowest is not None:
        query |= {"slowest": options.slowest, "by": options.by}
    if options.since is not None:
        query["since"] = time.time() - options.since
    if options.errors:
        query["errors"] = "true"
    found = _read(f"{url}/v1/traces?{urlencode(query)}")["traces"]
    return [read_report(url, trace["rid"]) for trace in found]


def read_report(url: str, rid: str) -> TraceReport:
    """Return the trace of one request. Raises RequestFailedError."""
    return msgspec.convert(_read(f"{url}/v1/trace/{quote(rid, safe='')}"), TraceReport)


def read_steps(url: str, worker: str) -> StepPage:
    """Return the last steps of a worker. Raises RequestFailedError: it was removed, or the key is a client's."""
    query = urlencode({"worker": worker, "limit": MAX_STEPS})
    return msgspec.convert(_read(f"{url}/v1/steps?{query}"), StepPage)


def _read(url: str) -> Any:
    return call(url, timeout=_ANSWER_SECONDS)


def write_perfetto(console: Console, url: str, reports: Sequence[TraceReport], path: Path) -> None:
    """Write requests and the steps of their workers as a Perfetto trace. Raises ConfigError."""
    steps: dict[str, StepPage] = {}
    for worker in dict.fromkeys(stage.worker for report in reports for stage in report.stages if stage.worker):
        try:
            steps[worker] = read_steps(url, worker)
        except RequestFailedError as error:
            console.print(f"note: the trace has no steps of {worker}: {error.message}", markup=False)
    try:
        path.write_bytes(perfetto_trace(reports, steps))
    except OSError as error:
        raise OptionError("--perfetto", f"{path}: {error.strerror}") from None
    counted = "1 request" if len(reports) == 1 else f"{len(reports)} requests"
    console.print(f"wrote {counted} to {path}: open it in https://ui.perfetto.dev", markup=False)


def print_waterfall(console: Console, report: TraceReport, steps: StepReader, *, is_whole: bool = False) -> None:
    """Print one request: a row per stage, with a bar on the time up to the first byte."""
    first = "none" if report.ttft_ms is None else f"{report.ttft_ms:.1f} ms"
    title = f"request {report.rid}  {report.route}  status {report.status} {report.error}"
    console.print(title, style="bold", markup=False)
    if report.error_message:
        console.print(f"error: {report.error_message}", markup=False)
    counts = report.prompt_tokens, report.num_cached_tokens, report.output_tokens
    prompt, cached, output = ("unknown" if count is None else count for count in counts)
    console.print(
        f"first byte {first}, whole answer {report.e2e_ms:.1f} ms{_STARTS.get(report.start, '')}; "
        f"prompt tokens {prompt} (cached {cached}), output tokens {output}; "
        f"retries {report.retries}, migrations {report.migrations}"
    )
    for role, worker in report.workers.items():
        console.print(f"{role} worker {worker}")
    limit = report.e2e_ms if report.ttft_ms is None else report.ttft_ms
    if longest := _longest(report, limit):
        console.print(f"longest: {', '.join(text for text, _ in longest)}", markup=False)
    for _, stages in longest:
        is_asked = stages[0].name in _STEP_WAITS or _share(stages) is not None
        if is_asked and (others := _others(report, stages, limit, steps)):
            console.print(f"in the steps during {stages[0].name} on {stages[0].where}: {others}", markup=False)
    if pauses := _pauses(report, limit):
        console.print(f"pauses after the first byte: {', '.join(pauses)}", markup=False)
    table = FigureTable(_TITLES, _BARS, left=("stage", "where", "up to the first byte"), note="details")
    largest = longest[0][1] if longest else []
    for stage in report.stages:
        if is_whole or max(stage.exclusive_ms, stage.end_ms - stage.start_ms) >= _SHOWN_MS:
            style = "bold" if any(stage is other for other in largest) else ""
            cells = [Text(text, style) for text in _figures(stage)]
            table.add([*cells, partial(_bar, stage, limit, style)], Text(" ".join(_details(stage, limit))))
    console.print(table)
    console.print(f"unaccounted {report.unaccounted_ms:.2f} ms")
    why = "the client left before" if report.status == _CLIENT_LEFT else "it may have died"
    for worker in report.silent_workers:
        console.print(f"note: {worker} sent no report ({why}), so its stages are missing", markup=False)
    for clock in report.clocks:
        if clock.error_ms:
            console.print(f"clock of {clock.worker}: offset {clock.offset_ms:.2f} ms, known to {clock.error_ms:.2f} ms")
    console.print()


def _longest(report: TraceReport, limit: float) -> list[tuple[str, list[TraceStage]]]:
    """Return up to three groups of stages with more than 5 % of the time to the first byte, each with its text."""
    groups = _groups(report.stages)
    times = {key: sum(stage.exclusive_ms for stage in stages) for key, stages in groups.items()}
    found = []
    for key in sorted(groups, key=lambda key: -times[key])[:3]:
        if times[key] > _LONG_SHARE * limit:
            name, where, reason = key
            text = f"{name} on {where} {times[key]:,.1f} ms ({times[key] / limit * 100:.0f} %)"
            share = _share(groups[key])
            text += f", reason {reason}" if reason else ""
            text += "" if share is None else f", {share[0]:,} of the {share[1]:,} tokens of its steps"
            found.append((text, groups[key]))
    return found


def _groups(stages: Iterable[TraceStage]) -> dict[tuple[str, str, Attribute], list[TraceStage]]:
    """Return stages by name, process and reason."""
    groups: dict[tuple[str, str, Attribute], list[TraceStage]] = defaultdict(list)
    for stage in stages:
        groups[stage.name, stage.where, _reason(stage)].append(stage)
    return groups


def _pauses(report: TraceReport, limit: float) -> list[str]:
    """Return up to three kinds of pauses with more than 5 % of the time after the first byte, the longest first."""
    groups = _groups(stage for stage in report.stages if stage.start_ms >= limit and stage.name in _PAUSES)
    times = {key: sum(stage.end_ms - stage.start_ms for stage in stages) for key, stages in groups.items()}
    least = _LONG_SHARE * (report.e2e_ms - limit)
    return [
        f"{name} on {where} {time:,.1f} ms" + (f", reason {reason}" if reason else "")
        for (name, where, reason), time in nlargest(3, times.items(), key=itemgetter(1))
        if time > least
    ]


def _share(stages: list[TraceStage]) -> tuple[int, int] | None:
    """Return the prompt tokens of the request in these steps, and all tokens of the steps. None: it was alone there."""
    own, all_tokens = (sum(int(stage.attributes.get(key, 0)) for stage in stages) for key in ("tokens", "batch_tokens"))
    return (own, all_tokens) if own < all_tokens else None


def _others(report: TraceReport, stages: list[TraceStage], limit: float, steps: StepReader) -> str:
    """Return up to three requests in the steps during waits for a step, the longest time first. Empty: unknown.

    During chunks of the prompt: the other requests in the steps of these chunks.
    """
    try:
        page = steps(stages[0].worker)
    except RequestFailedError:
        return ""
    own_stages = [stage for stage in report.stages if stage.worker == stages[0].worker]
    is_found = not any({"step", "first_step"} & stage.attributes.keys() for stage in own_stages)
    shift, own = shift_of([report], stages[0].worker, page) - report.started_at, report.rid.split(",")
    is_shared = stages[0].name == Stage.PREFILL_CHUNK
    times: Counter[str] = Counter()
    for step in page.steps:
        # Ids without the number of the attempt. A sample of several has a number.
        rids = {re.sub(r"~\d+$", "", rid) for rid in step.rids}
        known = {rid for rid in rids if rid in own or rid.rpartition("-")[0] in own}
        is_found = is_found or bool(known)
        if bool(known) != is_shared:
            continue
        start, end = (step.start + shift) * 1e3, (step.end + shift) * 1e3
        if common := sum(max(0.0, min(s.end_ms, limit, end) - max(s.start_ms, start)) for s in stages):
            times.update(dict.fromkeys(rids - known, common))
    if not is_found:
        # The steps are those of another data parallel rank, or the worker no longer has the ones of this request.
        return ""
    names = ", ".join(rid for rid, _ in times.most_common(3))
    return names + (f" and {len(times) - 3} more" if len(times) > 3 else "")


def _figures(stage: TraceStage) -> Iterable[str]:
    exclusive = f"{stage.exclusive_ms:.2f}" if stage.exclusive_ms >= 0.005 else ""
    return stage.name, stage.where, f"{stage.start_ms:.2f}", f"{stage.end_ms - stage.start_ms:.2f}", exclusive


def _details(stage: TraceStage, limit: float) -> Iterable[str]:
    if stage.where == "network" and stage.worker:
        yield f"worker={stage.worker}"
    # A request that the steps of others do not delay is between steps, too, but for hardly any time of its own.
    reason = {"reason": _reason(stage)} if stage.exclusive_ms > _LONG_SHARE * limit else {}
    for name, value in (reason | stage.attributes).items():
        if value != "":
            yield f"{name}={f'{value:.4g}' if isinstance(value, float) else value}"


def _reason(stage: TraceStage) -> Attribute:
    # Between two steps of a request, the scheduler runs steps without it.
    return stage.attributes.get("reason", "other_steps" if stage.name == Stage.BETWEEN_STEPS else "")


def _bar(stage: TraceStage, limit: float, style: str, width: int) -> Text:
    """Return the bar of a stage. Empty: it began after the first byte."""
    if not stage.before_first_token or limit <= 0:
        return Text()
    start = int(stage.start_ms / limit * width)
    end = int(min(stage.end_ms, limit) / limit * width)
    start = min(max(start, 0), width - 1)
    return Text(" " * start + "█" * max(1, end - start), style)
