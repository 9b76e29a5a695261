"""Export of finished requests as OpenTelemetry spans, over OTLP.

The router exports the spans of all processes, because it has the joined trace: one span for the request, a child per
worker, and below each worker one span per stage. The request's span continues the client's W3C trace context.

A thread converts and sends. Its queue is bounded: while the collector is slow or down, requests are dropped and
counted, and serving goes on.
"""

from __future__ import annotations

import logging
import queue
import random
import re
import threading
from collections.abc import Callable, Sequence
from typing import Any

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

from splitserve.core.timeline import Stage
from splitserve.observe.trace import TraceReport, TraceStage
from splitserve.router.request_trace import ClockTable, FinishedTrace

logger = logging.getLogger(__name__)

# Maximum number of requests in the queue, and in one export.
QUEUE_SIZE = 1024
_BATCH = 64
_TIMEOUT = 10.0
# Seconds for the export of queued requests on shutdown.
_CLOSE_TIMEOUT = 2.0
_OPERATIONS = {"/v1/chat/completions": "chat", "/v1/completions": "text_completion", "/generate": "text_completion"}
# Attribute of the request's span, named as in vLLM and SGLang -> stages; the value is the sum of their lengths.
_LATENCIES = {
    "gen_ai.latency.time_in_queue": (Stage.ROUTER_QUEUE, Stage.WAITING, Stage.BOOTSTRAP),
    "gen_ai.latency.time_in_model_prefill": (Stage.PREFILL_CHUNK,),
    "gen_ai.latency.time_in_model_decode": (Stage.DECODE,),
    "gen_ai.latency.kv_cache_transfer_time": (Stage.TRANSFER,),
}


def otlp_exporter(endpoint: str, protocol: str) -> SpanExporter:
    """Return an exporter to a collector. Raises ImportError if the one of this protocol is not installed."""
    if protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter

        return GrpcExporter(endpoint=endpoint, insecure=endpoint.startswith("http://"), timeout=_TIMEOUT)
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter

    return HttpExporter(endpoint=f"{endpoint.rstrip('/')}/v1/traces", timeout=_TIMEOUT)


class SpanQueue:
    """Queue of finished requests, and the thread that exports them. `on_drop` is called for each dropped request."""

    def __init__(
        self, exporter: SpanExporter, clocks: ClockTable, on_drop: Callable[[], None], size: int = QUEUE_SIZE
    ) -> None:
        self._exporter = exporter
        self._clocks = clocks
        self._on_drop = on_drop
        self._queue: queue.Queue[FinishedTrace | None] = queue.Queue(size)
        self._has_failed = False
        self._thread = threading.Thread(target=self._run, name="otlp-exporter", daemon=True)
        self._thread.start()

    def add(self, trace: FinishedTrace) -> None:
        """Queue a request unless its client's trace context excludes it. Never blocks."""
        if not is_sampled(trace.trace.traceparent):
            return
        try:
            self._queue.put_nowait(trace)
        except queue.Full:
            self._on_drop()

    def close(self) -> None:
        """Export queued requests for at most _CLOSE_TIMEOUT, then stop."""
        try:
            self._queue.put(None, timeout=_CLOSE_TIMEOUT)
        except queue.Full:
            return
        self._thread.join(_CLOSE_TIMEOUT)

    def _run(self) -> None:
        batch: list[FinishedTrace] = []
        for trace in iter(self._queue.get, None):
            batch.append(trace)
            if len(batch) >= _BATCH or self._queue.empty():
                self._export(batch)
                batch = []
        if batch:
            self._export(batch)
        self._exporter.shutdown()

    def _export(self, batch: Sequence[FinishedTrace]) -> None:
        try:
            spans = [span for trace in batch for span in spans_of(trace.report(self._clocks), trace.trace.traceparent)]
            is_sent = self._exporter.export(spans) is SpanExportResult.SUCCESS
        except Exception:
            logger.exception("export of spans failed")
            is_sent = False
        if not is_sent:
            for _ in batch:
                self._on_drop()
        if is_sent == self._has_failed:
            # One line when the state changes, not one per batch.
            self._has_failed = not is_sent
            state = "lost, spans are dropped until it answers" if self._has_failed else "reachable again"
            logger.warning("OTLP collector %s", state)


def is_sampled(traceparent: str | None) -> bool:
    """Return whether the client's trace context requests a trace. Without a context every request is traced."""
    flags = (traceparent or "").rpartition("-")[2]
    return re.fullmatch("[0-9a-f]{2}", flags) is None or bool(int(flags, 16) & 1)


def spans_of(report: TraceReport, traceparent: str | None = None) -> list[ReadableSpan]:
    """Return the spans of a request, the one of the whole request first. `traceparent`: the client's trace context."""
    trace_id = int(report.trace_id, 16)
    own = _context(trace_id)
    parts = (traceparent or "").split("-")
    parent = _context(trace_id, int(parts[2], 16)) if len(parts) == 4 and parts[1] == report.trace_id else None
    operation = _OPERATIONS.get(report.route, "text_completion")
    root = ReadableSpan(
        f"{operation} {report.route}",
        own,
        parent,
        _resource("router", ""),
        _request_attributes(report, operation),
        kind=SpanKind.SERVER,
        **_times(report, 0.0, report.e2e_ms),
        status=Status(StatusCode.ERROR, report.error) if report.error else Status(StatusCode.UNSET),
    )
    spans = [root]
    workers: dict[tuple[str, str], SpanContext] = {}
    inside = [stage for stage in report.stages if stage.where not in ("router", "network")]
    for where, worker in dict.fromkeys((stage.where, stage.worker) for stage in inside):
        stages = [stage for stage in inside if (stage.where, stage.worker) == (where, worker)]
        period = (min(s.start_ms for s in stages), max(s.end_ms for s in stages))
        workers[where, worker] = context = _context(trace_id)
        about = f"{where} worker", context, own, _resource(where, worker)
        spans.append(ReadableSpan(*about, kind=SpanKind.SERVER, **_times(report, *period)))
    for stage in report.stages:
        parent_of_stage = workers.get((stage.where, stage.worker), own)
        spans.append(_stage_span(report, stage, _context(trace_id), parent_of_stage))
    return spans


def _stage_span(report: TraceReport, stage: TraceStage, own: SpanContext, parent: SpanContext) -> ReadableSpan:
    where = "router" if stage.where == "network" else stage.where
    attributes = {f"splitserve.{name}": value for name, value in stage.attributes.items()}
    attributes["splitserve.exclusive_ms"] = stage.exclusive_ms
    resource = _resource(where, "" if where == "router" else stage.worker)
    return ReadableSpan(stage.name, own, parent, resource, attributes, **_times(report, stage.start_ms, stage.end_ms))


def _request_attributes(report: TraceReport, operation: str) -> dict[str, Any]:
    seconds = {
        name: sum(s.end_ms - s.start_ms for s in report.stages if s.name in names) / 1e3
        for name, names in _LATENCIES.items()
    }
    values = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "splitserve",
        "gen_ai.request.id": report.rid,
        "gen_ai.usage.input_tokens": report.prompt_tokens,
        "gen_ai.usage.output_tokens": report.output_tokens,
        "gen_ai.usage.cached_tokens": report.num_cached_tokens,
        "gen_ai.latency.e2e": report.e2e_ms / 1e3,
        "gen_ai.latency.time_to_first_token": None if report.ttft_ms is None else report.ttft_ms / 1e3,
        "http.route": report.route,
        "http.response.status_code": report.status,
        "error.type": report.error or None,
        "splitserve.retries": report.retries,
        "splitserve.migrations": report.migrations,
        "splitserve.unaccounted_ms": report.unaccounted_ms,
        **seconds,
    }
    return {name: value for name, value in values.items() if value is not None}


def _times(report: TraceReport, start_ms: float, end_ms: float) -> dict[str, Any]:
    """Return the times of a span in nanoseconds since 1970."""
    began = round(report.started_at * 1e6) * 1000
    return {"start_time": began + round(start_ms * 1e6), "end_time": began + round(end_ms * 1e6)}


def _context(trace_id: int, span_id: int | None = None) -> SpanContext:
    own = random.getrandbits(64) | 1 if span_id is None else span_id
    return SpanContext(trace_id, own, is_remote=span_id is not None, trace_flags=TraceFlags(TraceFlags.SAMPLED))


def _resource(where: str, worker: str) -> Resource:
    names = {"service.name": f"splitserve-{where}", "service.namespace": "splitserve"}
    return Resource(names | ({"service.instance.id": worker} if worker else {}))
