"""Requests without a peer: the header that they need, the mark of their answers, and what they exclude."""

from __future__ import annotations

import pytest

from splitserve.core.request import FAKE_BOOTSTRAP_HOST
from splitserve.server.fake_transfer import FAKE_ACCEPTED, FAKE_HEADER

from .conftest import StartWorker

ACCEPT = {FAKE_HEADER: FAKE_ACCEPTED}
BODY = {"text": "abc", "sampling_params": {"max_new_tokens": 2}}
ROOM = {"bootstrap_host": FAKE_BOOTSTRAP_HOST, "bootstrap_room": 1}


@pytest.mark.parametrize("mode", ["prefill", "decode"])
async def test_every_request_of_a_fake_worker_needs_the_header_and_has_no_peer(
    start_worker: StartWorker, mode: str
) -> None:
    async with start_worker(mode, backend="fake") as worker:
        refused = await worker.http.post("/generate", json=BODY)
        assert refused.status_code == 400
        error = refused.json()["error"]
        assert (error["code"], error["param"]) == ("fake_transfer", FAKE_HEADER)
        assert f"header {FAKE_HEADER}: {FAKE_ACCEPTED}" in error["message"]
        answer = await worker.http.post("/generate", json=BODY, headers=ACCEPT)
        assert answer.status_code == 200
        assert answer.json()["meta_info"]["fake_transfer"] is True
        assert answer.headers[FAKE_HEADER] == FAKE_ACCEPTED
        (request,) = worker.scheduler.received
        assert request.bootstrap is not None
        assert request.bootstrap.host == FAKE_BOOTSTRAP_HOST


@pytest.mark.parametrize("value", ["no", "1", ""])
async def test_another_value_of_the_header_is_rejected(start_worker: StartWorker, value: str) -> None:
    async with start_worker("decode", backend="fake") as worker:
        answer = await worker.http.post("/generate", json=BODY, headers={FAKE_HEADER: value})
        assert answer.status_code == 400


async def test_samples_of_a_fake_worker_have_rooms_of_their_own_and_streams_are_marked(
    start_worker: StartWorker,
) -> None:
    async with start_worker("decode", backend="fake") as worker:
        body = {"model": "tiny", "prompt": ["ab", "cd"], "n": 2, "max_tokens": 1, "stream": True}
        answer = await worker.http.post("/v1/completions", json=body, headers=ACCEPT)
        assert (answer.status_code, answer.headers[FAKE_HEADER]) == (200, FAKE_ACCEPTED)
        keys = {request.bootstrap.key for request in worker.scheduler.received if request.bootstrap}
        assert len(keys) == 4


@pytest.mark.parametrize("host", [FAKE_BOOTSTRAP_HOST, [FAKE_BOOTSTRAP_HOST]])
async def test_on_a_worker_with_peers_a_request_for_the_fake_host_needs_the_header(
    start_worker: StartWorker, host: object
) -> None:
    async with start_worker("decode") as worker:
        body = {**BODY, **ROOM, "bootstrap_host": host}
        refused = await worker.http.post("/generate", json=body)
        assert refused.json()["error"]["code"] == "fake_transfer"
        answer = await worker.http.post("/generate", json=body, headers=ACCEPT)
        assert answer.json()["meta_info"]["fake_transfer"] is True


async def test_other_answers_have_no_mark(start_worker: StartWorker) -> None:
    async with start_worker() as worker:
        answer = await worker.http.post("/generate", json=BODY, headers=ACCEPT)
        assert answer.status_code == 200
        assert "fake_transfer" not in answer.json()["meta_info"]
        assert FAKE_HEADER not in answer.headers


async def test_a_grammar_is_refused_on_decode_because_the_first_token_is_not_sampled(start_worker: StartWorker) -> None:
    async with start_worker("decode", backend="fake") as worker:
        body = {**BODY, "sampling_params": {"regex": "[a-z]+"}}
        answer = await worker.http.post("/generate", json=body, headers=ACCEPT)
        assert answer.status_code == 400
        assert "leave the grammar out" in answer.json()["error"]["message"]


async def test_a_prompt_that_decode_computes_itself_is_not_fake(start_worker: StartWorker) -> None:
    async with start_worker("decode", backend="fake") as worker:
        answer = await worker.http.post("/generate", json={**BODY, "local_prefill": True}, headers=ACCEPT)
        assert "fake_transfer" not in answer.json()["meta_info"]
        assert worker.scheduler.received[0].bootstrap is None


async def test_health_needs_no_header(start_worker: StartWorker) -> None:
    async with start_worker("decode", backend="fake") as worker:
        assert (await worker.http.get("/health_generate")).status_code == 200
