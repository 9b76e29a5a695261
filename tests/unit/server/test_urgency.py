"""Priority and timeout reach the scheduler with every sample, or are refused."""

from __future__ import annotations

from typing import Any

import pytest

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
