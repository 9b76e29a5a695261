"""The routes beside generation: who is there, how they are, and what an operator may order."""

from __future__ import annotations

import json
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from yarl import URL

from splitserve.core.errors import WorkerUnavailableError
from splitserve.core.limits import LimitsConfig
from splitserve.core.request import DisaggregationMode
from splitserve.router import register
from splitserve.router.app import GENERATE_ROUTES
from splitserve.router.args import PrefillConfig
from splitserve.router.register import deregister_disaggregation_server, register_disaggregation_server
from splitserve.router.routes import WORKER_ROUTES
from support.router_world import Handler, answers, journals, never, serve_pools, start_router, start_worker

PREFILL, DECODE = DisaggregationMode.PREFILL, DisaggregationMode.DECODE


def port_of(url: str) -> int:
    return int(url.rsplit(":", 1)[1])


async def get(url: str) -> tuple[int, Any]:
    async with aiohttp.ClientSession() as client, client.get(url) as response:
        return response.status, await response.json(content_type=None)


async def post(url: str, body: Any) -> tuple[int, Any]:
    async with aiohttp.ClientSession() as client, client.post(url, json=body) as response:
        return response.status, await response.json()


@pytest.mark.parametrize("path", GENERATE_ROUTES)
async def test_without_workers_a_request_gets_503_and_the_kind_that_is_missing(path: str) -> None:
    async with (
        start_router() as router,
        aiohttp.ClientSession() as client,
        client.post(router + path, json={"text": "a"}) as response,
    ):
        assert response.status == 503
        assert response.headers["Retry-After"] == "1"
        assert "no prefill worker" in (await response.json())["error"]["message"]


async def test_workers_that_announce_themselves_are_used_until_they_leave() -> None:
    async with start_router() as router, start_worker(answers({})) as p, start_worker(answers({"text": "b"})) as d:
        await register_disaggregation_server(PREFILL, port_of(p.url), 8998, router)
        await register_disaggregation_server(DECODE, port_of(d.url), None, router)
        await register_disaggregation_server(DECODE, port_of(d.url), None, router)
        _, listed = await get(router + "/workers")
        assert [(w["url"], w["mode"], w["bootstrap_port"]) for w in listed["workers"]] == [
            (p.url, "prefill", 8998),
            (d.url, "decode", None),
        ]
        assert (await post(router + "/generate", {"text": "a"}))[0] == 200
        await deregister_disaggregation_server(DECODE, port_of(d.url), None, router)
        status, body = await post(router + "/generate", {"text": "a"})
        assert status == 503
        assert "no decode worker" in body["error"]["message"]


@pytest.mark.parametrize(("path", "method"), WORKER_ROUTES.items())
async def test_routes_of_workers_are_answered_with_the_workers(path: str, method: str) -> None:
    async def send() -> tuple[int, Any]:
        return await (get(router + path) if method == "GET" else post(router + path, {}))

    async with start_router() as router, start_worker(answers({})) as worker:
        status, body = await send()
        assert status == 404
        assert "none is registered" in body["error"]["message"]
        await register_disaggregation_server(DECODE, port_of(worker.url), None, router)
        status, body = await send()
        assert (status, body["error"]["code"]) == (404, "not_forwarded")
        assert f"send it to each worker ({worker.url}; GET /workers lists" in body["error"]["message"]
        assert path not in worker.paths


async def test_a_router_without_memory_of_its_workers_is_not_ready_and_has_the_reason() -> None:
    why = "memory released: POST /resume_memory_occupation to it"
    async with start_router() as router, start_worker(answers({})) as p, start_worker(answers({})) as d:
        await register_disaggregation_server(PREFILL, port_of(p.url), 8998, router)
        await register_disaggregation_server(DECODE, port_of(d.url), None, router)
        assert (await get(router + "/ready"))[0] == 200
        await deregister_disaggregation_server(DECODE, port_of(d.url), None, router, reason=why)
        status, body = await get(router + "/ready")
        assert status == 503
        assert f"no decode worker is registered (1 left: {why})" in body["error"]["message"]
        assert d.url not in body["error"]["message"]
        left = {"url": d.url, "mode": "decode", "reason": why}
        assert (await get(router + "/workers"))[1]["left"] == [left]
        status, body = await post(router + "/generate", {"text": "a"})
        message = body["error"]["message"]
        assert status == 503
        assert message.endswith("to it): retry when it is back; operators find its URL in GET /workers under left")
        assert d.url not in message
        await register_disaggregation_server(DECODE, port_of(d.url), None, router)
        assert (await get(router + "/ready"))[0] == 200


@pytest.mark.parametrize(
    "body",
    [
        {"mode": "prefill", "registry_url": "http://h:1"},
        {"mode": "decode", "registry_url": "http://h:1", "bootstrap_port": 1},
        {"mode": "both", "registry_url": "http://h:1"},
        {"mode": "decode", "registry_url": "nowhere"},
        {"mode": "decode"},
        [],
    ],
)
async def test_a_malformed_registration_is_refused(body: Any) -> None:
    async with start_router() as router:
        status, answer = await post(router + "/register", body)
        assert status == 400
        assert "cannot register" in answer["error"]["message"]


async def test_a_worker_that_serves_is_not_added_in_another_mode() -> None:
    async with start_worker(answers({})) as serving, start_router() as router:
        worker = {"mode": "decode", "registry_url": serving.url}
        assert (await post(router + "/register", worker))[0] == 200
        status, answer = await post(router + "/workers", {**worker, "mode": "null"})
        assert (status, answer["error"]["param"]) == (400, "mode")
        assert "POST /role" in answer["error"]["message"]
        assert (await get(router + "/workers"))[1]["workers"][0]["mode"] == "decode"


async def test_an_order_without_a_body_names_the_missing_field() -> None:
    async with start_router() as router, aiohttp.ClientSession() as session:
        for path in ("drain", "resume"):
            async with session.post(f"{router}/workers/{path}") as response:
                error = (await response.json())["error"]
                assert (response.status, error["param"]) == (400, "url")


async def test_registering_at_a_router_that_is_not_there_says_so() -> None:
    with pytest.raises(WorkerUnavailableError, match="does not answer"):
        await register_disaggregation_server(DECODE, 1, None, "http://127.0.0.1:9")


async def test_a_router_that_hangs_is_reported_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(register, "_TIMEOUT", aiohttp.ClientTimeout(total=0.05))
    async with start_worker(never()) as hung:
        with pytest.raises(WorkerUnavailableError, match=r"does not answer \(TimeoutError\)"):
            await register_disaggregation_server(DECODE, 1, None, hung.url)


async def test_a_router_before_colocated_workers_adds_what_a_second_try_needs_and_keeps_the_rest() -> None:
    seen: list[dict[str, Any]] = []

    async def handler(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        seen.append(body)
        return web.json_response({"text": "b"})

    raw = b'{ "text" :"a","x":1e3 }'
    async with start_worker(handler) as worker, start_router(workers=(worker.url,)) as router:
        async with aiohttp.ClientSession() as client, client.post(router + "/generate", data=raw) as response:
            assert await response.json() == {"text": "b"}
        (body,) = seen
        assert (body["text"], body["x"]) == ("a", 1e3)
        assert isinstance(body["sampling_params"]["seed"], int)
        assert body.keys() - {"text", "x"} == {"rid", "sampling_params", "dispatch"}


async def test_health_needs_no_worker_and_health_generate_a_path() -> None:
    async with start_router() as router:
        for path in ("/health", "/live"):
            async with aiohttp.ClientSession() as client, client.get(router + path) as response:
                assert response.status == 200
        for path in ("/health_generate", "/ready"):
            status, body = await get(router + path)
            assert (status, "no prefill worker is registered" in body["error"]["message"]) == (503, True)
    async with start_worker(answers({})) as good, start_worker(answers({}, 503)) as bad:
        async with start_router(workers=(good.url,)) as router:
            assert (await get(router + "/health_generate"))[0] == 200
        async with start_router(workers=(bad.url,)) as router:
            status, body = await get(router + "/health_generate")
            assert (status, "it generates nothing: 503" in body["error"]["message"]) == (503, True)


@pytest.mark.parametrize("path", ["/flush_cache", "/abort_request"])
async def test_orders_go_to_every_worker(path: str) -> None:
    async with start_worker(answers({})) as one, start_worker(answers({})) as two:
        async with start_router(workers=(one.url,), decode=(two.url,)) as router:
            assert (await post(router + path, {"rid": "r"}))[0] == 200
        assert one.paths == two.paths == [path]
        if path == "/abort_request":
            assert one.bodies == two.bodies == [{"rid": "r"}]


@pytest.mark.parametrize("body", [{}, {"rid": ""}, {"rid": 1}, {"rid": "r", "abort_all": 0}, {"rid": ["r"]}])
async def test_an_abort_that_workers_would_reject_is_a_400_and_not_sent(body: Any) -> None:
    async with start_worker(answers({})) as worker, start_router(workers=(worker.url,)) as router:
        status, answer = await post(router + "/abort_request", body)
        assert (status, answer["error"]["type"]) == (400, "invalid_request_error")
        assert worker.paths == []


@pytest.mark.parametrize("path", ["/get_model_info", "/model_info", "/v1/models"])
async def test_questions_about_the_model_are_answered_by_a_worker(path: str) -> None:
    async with start_worker(answers({"model_path": "m"})) as worker, start_router(decode=(worker.url,)) as router:
        assert await get(router + path) == (200, {"model_path": "m"})
        assert worker.paths == [path]


@pytest.mark.parametrize(
    ("path", "sent"),
    [
        ("/v1/models/tiny", "/v1/models/tiny"),
        ("/v1/models/org/tiny", "/v1/models/org%2Ftiny"),
        ("/v1/models/org%2Ftiny", "/v1/models/org%2Ftiny"),
        ("/v1/models/a%20b%3Fc%0D", "/v1/models/a%20b%3Fc%0D"),
        ("/v1/models/..%2Fworkers", "/v1/models/..%2Fworkers"),
    ],
)
@pytest.mark.parametrize("status", [200, 404])
async def test_a_model_is_described_by_a_worker_with_its_status(path: str, sent: str, status: int) -> None:
    raw_paths: list[str] = []

    async def handler(request: web.Request, _: dict[str, Any]) -> web.StreamResponse:
        raw_paths.append(request.raw_path)
        return web.json_response({"id": "tiny"}, status=status)

    async with (
        start_worker(handler) as worker,
        start_router(decode=(worker.url,)) as router,
        aiohttp.ClientSession() as client,
        client.get(URL(router + path, encoded=True)) as response,
    ):
        assert (response.status, await response.json()) == (status, {"id": "tiny"})
    assert raw_paths == [sent]


async def test_the_options_alone_limit_the_samples_of_a_pair() -> None:
    body = {"prompt": ["a"] * 50, "n": 100}
    limits = LimitsConfig(max_samples=5000)
    async with serve_pools([answers({})], [answers({})], limits=limits) as pools:
        assert (await pools.post("/v1/completions", body))[0] == 200
        assert len(pools.decode[0].bodies[0]["bootstrap_room"]) == 5000
        assert (await pools.post("/v1/completions", body | {"n": 101}))[0] == 400
        assert len(pools.decode[0].bodies) == 1


@pytest.mark.parametrize(("rid", "name"), [({"rid": "mine"}, "request mine (stage: validation): "), ({}, "request ")])
async def test_a_clients_own_room_out_of_range_is_rejected(rid: dict[str, Any], name: str) -> None:
    async with serve_pools([answers({})], [answers({})]) as pools:
        status, raw = await pools.post("/generate", {"text": "a", "bootstrap_room": -10} | rid)
        error = json.loads(raw)["error"]
        assert (status, error["param"]) == (400, "bootstrap_room")
        assert error["message"].startswith(name)
        assert error["message"].endswith(": bootstrap_room -10: must be an integer in [0, 2^63)")
        assert not pools.decode[0].bodies


async def test_media_are_rejected_before_a_worker_gets_the_request() -> None:
    async with serve_pools([answers({})], [answers({})]) as pools:
        status, raw = await pools.post("/generate", {"text": "a", "image_data": ["http://x"]})
        assert (status, json.loads(raw)["error"]["param"]) == (400, "image_data")
        assert not pools.decode[0].bodies
        body = {"text": "a", "image_data": None, "video_data": [], "modalities": ["text"]}
        assert (await pools.post("/generate", body))[0] == 200


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize", "/v1/tokenize", "/v1/detokenize"])
async def test_tokenizing_passes_through_with_its_status(path: str) -> None:
    async with start_worker(answers({"error": {}}, 422)) as worker, start_router(decode=(worker.url,)) as router:
        assert await post(router + path, {"prompt": "a"}) == (422, {"error": {}})
        assert worker.bodies == [{"prompt": "a"}]


@pytest.mark.parametrize("path", ["/server_info", "/get_server_info"])
async def test_server_info_collects_what_the_workers_say(path: str) -> None:
    async with start_worker(answers({"tp_size": 1})) as worker, start_router(decode=(worker.url,)) as router:
        _, info = await get(router + path)
        assert info["decode"] == [{"url": worker.url, "tp_size": 1}]
        assert info["prefill"] == []
        assert info["internal_states"] == []


async def test_server_info_merges_the_schedulers_of_all_workers_those_that_generate_first() -> None:
    def reports(*rates: float) -> Handler:
        states = [{"last_gen_throughput": rate} for rate in rates]
        return answers({"tokenizer_path": "/models/m", "internal_states": states})

    async with (
        start_worker(reports(0.0)) as prefill,
        start_worker(reports(5.0, 6.0)) as decode,
        start_router(prefill=(PrefillConfig(prefill.url, 1),), decode=(decode.url,)) as router,
    ):
        _, info = await get(router + "/get_server_info")
        assert [state["last_gen_throughput"] for state in info["internal_states"]] == [5.0, 6.0, 0.0]
        assert info["tokenizer_path"] == "/models/m"


async def test_metrics_count_requests_errors_and_workers() -> None:
    async with start_worker(answers({"text": "b"})) as worker, start_router(workers=(worker.url,)) as router:
        await post(router + "/generate", {"text": "a"})
        async with aiohttp.ClientSession() as client:
            async with client.post(router + "/generate", data=b"{") as response:
                assert response.status == 400
            async with client.get(router + "/metrics") as response:
                text = await response.text()
    assert 'splitserve_router:requests_total{route="/generate"} 2.0' in text
    assert 'splitserve_router:errors_total{route="/generate",side="client",status="400"} 1.0' in text
    assert 'splitserve_router:workers{healthy="true",mode="null"} 1.0' in text
    assert 'splitserve_router:request_duration_seconds_count{route="/generate"} 2.0' in text


async def test_a_worker_that_is_not_ready_gets_nothing_and_comes_back_by_itself() -> None:
    async with start_worker(answers({"text": "b"})) as worker:
        worker.health_status = 503
        async with start_router(workers=(worker.url,), health_interval=0.01) as router:
            while (await get(router + "/workers"))[1]["workers"][0]["healthy"]:
                pass
            assert (await post(router + "/generate", {"text": "a"}))[0] == 503
            worker.health_status = 200
            while not (await get(router + "/workers"))[1]["workers"][0]["healthy"]:
                pass
            assert (await post(router + "/generate", {"text": "a"}))[0] == 200


async def test_unknown_routes_are_404_as_json() -> None:
    async with start_router() as router:
        status, body = await get(router + "/nowhere")
        assert status == 404
        assert json.dumps(body)


async def test_an_operator_adds_drains_resumes_and_removes_workers() -> None:
    async with (
        start_router(health_interval=60) as router,
        start_worker(answers({})) as p,
        start_worker(answers({"text": "b"})) as d,
    ):
        await post(router + "/workers", {"mode": "prefill", "registry_url": p.url, "bootstrap_port": 8998})
        assert (await post(router + "/workers", {"mode": "decode", "registry_url": d.url}))[0] == 200
        assert (await post(router + "/generate", {"text": "a"}))[0] == 200
        status, body = await post(router + "/workers/drain", {"url": d.url})
        assert (status, "send force: true" in body["error"]["message"]) == (503, True)
        assert (await post(router + "/generate", {"text": "a"}))[0] == 200
        status, drained = await post(router + "/workers/drain", {"url": d.url, "force": True})
        assert (status, drained["draining"], drained["num_running"]) == (200, True, 0)
        # Announcing itself does not end it.
        await register_disaggregation_server(DECODE, port_of(d.url), None, router)
        status, body = await post(router + "/generate", {"text": "a"})
        assert status == 503
        assert body["error"]["message"].endswith(
            "none of the 1 decode worker(s) answers or takes requests (1 draining): retry in a moment; operators end a "
            "drain with POST /workers/resume, or splitserve cluster resume"
        )
        assert (await post(router + "/workers/resume", {"url": d.url}))[1]["draining"] is False
        assert (await post(router + "/generate", {"text": "a"}))[0] == 200
        async with aiohttp.ClientSession() as client:
            async with client.delete(router + "/workers", params={"url": d.url}) as response:
                assert response.status == 200
            async with client.delete(router + "/workers", params={"url": d.url}) as response:
                assert response.status == 404
        assert [w["url"] for w in (await get(router + "/workers"))[1]["workers"]] == [p.url]


async def test_a_worker_that_an_operator_resumes_is_trusted_again_at_once() -> None:
    failing = answers({"error": {"message": "broken", "type": "server_error", "code": "engine_error"}}, 500)
    async with serve_pools([answers({})], [failing, answers({"text": "b"})], health_interval=60) as pools:
        broken = pools.decode[0]
        for _ in range(6):
            assert (await pools.post("/generate", {"text": "a"}))[0] == 200
        # It failed, and failed again on trial.
        assert len(broken.bodies) == 2
        await post(pools.router + "/workers/resume", {"url": broken.url})
        for _ in range(6):
            assert (await pools.post("/generate", {"text": "a"}))[0] == 200
        assert len(broken.bodies) == 4


async def test_a_drain_with_migration_moves_streams_and_is_refused_where_they_can_go_nowhere() -> None:
    decodes = [journals(5, until=2, hang=True), journals(5)]
    async with serve_pools([answers({})], decodes, max_retries=0) as pools:
        first, second = (d.url for d in pools.decode)
        async with pools.client.post(pools.router + "/generate", json={"text": "a", "stream": True}) as response:
            got = await response.content.readuntil(b'{"i": 1}\n\n')
            status, _ = await post(pools.router + "/workers/drain", {"url": first, "migrate": True})
            assert status == 200
            got += await response.read()
        assert got == b"".join(b'data: {"i": %d}\n\n' % i for i in range(5)) + b"data: [DONE]\n\n"
        status, body = await post(pools.router + "/workers/drain", {"url": second, "migrate": True})
        assert (status, "no other decode worker" in body["error"]["message"]) == (503, True)


@pytest.mark.parametrize(
    ("path", "status", "code", "says"),
    [
        ("/v1/responses", 404, "not_found", "there is no such route; GET /docs lists all routes"),
        ("/v1/chat/completion", 404, "not_found", "did you mean /v1/chat/completions? GET /docs lists"),
        ("/v1/embeddings", 404, "not_found", "there is no such route; GET /docs lists all routes"),
        ("/v1/tokenizer", 404, "not_found", "did you mean /v1/tokenize?"),
        ("/v1/completions", 405, "method_not_supported", "the route has no such method: use POST"),
    ],
)
async def test_a_route_or_method_that_is_not_there_is_an_error_in_openais_shape(
    path: str, status: int, code: str, says: str
) -> None:
    async with start_router() as router:
        answered, body = await get(router + path)
    assert answered == status
    assert body["error"]["code"] == code
    assert f"GET {path}: " in body["error"]["message"]
    assert says in body["error"]["message"]


@pytest.mark.parametrize(
    ("method", "path", "allowed"), [("PUT", "/workers", "DELETE, GET, POST"), ("DELETE", "/v1/trace/mine", "GET")]
)
async def test_a_405_names_the_methods_of_all_routes_of_its_path(method: str, path: str, allowed: str) -> None:
    async with (
        start_router() as router,
        aiohttp.ClientSession() as client,
        client.request(method, router + path) as response,
    ):
        assert (response.status, response.headers.getall("allow")) == (405, [allowed])
        assert f"use {allowed}" in (await response.json())["error"]["message"]


@pytest.mark.parametrize(
    ("body", "rid", "problem"),
    [
        (b"{", "trace-of-client", "the body is not valid JSON"),
        (b"", "trace-of-client", "the body is empty"),
        (b'{"rid": "mine", "n": 1000}', "mine", "n is 1000: at most 128 samples of a prompt are generated (--max-n)"),
        (b'{"rid": ["a", "b"], "stop": ["x"], "bootstrap_room": -1}', "a,b", "bootstrap_room -1"),
    ],
)
async def test_an_error_of_the_router_begins_with_the_request_and_the_stage(
    body: bytes, rid: str, problem: str
) -> None:
    async with start_router() as router, aiohttp.ClientSession() as client:
        headers = {"x-request-id": "trace-of-client"}
        async with client.post(f"{router}/v1/completions", data=body, headers=headers) as response:
            error = (await response.json())["error"]
    assert response.status == 400
    assert error["message"].startswith(f"request {rid} (stage: validation): {problem}")


async def test_steps_of_a_worker_are_passed_on() -> None:
    page = {"clock": {"monotonic": 1.0, "unix": 2.0}, "steps": [{"number": 4}]}
    async with start_worker(answers(page)) as p, start_router(prefill=(PrefillConfig(p.url, 8998),)) as router:
        query = f"?worker={p.url}&since=3&limit=1&other=1"
        assert await get(f"{router}/v1/steps{query}") == (200, page)
        assert p.paths[-1] == "/v1/steps"
        assert (await get(f"{router}/v1/steps"))[0] == 400
        assert (await get(f"{router}/v1/steps?worker=http://127.0.0.1:1"))[0] == 404


async def test_a_worker_that_refuses_to_list_its_steps_is_quoted() -> None:
    refusal = {"error": {"message": "dp_rank '9': this worker has the ranks 0 to 0"}}
    async with (
        start_worker(answers(refusal, status=400)) as p,
        start_router(prefill=(PrefillConfig(p.url, 8998),)) as router,
    ):
        status, body = await get(f"{router}/v1/steps?worker={p.url}&dp_rank=9")
        assert (status, body["error"]["message"]) == (400, refusal["error"]["message"])
