"""Trace of one request in the router: the times of its attempts, and the reports of its workers.

While a request runs, only times are recorded, and the workers' reports are stored as bytes. `FinishedTrace.report`
decodes and joins them if a client or an operator requests the trace. Structs with `array_like` are encoded by
`TraceStore`.

Clocks: processes of one host share a clock, so their times need no correction. For other hosts the offset is estimated
from the four times of an exchange: router sent, worker received, worker responded, router received. The error is half
of the time on the network. Per worker the exchange with the least error counts (`ClockTable`).
"""

from __future__ import annotations

import random
import re
import time
from collections.abc import Iterator

import msgspec

from splitserve.core.timeline import Attribute, Stage, WorkerTrace, clock_name
from splitserve.observe.trace import ClockOffset, TraceReport, TraceStage, TraceSummary, set_exclusive_times

_TRACEPARENT = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}")
_WORKER_TRACE = msgspec.json.Decoder(WorkerTrace)
# An estimate is replaced by one with a larger error after this many seconds, because clocks drift.
_CLOCK_SECONDS = 600.0
# Header with the time at which a client or its proxy sent the request: `t=` and the seconds since 1970, or an integer
# of milliseconds, microseconds or nanoseconds. nginx, Heroku and New Relic use it.
START_HEADER = "x-request-start"
_START = re.compile(r"(?:t=)?(\d{10,19}(?:\.\d{1,9})?)", re.ASCII)
# Seconds of the header that are accepted: at most this old, and at most this far in the future, which counts as 0.
_MAX_SENT_AGO = 60.0
_MAX_AHEAD = 0.001
# Maximum number of attempts that are recorded per request.
_MAX_ATTEMPTS = 16


class CallTrace(msgspec.Struct, array_like=True, gc=False):
    """One request to one worker. Times are clock times of the router."""

    worker: str
    mode: str
    sent_at: float
    # Time at which the head of the answer arrived. None: it did not arrive.
    head_at: float | None = None
    # JSON of the worker's WorkerTrace. Empty: it sent none.
    report: bytes = b""


class AttemptTrace(msgspec.Struct, array_like=True, gc=False):
    """One attempt: its choice of workers begins at `began_at`, and its dispatch at `chosen_at`."""

    began_at: float
    chosen_at: float
    calls: list[CallTrace] = []
    # For a failed attempt: its end, what followed ("retry", "migration", or "failure" if nothing; "refusal": the worker
    # refused the request itself), the worker at fault, and the code of the error.
    failed_at: float | None = None
    kind: str = "failure"
    worker: str = ""
    reason: str = ""
    # Why the choice waited for a worker to return. Empty: it did not wait.
    wait_reason: str = ""


class RequestTrace(msgspec.Struct, array_like=True, gc=False):
    """Times of a running request. `arrived`: clock time at which its head was received."""

    arrived: float
    trace_id: str
    # W3C trace context of the client. None: it sent none.
    traceparent: str | None = None
    # Start of the trace, seconds since 1970.
    started_at: float = msgspec.field(default_factory=time.time)
    # Seconds from there to `arrived`, and the event that starts the trace (`TraceSummary.start`).
    sent_ago: float = 0.0
    start: str = "router"
    parsed_at: float | None = None
    admitted_at: float | None = None
    attempts: list[AttemptTrace] = []
    # Why the choice of the next attempt waits for a worker. Empty: it does not wait.
    wait_reason: str = ""
    # Message of the error that the client received (`TraceReport.error_message`).
    error_message: str = ""

    @property
    def zero(self) -> float:
        """Clock time at which the trace starts."""
        return self.arrived - self.sent_ago

    def begin_attempt(self, now: float) -> None:
        if len(self.attempts) < _MAX_ATTEMPTS:
            self.attempts.append(AttemptTrace(self.choice_began_at(now), now, wait_reason=self.wait_reason))
        self.wait_reason = ""

    def choice_began_at(self, now: float) -> float:
        """Return the clock time at which the choice of the next attempt's workers began."""
        last = self.attempts[-1] if self.attempts else None
        return (self.admitted_at or now) if last is None else (last.failed_at or now)

    def call(self, worker: str, mode: str, now: float) -> CallTrace:
        """Return the record of a request to a worker, sent now."""
        call = CallTrace(worker, mode, now)
        if self.attempts:
            self.attempts[-1].calls.append(call)
        return call

    def fail_attempt(self, now: float, worker: str, reason: str, *, is_refusal: bool = False) -> None:
        if self.attempts:
            attempt = self.attempts[-1]
            attempt.failed_at, attempt.worker, attempt.reason = now, worker, reason
            attempt.kind = "refusal" if is_refusal else attempt.kind


class ClockTable:
    """Offsets of the workers' clocks, by URL."""

    def __init__(self) -> None:
        # URL -> (clock's name, offset in seconds, error in seconds, clock time of the estimate).
        self._known: dict[str, tuple[str, float, float, float]] = {}

    def offset(self, call: CallTrace, trace: WorkerTrace) -> tuple[float, float]:
        """Return the offset of the worker's clock and its maximum error, seconds. Updates it from the call."""
        if trace.clock and trace.clock == clock_name():
            return 0.0, 0.0
        if call.head_at is None:
            return self._known.get(call.worker, ("", 0.0, float("inf"), 0.0))[1:3]
        there = trace.received_at - call.sent_at
        back = trace.received_at + trace.response_time / 1e6 - call.head_at
        offset, error = (there + back) / 2, max(0.0, (there - back) / 2)
        known = self._known.get(call.worker)
        is_old = known is None or known[0] != trace.clock or call.head_at - known[3] > _CLOCK_SECONDS
        if known is None or is_old or error <= known[2]:
            known = (trace.clock, offset, error, call.head_at)
            self._known[call.worker] = known
        return known[1], known[2]


def trace_id_of(traceparent: str | None) -> str:
    """Return the trace id of a W3C traceparent header, or a random one if it is missing or malformed."""
    match = _TRACEPARENT.fullmatch(traceparent) if traceparent else None
    # Ids are not secret, so a fast random number is enough.
    return match.group(1) if match and set(match.group(1)) != {"0"} else f"{random.getrandbits(128):032x}"


def client_start(header: str | None, received_at: float) -> tuple[float, str]:
    """Return the seconds from the client's start to `received_at`, and the event that starts the trace.

    `header`: value of START_HEADER. None: the client sent none. `received_at`: seconds since 1970.
    """
    if header is None:
        return 0.0, "router"
    if (match := _START.fullmatch(header)) is None:
        return 0.0, "ignored"
    sent_at = float(match.group(1))
    while sent_at > 1e11:
        # Milliseconds, microseconds or nanoseconds.
        sent_at /= 1e3
    seconds = received_at - sent_at
    return (max(0.0, seconds), "client") if -_MAX_AHEAD <= seconds <= _MAX_SENT_AGO else (0.0, "ignored")


class TraceEntry(msgspec.Struct, array_like=True, gc=False):
    """What lists of ended requests need. The fields come first in an encoded FinishedTrace, too."""

    # Clock time of the end.
    ended_at: float
    # Name of the client's key. None: no key was needed.
    caller: str | None
    # Id in the header x-request-id of the answer.
    request_id: str | None
    summary: TraceSummary


class FinishedTrace(TraceEntry):
    """A request that has ended. `first_byte_at`: clock time."""

    trace: RequestTrace
    first_byte_at: float | None
    is_stream: bool

    def router_stages(self) -> Iterator[tuple[Stage, float]]:
        """Yield the stages of the router with their seconds. A stage of several attempts is yielded several times."""
        for stage, start, end, _ in _router_stages(self):
            yield stage, end - start

    def report(self, clocks: ClockTable) -> TraceReport:
        """Return the joined trace, from the times of the router and the reports of all workers."""
        trace, first, zero = self.trace, self.first_byte_at, self.trace.zero
        stages = _on_router(self)
        offsets: dict[str, ClockOffset] = {}
        silent: dict[str, None] = {}
        for attempt in trace.attempts:
            for call in attempt.calls:
                report = _decoded(call.report)
                if report is None:
                    # The router gave up the other calls of a failed attempt, so their workers may be healthy. A refusal
                    # has no report.
                    if attempt.failed_at is None or (call.worker == attempt.worker and attempt.kind != "refusal"):
                        silent[call.worker] = None
                else:
                    offset, error = clocks.offset(call, report)
                    offsets[call.worker] = ClockOffset(call.worker, offset * 1e3, min(error, 1e6) * 1e3)
                    stages += _on_worker(zero, call, report, offset)
        unaccounted = set_exclusive_times(stages, ((self.ended_at if first is None else first) - zero) * 1e3)
        values = {name: getattr(self.summary, name) for name in TraceSummary.__struct_fields__}
        return TraceReport(
            **values,
            error_message=trace.error_message,
            stream=self.is_stream,
            attempts=len(trace.attempts),
            unaccounted_ms=unaccounted,
            clocks=list(offsets.values()),
            silent_workers=list(silent),
            stages=sorted(stages, key=lambda stage: (stage.start_ms, stage.end_ms)),
        )


def _router_stages(finished: FinishedTrace) -> Iterator[tuple[Stage, float, float, dict[str, Attribute]]]:
    """Yield the stages of the router: start and end as clock times, and attributes."""
    trace, first_byte_at, ended_at = finished.trace, finished.first_byte_at, finished.ended_at
    if trace.parsed_at is not None:
        yield Stage.ROUTER_RECEIVE, trace.arrived, trace.parsed_at, {}
        if trace.admitted_at is not None:
            yield Stage.ROUTER_QUEUE, trace.parsed_at, trace.admitted_at, {}
    for number, attempt in enumerate(trace.attempts, 1):
        why: dict[str, Attribute] = {"reason": attempt.wait_reason} if attempt.wait_reason else {}
        yield Stage.ROUTER_CHOOSE, attempt.began_at, attempt.chosen_at, why
        if attempt.calls:
            yield Stage.ROUTER_DISPATCH, attempt.chosen_at, max(call.sent_at for call in attempt.calls), {}
        # A prefill worker of a pair does not answer clients.
        head_at = next((call.head_at for call in attempt.calls if call.mode != "prefill"), None)
        failed_at = attempt.failed_at
        has_answered = first_byte_at is not None and (
            failed_at is None or attempt.chosen_at < first_byte_at < failed_at
        )
        if first_byte_at is not None and has_answered and head_at is not None and head_at <= first_byte_at:
            yield Stage.ROUTER_FORWARD, head_at, first_byte_at, {}
        if failed_at is not None:
            failed: dict[str, Attribute] = {"attempt": number, "worker": attempt.worker}
            began_at = attempt.chosen_at
            if first_byte_at is not None and has_answered:
                # The attempt succeeded up to the first byte, but the report of its worker was lost.
                yield Stage.UNREPORTED, began_at, first_byte_at, failed
                began_at = first_byte_at
            failed = failed | {"kind": attempt.kind, "reason": attempt.reason}
            yield Stage.FAILED_ATTEMPT, began_at, failed_at, failed
    if trace.wait_reason:
        # The last choice found no workers.
        yield Stage.ROUTER_CHOOSE, trace.choice_began_at(ended_at), ended_at, {"reason": trace.wait_reason}


def _decoded(data: bytes) -> WorkerTrace | None:
    """Return the report of a worker. None: it sent none, or a malformed one, or it has another release."""
    try:
        report = _WORKER_TRACE.decode(data)
        # The decoder does not check names and pairs.
        [sample.spans for sample in report.samples]
    except (msgspec.MsgspecError, LookupError, ValueError):
        return None
    return report


def _on_router(finished: FinishedTrace) -> list[TraceStage]:
    """Return the stages of the router, and the way to it."""
    trace = finished.trace
    way = [_stage(Stage.CLIENT_NETWORK, "network", "", 0.0, trace.sent_ago, {})] if trace.start == "client" else []
    return way + [
        _stage(stage, "router", "", start - trace.zero, end - trace.zero, attributes)
        for stage, start, end, attributes in _router_stages(finished)
    ]


def _on_worker(zero: float, call: CallTrace, report: WorkerTrace, offset: float) -> list[TraceStage]:
    """Return the stages of a worker, and of its network to the router. `zero`: clock time at which the trace starts."""
    arrived, sent, url = report.received_at - offset - zero, call.sent_at - zero, call.worker
    stages = [_stage(Stage.REQUEST_NETWORK, "network", url, sent, max(sent, arrived), {})]
    if call.head_at is not None and call.mode != "prefill":
        responded, received = arrived + report.response_time / 1e6, call.head_at - zero
        stages.append(_stage(Stage.RESPONSE_NETWORK, "network", url, responded, max(responded, received), {}))
    several = len(report.samples) > 1
    for sample in report.samples:
        for span in sample.spans:
            values = {**span.attributes, "sample": sample.index} if several else span.attributes
            start, end = arrived + span.start / 1e6, arrived + span.end / 1e6
            stages.append(_stage(span.name, call.mode, url, start, end, values))
    return stages


def _stage(name: str, where: str, worker: str, start: float, end: float, values: dict[str, Attribute]) -> TraceStage:
    """Return a stage. Both times are seconds since the start of the trace."""
    return TraceStage(name, where, worker, start * 1e3, end * 1e3, attributes=values)
