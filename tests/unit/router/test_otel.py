"""Tests of the OpenTelemetry export: real receivers over gRPC and HTTP, dead and slow collectors."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent import futures
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

pytest.importorskip("opentelemetry.exporter.otlp.proto.grpc", reason="needs splitserve[otel]")

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.sdk.trace.export import SpanExportResult

from splitserve.core.timeline import Stage
from splitserve.observe.trace import TraceReport, TraceStage
from splitserve.router.otel import SpanQueue, is_sampled, otlp_exporter, spans_of
from splitserve.router.request_trace import ClockTable, RequestTrace
from support.traces import trace_report

TRACE_ID, CLIENT_SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
TRACEPARENT = f"00-{TRACE_ID}-{CLIENT_SPAN}-01"
# Seconds in which a receiver must have a request.
PATIENCE = 20.0


class FakeFinishedTrace:
    """A stored request, as far as the exporter uses it."""

    def __init__(self, rid: str = "r") -> None:
        self._rid = rid
        self.trace = RequestTrace(0.0, TRACE_ID, TRACEPARENT)

    def report(self, clocks: ClockTable) -> TraceReport:
        def stage(name: Stage, where: str, start: float, end: float, **attributes: Any) -> TraceStage:
            worker = "" if where == "router" else f"http://{where}"
            return TraceStage(name, where, worker, start, end, end - start, True, attributes)

        return trace_report(
            rid=self._rid,
            trace_id=TRACE_ID,
            route="/v1/chat/completions",
            started_at=1_700_000_000.0,
            ttft_ms=40.0,
            e2e_ms=90.0,
            prompt_tokens=12,
            output_tokens=5,
            num_cached_tokens=0,
            stages=[
                stage(Stage.ROUTER_QUEUE, "router", 0.0, 1.0),
                stage(Stage.PREFILL_CHUNK, "prefill", 2.0, 22.0, tokens=12),
                stage(Stage.TRANSFER, "prefill", 22.0, 29.0, bytes=1 << 20),
                stage(Stage.DECODE, "decode", 30.0, 90.0, steps=4),
            ],
        )


class Receiver:
    """What a collector has received: (resource's service name, span) pairs."""

    def __init__(self) -> None:
        self.spans: list[tuple[str, Any]] = []
        self.arrived = threading.Event()

    def take(self, request: Any) -> None:
        for resource in request.resource_spans:
            names = {a.key: a.value.string_value for a in resource.resource.attributes}
            for scope in resource.scope_spans:
                self.spans += [(names["service.name"], span) for span in scope.spans]
        self.arrived.set()

    def kv_transfer_seconds(self) -> dict[str, float]:
        """Answer a query of operators: KV transfer time per request."""
        found = {}
        for _, span in self.spans:
            values = {a.key: a.value for a in span.attributes}
            if "gen_ai.request.id" in values:
                seconds = values["gen_ai.latency.kv_cache_transfer_time"].double_value
                found[values["gen_ai.request.id"].string_value] = seconds
        return found


@pytest.fixture
def grpc_collector() -> Iterator[tuple[str, str, Receiver]]:
    receiver = Receiver()

    class Service(trace_service_pb2_grpc.TraceServiceServicer):
        def Export(self, request: Any, context: Any) -> Any:
            receiver.take(request)
            return trace_service_pb2.ExportTraceServiceResponse()

    server = grpc.server(futures.ThreadPoolExecutor(2))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(Service(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield "grpc", f"http://127.0.0.1:{port}", receiver
    server.stop(None).wait()


@pytest.fixture
def http_collector() -> Iterator[tuple[str, str, Receiver]]:
    receiver = Receiver()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/traces"
            request = trace_service_pb2.ExportTraceServiceRequest()
            request.ParseFromString(self.rfile.read(int(self.headers["content-length"])))
            receiver.take(request)
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield "http", f"http://127.0.0.1:{server.server_port}", receiver
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize("collector", ["grpc_collector", "http_collector"])
def test_a_receiver_gets_the_spans_of_all_processes(collector: str, request: pytest.FixtureRequest):
    protocol, url, receiver = request.getfixturevalue(collector)
    dropped: list[None] = []
    spans = SpanQueue(otlp_exporter(url, protocol), ClockTable(), lambda: dropped.append(None))
    spans.add(FakeFinishedTrace("first"))
    assert receiver.arrived.wait(PATIENCE)
    spans.close()
    assert dropped == []
    assert receiver.kv_transfer_seconds() == {"first": pytest.approx(0.007)}
    by_name = {span.name: (service, span) for service, span in receiver.spans}
    root = by_name["chat /v1/chat/completions"][1]
    assert {span.trace_id.hex() for _, span in receiver.spans} == {TRACE_ID}
    assert root.parent_span_id.hex() == CLIENT_SPAN
    assert by_name["prefill worker"][1].parent_span_id == by_name["decode worker"][1].parent_span_id == root.span_id
    assert by_name["transfer"][1].parent_span_id == by_name["prefill worker"][1].span_id
    assert by_name["router_queue"][1].parent_span_id == root.span_id
    services = {name: service for name, (service, _) in by_name.items()}
    assert services["decode"] == "splitserve-decode"
    assert services["router_queue"] == "splitserve-router"
    assert (root.start_time_unix_nano, root.end_time_unix_nano) == (1_700_000_000 * 10**9, 1_700_000_000_090 * 10**6)


class StuckExporter:
    """Collector that answers only when the test ends."""

    def __init__(self) -> None:
        self.entered, self.released = threading.Event(), threading.Event()
        self.num_spans = 0

    def export(self, spans: Any) -> SpanExportResult:
        self.entered.set()
        self.released.wait(PATIENCE)
        self.num_spans += len(spans)
        return SpanExportResult.FAILURE

    def shutdown(self) -> None:
        pass


def test_a_stuck_collector_drops_and_counts_and_never_blocks():
    dropped: list[None] = []
    exporter = StuckExporter()
    spans = SpanQueue(exporter, ClockTable(), lambda: dropped.append(None), size=4)
    spans.add(FakeFinishedTrace())
    assert exporter.entered.wait(PATIENCE)
    # One is in the export, four wait, the others are dropped at once.
    for _ in range(10):
        spans.add(FakeFinishedTrace())
    assert len(dropped) == 6
    exporter.released.set()
    spans.close()
    # The exports failed, too.
    assert len(dropped) == 11


def test_a_request_that_is_not_sampled_by_its_client_is_not_exported():
    exporter = StuckExporter()
    exporter.released.set()
    spans = SpanQueue(exporter, ClockTable(), lambda: None)
    unsampled = FakeFinishedTrace()
    unsampled.trace.traceparent = f"00-{TRACE_ID}-{CLIENT_SPAN}-00"
    spans.add(unsampled)
    spans.close()
    assert exporter.num_spans == 0


def test_sampling_follows_the_flag_of_the_client():
    assert is_sampled(None)
    assert is_sampled(TRACEPARENT)
    # Malformed.
    assert is_sampled("00-a-b-zz")
    assert not is_sampled(f"00-{TRACE_ID}-{CLIENT_SPAN}-00")


def test_without_a_trace_context_the_request_is_the_root():
    root = spans_of(FakeFinishedTrace().report(ClockTable()))[0]
    assert root.parent is None
    assert f"{root.context.trace_id:032x}" == TRACE_ID
