from __future__ import annotations

import asyncio
import os

import httpx
import msgspec
import pytest

from splitserve.api.samples import fan_out
from splitserve.api.tokenizer import Tokenizer
from splitserve.core.config import WorkerConfig
from splitserve.core.errors import EngineError, WorkerUnavailableError
from splitserve.core.kv_events import KVEventsConfig
from splitserve.core.messages import GenerateRequest
from splitserve.core.options import replaced
from splitserve.core.request import DisaggregationMode
from splitserve.core.sampling import ResolvedSampling
from splitserve.core.steps import MAX_STEPS, ClockReading, StepPage, StepRecord, WaitReason
from splitserve.server import admin
from splitserve.server.app import build_app
from splitserve.server.front_end import FrontEnd, RoleChange, RoleReport
from splitserve.server.generation import Generation
from splitserve.server.scheduler_client import SchedulerClient
from splitserve.server.scheduler_group import SchedulerGroup

from .conftest import DEADLINE, StartWorker, Worker
from .server_fakes import EchoScheduler


async def test_a_worker_is_healthy_once_its_scheduler_is_ready(
    client: SchedulerClient, scheduler: EchoScheduler, tokenizer: Tokenizer
) -> None:
    app = build_app(config=WorkerConfig(), scheduler=SchedulerGroup([client]), tokenizer=tokenizer, model_path="/m")
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://worker") as http:
        for path in ("/health", "/health_generate", "/server_info", "/model_info", "/get_load"):
            response = await http.get(path)
            assert response.status_code == 503, path
            assert "loading" in response.json()["error"]["message"]
        assert (await http.post("/generate", json={"text": "a"})).status_code == 503
        for path in ("/live", "/metrics"):
            assert (await http.get(path)).status_code == 200
        await scheduler.start()
        await client.ready(DEADLINE)
        assert (await http.get("/health")).status_code == 200


@pytest.mark.parametrize("urls", [(), ("http://r:8000",)])
@pytest.mark.parametrize("path", ["/v1/live", "/v1/charts", "/v1/traces", "/v1/trace/a/b"])
async def test_routes_of_routers_are_answered_with_the_router(worker: Worker, path: str, urls: tuple[str, ...]) -> None:
    front = worker.front
    front.config = replaced(front.config, {"server.router_urls": urls})
    response = await worker.http.get(path)
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (404, "only_at_router")
    known = " (http://r:8000)" if urls else ""
    assert error["message"].endswith(f"this is a worker: give the URL of its router{known}")


async def test_a_dead_scheduler_makes_the_worker_unhealthy_with_the_reason(worker: Worker) -> None:
    group = worker.front.scheduler
    assert isinstance(group, SchedulerGroup)
    group.fail_all(EngineError("the scheduler process ended with code -9"))
    for path in ("/health", "/live"):
        response = await worker.http.get(path)
        assert response.status_code == 503
        assert "code -9" in response.json()["error"]["message"]
    assert (await worker.http.post("/generate", json={"text": "a"})).status_code == 503


@pytest.mark.parametrize("mode", ["null", "prefill", "decode"])
async def test_health_generate_makes_one_token_in_every_role(start_worker: StartWorker, mode: str) -> None:
    async with start_worker(mode) as worker:
        assert (await worker.http.get("/health_generate")).status_code == 200
        (request,) = worker.scheduler.received
        assert request.params.max_new_tokens == 1
        assert (None if request.bootstrap is None else request.bootstrap.host) == (
            None if mode == "null" else "2.2.2.2"
        )


async def test_health_generate_has_a_deadline(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admin, "HEALTH_DEADLINE", 0.01)
    worker.scheduler.hold_after = 0
    response = await worker.http.get("/health_generate")
    assert response.status_code == 503
    assert "no token within 0.01 s" in response.json()["error"]["message"]
    assert (await asyncio.wait_for(worker.scheduler.aborts.get(), DEADLINE)).quiet


@pytest.mark.parametrize("path", ["/server_info", "/get_server_info"])
async def test_server_info_says_what_this_worker_is(
    start_worker: StartWorker, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with start_worker("prefill", bootstrap_port=4711) as worker:
        info = (await worker.http.get(path)).json()
        assert info["served_model_name"] == "tiny"
        assert (info["disaggregation_mode"], info["disaggregation_bootstrap_port"]) == ("prefill", 4711)
        assert (info["max_total_num_tokens"], info["max_req_input_len"], info["context_length"]) == (1024, 255, 256)
        assert (info["pid"], info["status"], info["kv_events"]) == (os.getpid(), "ready", None)
        (state,) = info["internal_states"]
        assert (state["pages_free"], state["dp_size"], state["memory_usage"]) == (32, 1, {"token_capacity": 1024})
        assert (state["last_gen_throughput"], state["avg_spec_accept_length"]) == (12.5, None)
        assert state["effective_max_running_requests_per_dp"] > 0
        assert info["tokenizer_path"] == "/models/tiny"
        assert info["quantization"] is None
        quantized = msgspec.structs.replace(worker.front.info, weights_quantization="awq")
        monkeypatch.setattr(type(worker.front.scheduler), "info", quantized)
        assert (await worker.http.get(path)).json()["quantization"] == "awq"
        limits = {"max_messages": 4096, "max_request_bytes": 1 << 20, "grammar_step_budget": 0.25}
        assert limits.items() <= info["limits"].items()


@pytest.mark.parametrize("path", ["/model_info", "/get_model_info"])
async def test_model_info_names_the_model(worker: Worker, path: str) -> None:
    info = (await worker.http.get(path)).json()
    assert (info["model_path"], info["is_generation"]) == ("/models/tiny", True)
    # SGLang's clients read these. Also of a multimodal model only the text model is served.
    assert (info["has_image_understanding"], info["has_audio_understanding"]) == (False, False)


@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_the_cache_can_be_flushed(worker: Worker, method: str) -> None:
    response = await worker.http.request(method, "/flush_cache")
    assert response.json() == {"success": True, "num_pages_freed": 7}


async def test_load_comes_in_both_forms(worker: Worker) -> None:
    assert (await worker.http.get("/get_load")).json() == [
        {"dp_rank": 0, "num_reqs": 1, "num_waiting_reqs": 1, "num_tokens": 99}
    ]
    (load,) = (await worker.http.get("/v1/loads")).json()["loads"]
    assert (load["num_running_reqs"], load["num_used_tokens"], load["token_usage"]) == (0, 99, 0.25)
    assert load["num_tokens_pre_allocated"] == 48


async def test_draining_lets_running_requests_finish_and_refuses_new_ones(live_worker: Worker) -> None:
    worker = live_worker
    worker.scheduler.hold_after = 1
    async with worker.http.stream("POST", "/generate", json={"text": "abc", "stream": True, "rid": "r"}) as running:
        lines = running.aiter_lines()
        await anext(lines)
        worker.front.requests.is_draining = True
        response = await worker.http.post("/generate", json={"text": "a"})
        assert (response.status_code, response.headers["retry-after"]) == (503, "1")
        error = response.json()["error"]
        assert ("is draining" in error["message"], error["code"]) == (True, "worker_draining")
        assert (await worker.http.get("/health")).status_code == 503
        assert (await worker.http.get("/live")).status_code == 200
        assert (await worker.http.get("/server_info")).json()["status"] == "draining"
        assert not await worker.front.requests.wait_idle(0.001)
        worker.front.scheduler.abort("r")
        assert [line async for line in lines][-2] == "data: [DONE]"
    assert await worker.front.requests.wait_idle(DEADLINE)


async def test_metrics_show_latencies_and_the_schedulers_queues(worker: Worker) -> None:
    await worker.http.post("/generate", json={"text": "abc", "sampling_params": {"max_new_tokens": 4}})
    text = (await worker.http.get("/metrics")).text
    assert 'splitserve:time_to_first_token_seconds_count{model_name="tiny"} 1.0' in text
    assert 'splitserve:request_queue_time_seconds_sum{model_name="tiny"} 0.25' in text
    assert 'splitserve:generation_tokens_total{model_name="tiny"} 4.0' in text
    assert 'splitserve:num_requests_waiting{dp_rank="0",model_name="tiny"} 1.0' in text


async def test_metrics_fall_back_to_the_last_snapshot(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    await worker.http.get("/metrics")
    states = worker.front.scheduler.states
    monkeypatch.setattr(worker.front.scheduler, "states", lambda timeout: states(0.01))
    worker.scheduler.answers_calls = False
    response = await worker.http.get("/metrics")
    assert "splitserve:num_requests_waiting" in response.text


async def test_text_is_tokenized_and_back(worker: Worker) -> None:
    tokens = worker.front.tokenizer.encode("a🙂")
    reply = (await worker.http.post("/tokenize", json={"prompt": "a🙂"})).json()
    assert reply == {"tokens": tokens, "count": 5, "max_model_len": 256}
    reply = (await worker.http.post("/tokenize", json={"prompt": ["a", "bc"]})).json()
    assert reply["count"] == [1, 2]
    chat = (await worker.http.post("/tokenize", json={"messages": [{"role": "user", "content": "a"}]})).json()
    assert chat["tokens"][0] == 256
    assert (await worker.http.post("/detokenize", json={"tokens": tokens})).json() == {"text": "a🙂"}
    assert (await worker.http.post("/detokenize", json={"tokens": [[65], [66]]})).json()["text"] == [
        worker.front.tokenizer.decode([65]),
        worker.front.tokenizer.decode([66]),
    ]
    assert (await worker.http.post("/detokenize", json={"tokens": [999]})).status_code == 400


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"text": "a"}, "the body has neither prompt nor messages: send one of them"),
        ({"prompt": "a", "messages": []}, "prompt and messages exclude each other: send one of them"),
    ],
)
async def test_a_body_to_tokenize_has_either_a_prompt_or_messages(
    worker: Worker, body: dict[str, object], message: str
) -> None:
    response = await worker.http.post("/tokenize", json=body)
    assert (response.status_code, response.json()["error"]["message"]) == (400, message)


async def test_kv_events_are_described_and_their_whole_index_is_passed_on(
    start_worker: StartWorker, scheduler: EchoScheduler
) -> None:
    scheduler.kv_index = b'{"next_sequence":3,"ts":1.5,"events":[]}'
    scheduler.ready = msgspec.structs.replace(
        scheduler.ready, kv_events_endpoints=["tcp://*:5557"], kv_replay_endpoints=["tcp://*:5600"]
    )
    async with start_worker(kv_events=KVEventsConfig(publisher="zmq", topic="kv@pod@tiny")) as worker:
        assert (await worker.http.get("/server_info")).json()["kv_events"] == {
            "publisher": "zmq",
            "endpoint_host": "*",
            "endpoint_port_base": 5557,
            "topic": "kv@pod@tiny",
            "block_size": 16,
            "dp_size": 1,
            "replay_endpoint_port_base": 5600,
            "publishers": [{"dp_rank": 0, "endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5600"}],
        }
        for path in ("/kv_index", "/kv_index?dp_rank=0"):
            assert (await worker.http.get(path)).json() == {"next_sequence": 3, "ts": 1.5, "events": []}
        for rank in ("1", "-1", "first"):
            response = await worker.http.get(f"/kv_index?dp_rank={rank}")
            assert response.status_code == 400
            assert "ranks 0 to 0" in response.json()["error"]["message"]


async def test_a_worker_that_tells_nothing_has_no_index_to_ask_for(worker: Worker) -> None:
    response = await worker.http.get("/kv_index")
    assert response.status_code == 400
    assert "--kv-events-config" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("endpoints", "base"),
    [
        (["tcp://*:7000", "tcp://*:7001"], ("*", 7000)),
        (["tcp://10.0.0.1:7000", "tcp://10.0.0.1:7005"], ("10.0.0.1", None)),
        (["ipc:///tmp/kv", "ipc:///tmp/kv_dp1"], (None, None)),
        (["", ""], (None, None)),
    ],
)
def test_ports_are_counted_up_from_a_base_only_where_they_are(endpoints: list[str], base: tuple[str, int]) -> None:
    assert admin._base_of(endpoints) == base


class FakeSwitch:
    """What a worker does with an order for another role."""

    def __init__(self, front: FrontEnd) -> None:
        self.orders: list[RoleChange] = []
        self._front = front

    async def switch(self, order: RoleChange) -> RoleReport:
        old = self._front.mode
        self.orders.append(order)
        settings = msgspec.structs.replace(self._front.config.disaggregation, mode=order.mode)
        self._front.take_role(settings, order.bootstrap_port or 8998)
        return RoleReport(old, order.mode, 0.25)


async def test_an_operator_orders_another_role_and_reads_what_it_is(worker: Worker) -> None:
    assert (await worker.http.post("/role", json={"role": "decode"})).status_code == 503
    switch = FakeSwitch(worker.front)
    worker.front.switch_role = switch.switch
    assert (await worker.http.get("/role")).json() == {"role": "null", "switching_to": None, "bootstrap_port": None}
    body = {"role": "prefill", "drain": "migrate", "timeout": 5, "bootstrap_port": 7000}
    answer = (await worker.http.post("/role", json=body)).json()
    assert answer == {
        "role": "prefill",
        "old_role": "null",
        "switching_to": None,
        "bootstrap_port": 7000,
        "seconds": 0.25,
    }
    assert switch.orders == [RoleChange(DisaggregationMode.PREFILL, True, 5.0, 7000)]
    info = (await worker.http.get("/server_info")).json()
    assert (info["disaggregation_mode"], info["disaggregation_bootstrap_port"]) == ("prefill", 7000)
    assert info["status"] == "ready"
    worker.front.requests.is_draining = True
    worker.front.switching_to = DisaggregationMode.NULL
    assert (await worker.http.get("/server_info")).json()["status"] == "switching"
    assert "changing its role" in (await worker.http.get("/health")).json()["error"]["message"]
    assert (await worker.http.get("/live")).status_code == 200


async def test_an_order_for_the_current_role_is_no_switch_even_if_the_role_is_fixed(worker: Worker) -> None:
    assert worker.front.switch_role is None
    response = await worker.http.post("/role", json={"role": "null"})
    assert (response.status_code, response.json()["old_role"], response.json()["seconds"]) == (200, "null", 0.0)
    switch = FakeSwitch(worker.front)
    worker.front.switch_role = switch.switch
    assert (await worker.http.post("/role", json={"role": "null"})).status_code == 200
    assert switch.orders == []


@pytest.mark.parametrize(
    "wrong", [{"role": "both"}, {"drain": "now"}, {"timeout": 0}, {"timeout": 1e9}, {"bootstrap_port": 1 << 16}]
)
async def test_an_order_that_makes_no_sense_is_refused(worker: Worker, wrong: dict[str, object]) -> None:
    switch = FakeSwitch(worker.front)
    worker.front.switch_role = switch.switch
    response = await worker.http.post("/role", json={"role": "decode", **wrong})
    assert (response.status_code, response.json()["error"]["param"]) == (400, next(iter(wrong)))
    assert switch.orders == []


@pytest.mark.parametrize("path", ["/generate", "/v1/completions", "/v1/chat/completions"])
async def test_a_request_for_the_role_it_had_a_moment_ago_is_sent_away(worker: Worker, path: str) -> None:
    body = {"text": "a", "prompt": "a", "messages": [{"role": "user", "content": "a"}]}
    for role, status in (("decode", 503), ("null", 200)):
        response = await worker.http.post(path, json=body, headers={"x-splitserve-role": role})
        assert response.status_code == status
        assert status == 200 or response.json()["error"]["code"] == "worker_draining"
    assert len(worker.scheduler.received) == 1


async def test_a_request_that_was_prepared_for_another_role_does_not_reach_the_scheduler(worker: Worker) -> None:
    spec = GenerateRequest(rid="", prompt_ids=[1], params=ResolvedSampling(max_new_tokens=1))
    generation = Generation(worker.front, fan_out([spec], 1, "r", [None]), 0.0)
    await FakeSwitch(worker.front).switch(RoleChange(DisaggregationMode.DECODE))
    with pytest.raises(WorkerUnavailableError, match="decode worker now"):
        await generation.complete()
    assert worker.scheduler.received == []


async def test_steps_are_listed_with_the_clock_of_their_times(worker: Worker, scheduler: EchoScheduler) -> None:
    record = StepRecord(
        number=8,
        start=1.0,
        end=1.5,
        kind="mixed",
        num_requests=2,
        num_decodes=1,
        num_prompt_tokens=64,
        chunk_limit=64,
        num_running=2,
        num_waiting=1,
        reason=WaitReason.BUDGET,
        rids=["a", "b"],
    )
    scheduler.steps = StepPage(ClockReading(2.0, 1e9), [record])
    answer = (await worker.http.get("/v1/steps?since=7&limit=99999")).json()
    assert answer == {"clock": {"monotonic": 2.0, "unix": 1e9}, "steps": [msgspec.to_builtins(record)]}
    await worker.http.get("/v1/steps")
    assert scheduler.asked_steps == [(7, MAX_STEPS), (None, 1000)]
    assert (await worker.http.get(f"/v1/steps?since={10**30}")).json()["error"]["param"] == "since"
    refused = await worker.http.get("/v1/steps?dp_rank=1")
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "dp_rank")
