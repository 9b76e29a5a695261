"""Traces of real workers: every request has one, and its stages explain its time to the first byte."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import httpx
import pytest

from splitserve.tools.options import TraceOptions
from splitserve.tools.trace import run_trace
from splitserve.tools.trace_check import TOLERANCE_MS, TOLERANCE_SHARE, CheckedRequest, check
from support.deployment import Deployment, deploy
from support.perfetto_trace import ReadTrace, perfetto_protos

pytestmark = pytest.mark.process

STAGES = {
    "client_network",
    "router_receive",
    "router_choose",
    "router_dispatch",
    "request_network",
    "tokenize",
    "handshake",
    "kv_wait",
    "prefill_chunk",
    "transfer",
    "metadata",
    "to_front_end",
    "detokenize",
    "router_forward",
    "decode",
}


@pytest.fixture(scope="module")
def deployment() -> Iterator[Deployment]:
    yield from deploy(chunk=256, max_total_tokens=12_000)


def excess(request: CheckedRequest) -> float:
    """Return by how much the unexplained time exceeds what `splitserve trace --check` allows, milliseconds.

    The measured TTFT of a late request is an upper bound.
    """
    assert request.ttft_ms is not None
    assert request.report is not None
    missing = request.ttft_ms - request.accounted_ms
    if request.is_late:
        missing = min(missing, 0.0)
    return max(abs(missing), request.report.unaccounted_ms) - max(TOLERANCE_MS, TOLERANCE_SHARE * request.ttft_ms)


def test_stages_add_up_to_the_time_that_clients_measure_under_load(deployment):
    checked = asyncio.run(check(deployment.url("disaggregated"), 12, 4))
    assert all(request.failure == "" and request.report is not None for request in checked)
    assert {request.rid: excess(request) for request in checked if excess(request) > 0} == {}
    assert sum(request.is_late for request in checked) <= len(checked) // 2
    assert {request.report.start for request in checked} == {"client"}
    for request in checked:
        assert request.report.ttft_ms == pytest.approx(
            sum(stage.exclusive_ms for stage in request.report.stages) + request.report.unaccounted_ms
        )
        assert {stage.name for stage in request.report.stages} >= STAGES


def test_a_request_that_a_stop_string_ends_has_all_its_stages(deployment):
    url = deployment.url("disaggregated")
    body = {"prompt": "The capital of France is", "max_tokens": 12, "temperature": 0}
    whole = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
    text = whole.json()["choices"][0]["text"]
    stopped = httpx.post(f"{url}/v1/completions", json={**body, "stop": text[len(text) // 2 :][:5]}, timeout=60)
    assert stopped.json()["choices"][0]["finish_reason"] == "stop"
    stages = [
        {stage["name"] for stage in httpx.get(f"{url}/v1/trace/{answer.headers['x-request-id']}").json()["stages"]}
        for answer in (whole, stopped)
    ]
    assert "decode" in stages[0]
    assert stages[0] == stages[1]


def test_the_parts_of_a_transfer_have_all_its_bytes(deployment):
    url = deployment.url("disaggregated")
    answer = httpx.post(
        f"{url}/generate",
        json={"input_ids": list(range(1000, 2000)), "sampling_params": {"max_new_tokens": 4, "temperature": 0}},
        timeout=60,
    )
    report = httpx.get(f"{url}/v1/trace/{answer.headers['x-request-id']}").json()
    chunks = [stage for stage in report["stages"] if stage["name"] == "prefill_chunk"]
    parts = [stage for stage in report["stages"] if stage["name"] == "transfer"]
    assert sum(chunk["attributes"]["tokens"] for chunk in chunks) == 1000
    # 4 chunks of 256 tokens at most, each sent while the next one computes.
    assert len(chunks) == len(parts) == 4
    # 30 layers, K and V, 3 heads of 64 values in 2 or 4 bytes, and the metadata row.
    num_bytes = sum(part["attributes"]["bytes"] for part in parts)
    assert any(0 < num_bytes - 1000 * 30 * 2 * 3 * 64 * size < 1 << 20 for size in (2, 4))
    assert parts[0]["attributes"]["exposed_ms"] <= parts[-1]["attributes"]["exposed_ms"]
    # The system decides whether tcp can write directly.
    [(backend, path)] = {(part["attributes"]["backend"], part["attributes"]["path"]) for part in parts}
    assert (backend, path in ("direct", "socket")) == ("tcp", True)


def test_a_rejected_request_has_a_trace_with_its_error(deployment):
    url = deployment.url("disaggregated")
    answer = httpx.post(f"{url}/generate", json={"rid": "too-long", "input_ids": [5] * 20_000})
    assert answer.status_code == 400
    report = httpx.get(f"{url}/v1/trace/too-long").json()
    assert (report["status"], report["ttft_ms"] is not None) == (400, True)
    assert report["error"] != ""
    assert report["error_message"] == answer.json()["error"]["message"]


def test_a_perfetto_trace_has_each_chunk_at_the_time_of_its_step(deployment, tmp_path):
    protos = perfetto_protos()
    url, path = deployment.url("disaggregated"), tmp_path / "requests.pftrace"
    body = {"input_ids": list(range(2000, 3000)), "sampling_params": {"max_new_tokens": 4, "temperature": 0}}
    rid = httpx.post(f"{url}/generate", json=body, timeout=60).headers["x-request-id"]
    assert run_trace(TraceOptions(url=url, rid=rid, perfetto=path)) == 0
    trace = ReadTrace(protos, path.read_bytes())
    chunks = [found for found in trace.slices if found[1] == "prefill_chunk"]
    assert len(chunks) == 4
    steps = {
        values["step"]: (begin, end)
        for place, _, begin, end, values in trace.slices
        if place.endswith("/steps") and place.startswith("prefill")
    }
    for _, _, begin, end, values in chunks:
        assert steps[values["step"]] == pytest.approx((begin, end), abs=5000)
    assert sum(end - begin for _, name, begin, end, _ in trace.slices if name == "transfer") > 0
    assert [len(ends) for ends in trace.flows.values()] == [2]
