"""Routes of a worker's memory: bodies in, orders and SGLang's answers out."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pytest

from splitserve.core.errors import MemoryBlockedError
from splitserve.core.memory import MemoryTag, WeightsSource
from splitserve.server.memory import RunningRequests

from .conftest import StartWorker, Worker

ALL = frozenset(MemoryTag)


class RecordingMemory:
    """MemoryControl that records its orders."""

    def __init__(self) -> None:
        self.released: frozenset[MemoryTag] = frozenset()
        self.orders: list[tuple[Any, ...]] = []

    async def release(self, tags: Collection[MemoryTag], running: RunningRequests) -> None:
        if not (running.abort or running.drain):
            raise MemoryBlockedError("3 requests are running on this worker")
        self.orders.append(("release", tags, running))
        self.released |= frozenset(tags)

    async def resume(self, tags: Collection[MemoryTag]) -> None:
        self.orders.append(("resume", tags))
        self.released -= frozenset(tags)

    async def update(self, source: WeightsSource, running: RunningRequests) -> None:
        self.orders.append(("update", source, running))


async def post(worker: Worker, path: str, **body: Any) -> tuple[int, dict[str, Any]]:
    response = await worker.http.post(path, json=body)
    return response.status_code, response.json()


async def test_orders_reach_the_memory_as_they_were_sent(worker: Worker) -> None:
    assert (await post(worker, "/release_memory_occupation"))[0] == 503, "it is not serving yet"
    worker.front.memory = memory = RecordingMemory()
    status, answer = await post(worker, "/release_memory_occupation", tags=["kv_cache"], drain=True, timeout=5)
    assert (status, answer["success"], answer["released"]) == (200, True, ["kv_cache"])
    assert (await worker.http.get("/server_info")).json()["status"] == "memory_released"
    assert (await post(worker, "/resume_memory_occupation"))[1] == {
        "success": True,
        "message": "memory is resumed, the worker serves",
        "released": [],
    }
    disk = {"model_path": "/new", "load_format": "auto", "abort_all_requests": True, "weight_version": "v2"}
    assert await post(worker, "/update_weights_from_disk", **disk) == (
        200,
        {"success": True, "message": "weights are those of /new"},
    )
    assert (await post(worker, "/update_weights_from_shared_memory", name="w", drain=True))[0] == 200
    assert memory.orders == [
        ("release", {MemoryTag.KV_CACHE}, RunningRequests(drain=True, timeout=5.0)),
        ("resume", ALL),
        ("update", WeightsSource("/new"), RunningRequests(abort=True)),
        ("update", WeightsSource("w", is_shared_memory=True), RunningRequests(drain=True)),
    ]


async def test_a_failure_has_both_shapes_of_errors(worker: Worker) -> None:
    worker.front.memory = RecordingMemory()
    status, answer = await post(worker, "/release_memory_occupation")
    assert (status, answer["success"], answer["error"]["code"]) == (409, False, "memory_blocked")
    assert answer["message"] == answer["error"]["message"] == "3 requests are running on this worker"


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("release_memory_occupation", {"tags": ["cuda_graph"]}, "tags"),
        ("release_memory_occupation", {"tags": []}, "tags"),
        ("release_memory_occupation", {"abort": True, "drain": True}, "drain"),
        ("release_memory_occupation", {"abort": True, "timeout": 0}, "timeout"),
        ("release_memory_occupation", {"tag": ["kv_cache"]}, "tag"),
        ("release_memory_occupation", {"draim": True}, "draim"),
        ("resume_memory_occupation", {"tags": ["all"]}, "tags"),
        ("update_weights_from_disk", {}, "model_path"),
        ("update_weights_from_disk", {"model_path": " "}, "model_path"),
        ("update_weights_from_disk", {"model_path": "/m", "tags": ["weights"]}, "tags"),
        ("update_weights_from_disk", {"model_path": "/m", "load_format": "dummy"}, "load_format"),
        ("update_weights_from_disk", {"model_path": "/m", "flush_cache": False}, "flush_cache"),
        ("update_weights_from_disk", {"model_path": "/m", "abrot": True}, "abrot"),
        ("update_weights_from_shared_memory", {"name": 7}, "name"),
        ("update_weights_from_shared_memory", {"name": "w", "drian": True}, "drian"),
    ],
)
async def test_a_wrong_body_is_rejected_with_its_field(
    worker: Worker, path: str, body: dict[str, Any], param: str
) -> None:
    worker.front.memory = memory = RecordingMemory()
    status, answer = await post(worker, f"/{path}", **body)
    assert (status, answer["error"]["param"]) == (400, param)
    assert (answer["success"], answer["message"]) == (False, answer["error"]["message"])
    assert memory.orders == []


async def test_an_empty_body_means_all_tags(worker: Worker) -> None:
    worker.front.memory = memory = RecordingMemory()
    assert (await worker.http.post("/resume_memory_occupation")).status_code == 200
    assert memory.orders == [("resume", ALL)]
    missing = await worker.http.post("/update_weights_from_disk")
    assert (missing.status_code, missing.json()["error"]["param"]) == (400, "model_path")


async def test_requests_and_health_have_the_same_code_while_memory_is_released(worker: Worker) -> None:
    worker.front.memory = memory = RecordingMemory()
    memory.released = ALL
    worker.front.requests.drain("memory is released", has_released=True)
    body = {"input_ids": [5], "sampling_params": {"max_new_tokens": 1}}
    for response in (await worker.http.get("/health"), await worker.http.post("/generate", json=body)):
        assert (response.status_code, response.json()["error"]["code"]) == (503, "memory_released")
    # Else a supervisor that probes it would restart the worker.
    assert (await worker.http.get("/live")).status_code == 200


async def test_a_released_decode_worker_reports_that_before_a_missing_room(start_worker: StartWorker) -> None:
    async with start_worker("decode") as worker:
        worker.front.memory = memory = RecordingMemory()
        memory.released = ALL
        worker.front.requests.drain("memory is released", has_released=True)
        response = await worker.http.post("/generate", json={"text": "a"})
        assert (response.status_code, response.json()["error"]["code"]) == (503, "memory_released")
