"""GET /metrics of the router: rejections, stages and exemplars, and the metrics of all workers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from prometheus_client.openmetrics.parser import text_string_to_metric_families as open_metrics_families
from prometheus_client.parser import text_string_to_metric_families

from splitserve.observe.worker_metrics import WorkerMetrics
from support.router_world import Handler, answers, start_router, start_worker

OPEN_METRICS = "application/openmetrics-text; version=1.0.0"
TRACE_ID = "0af7651916cd43dd8448eb211c80319c"


def scraped() -> Handler:
    """Return a handler of a worker that has metrics."""

    async def handler(request: web.Request, _: dict[str, Any]) -> web.StreamResponse:
        metrics = WorkerMetrics("m")
        metrics.observe_tokens(5, None)
        text = metrics.render(request.headers.get("accept"))
        return web.Response(body=text.content, headers={"content-type": text.content_type})

    return handler


async def read(url: str, accept: str = "") -> str:
    async with (
        aiohttp.ClientSession() as client,
        client.get(url + "/metrics", headers={"accept": accept} if accept else {}) as response,
    ):
        return await response.text()


@pytest.mark.parametrize("accept", ["", OPEN_METRICS])
async def test_the_metrics_of_all_workers_are_included_on_request(accept: str) -> None:
    parse = open_metrics_families if accept else text_string_to_metric_families
    async with start_worker(scraped()) as first, start_worker(scraped()) as second:
        async with start_router(workers=(first.url, second.url)) as router:
            assert "splitserve:" not in await read(router, accept)
        async with start_router(workers=(first.url, second.url), metrics_include_workers=True) as router:
            text = await read(router, accept)
    samples = [sample for family in parse(text) for sample in family.samples]
    found = {s.labels["worker"]: s.value for s in samples if s.name == "splitserve:generation_tokens_total"}
    assert found == {first.url: 5.0, second.url: 5.0}
    assert any(s.name == "splitserve_router:workers" for s in samples)


async def test_a_worker_without_metrics_is_counted_and_the_others_are_included() -> None:
    async with (
        start_worker(scraped()) as good,
        start_worker(answers({}, status=500)) as bad,
        start_router(workers=(good.url, bad.url), metrics_include_workers=True) as router,
    ):
        text = await read(router)
    assert f'splitserve:generation_tokens_total{{worker="{good.url}",model_name="m"}} 5.0' in text
    assert "splitserve_router:worker_scrapes_failed_total 1.0" in text


async def test_rejections_of_the_router_have_a_reason() -> None:
    async with start_router(workers=()) as router, aiohttp.ClientSession() as client:
        for data in (b"{", b'{"text": "a"}'):
            async with client.post(router + "/generate", data=data):
                pass
        text = await read(router)
    assert 'splitserve_router:rejections_total{reason="invalid_request"} 1.0' in text
    assert 'splitserve_router:rejections_total{reason="worker_unavailable"} 1.0' in text
    assert 'splitserve_router:queue_oldest_seconds{queue="admission"} 0.0' in text


async def test_bodies_that_are_too_large_have_a_reason_too() -> None:
    async with start_router(workers=()) as router, aiohttp.ClientSession() as client:
        headers = {"content-length": str(1 << 40)}
        request = client.post(router + "/generate", data=b"", headers=headers)
        async with request as response:
            assert response.status == 413
        text = await read(router)
    assert 'splitserve_router:rejections_total{reason="request_too_large"} 1.0' in text


async def test_latencies_have_the_trace_of_a_request_as_exemplar() -> None:
    async with start_worker(answers({"text": "b"})) as worker, start_router(workers=(worker.url,)) as router:
        headers = {"traceparent": f"00-{TRACE_ID}-00f067aa0ba902b7-01"}
        async with (
            aiohttp.ClientSession(headers=headers) as client,
            client.post(router + "/generate", json={"text": "a"}) as response,
        ):
            assert response.status == 200
        text = await read(router, OPEN_METRICS)
    samples = [sample for family in open_metrics_families(text) for sample in family.samples]
    for name in ("request_duration_seconds", "time_to_first_token_seconds"):
        exemplars = [s.exemplar for s in samples if s.name == f"splitserve_router:{name}_bucket" and s.exemplar]
        assert [e.labels for e in exemplars] == [{"trace_id": TRACE_ID}]
    stages = {s.labels["stage"] for s in samples if s.name == "splitserve_router:request_stage_seconds_count"}
    assert stages == {"router_receive", "router_queue", "router_choose", "router_dispatch", "router_forward"}


async def test_addresses_of_workers_need_the_key_of_an_operator(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("operator-key-0123456789 op")
    keys.chmod(0o600)
    async with start_router(operator_key_file=keys) as router:
        assert "splitserve_router:workers" in await read(router)
    async with start_router(operator_key_file=keys, metrics_include_workers=True) as router:
        assert "splitserve_router:workers" not in await read(router)
