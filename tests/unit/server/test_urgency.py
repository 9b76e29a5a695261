"""Priority and timeout reach the scheduler with every sample, or are refused."""

from __future__ import annotations

from typing import Any

import pytest

from splitserve.core.request import PROBE_PRIORITY

from .conftest import Worker

CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}


def path_of(body: dict[str, Any]) -> str:
    return "/generate" if "text" in body else "/v1/completions" if "prompt" in body else "/v1/chat/completions"


@pytest.mark.parametrize(
    "body",
    [
        {"text": ["ab", "cd"], "sampling_params": {"max_new_tokens": 1, "n": 2}},
        {"prompt": "ab", "max_tokens": 1, "n": 2},
        CHAT,
    ],
)
async def test_every_sample_carries_priority_and_timeout(worker: Worker, body: dict[str, Any]) -> None:
    response = await worker.http.post(path_of(body), json={**body, "priority": -3, "timeout": 2.5})
    assert response.status_code == 200, response.text
    assert {(r.priority, r.timeout) for r in worker.scheduler.received} == {(-3, 2.5)}


async def test_a_probe_of_a_router_has_the_highest_priority(worker: Worker) -> None:
    body = {"input_ids": [0], "sampling_params": {"max_new_tokens": 2}, "dispatch": {"probe": True}, "priority": 5}
    assert (await worker.http.post("/generate", json=body)).status_code == 200
    assert (await worker.http.get("/health_generate")).status_code == 200
    assert [r.priority for r in worker.scheduler.received] == [PROBE_PRIORITY] * 2


@pytest.mark.parametrize(
    "fields",
    [{"input_ids": [0] * 3}, {"input_ids": [[0], [0]]}, {"sampling_params": {"max_new_tokens": 4}}],
    ids=["prompt", "batch", "output"],
)
async def test_a_request_as_long_as_those_of_clients_is_no_probe(worker: Worker, fields: dict[str, Any]) -> None:
    body = {"input_ids": [0], "sampling_params": {"max_new_tokens": 2}, "dispatch": {"probe": True}} | fields
    response = await worker.http.post("/generate", json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "dispatch")
    assert not worker.scheduler.received


async def test_the_timeout_may_come_as_a_header_and_the_field_wins(worker: Worker) -> None:
    for body in (CHAT, {**CHAT, "timeout": 7}):
        response = await worker.http.post("/v1/chat/completions", json=body, headers={"X-Request-Timeout": "30"})
        assert response.status_code == 200, response.text
    assert [r.timeout for r in worker.scheduler.received] == [30.0, 7.0]


@pytest.mark.parametrize(
    ("fields", "headers", "param"),
    [
        ({"timeout": 0}, {}, "timeout"),
        ({"timeout": "5"}, {}, "timeout"),
        ({}, {"X-Request-Timeout": "soon"}, "x-request-timeout"),
        ({}, {"X-Request-Timeout": "inf"}, "x-request-timeout"),
        ({"priority": 1.5}, {}, "priority"),
        ({"priority": 2**40}, {}, "priority"),
    ],
)
async def test_what_makes_no_sense_is_refused(
    worker: Worker, fields: dict[str, Any], headers: dict[str, str], param: str
) -> None:
    response = await worker.http.post("/v1/chat/completions", json={**CHAT, **fields}, headers=headers)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
