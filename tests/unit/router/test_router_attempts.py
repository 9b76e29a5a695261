"""A request with failing workers: others serve it if possible, and the client gets one answer or one error."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from splitserve.router import exchange
from splitserve.router.args import PrefillConfig
from support.router_world import (
    Handler,
    Pools,
    after,
    answers,
    dies,
    error,
    journals,
    never,
    reports,
    serve_pools,
    start_router,
    start_worker,
    streams,
)

OK = {"text": "Paris"}
DONE = b"data: [DONE]\n\n"
STREAM = {"text": "a", "stream": True}
COUNT = 5
REFUSAL = b'data: {"error": {"message": "no", "code": "worker_draining"}}\n\n'
# What a client sees of `journals(COUNT)`.
WHOLE = b"".join(b'data: {"i": %d}\n\n' % i for i in range(COUNT)) + DONE


def event(data: Any) -> bytes:
    return b"data: " + json.dumps(data).encode() + b"\n\n"


def told(pools: Pools, worker: int, request: int = -1) -> list[int]:
    """Return the tokens that a decode worker received."""
    return [line["token_ids"][0] for line in pools.decode[worker].bodies[request]["dispatch"]["told"]]


def last_error(body: bytes) -> dict[str, Any]:
    *_, frame, done, end = body.split(b"\n\n")
    assert (done, end) == (b"data: [DONE]", b"")
    found: dict[str, Any] = json.loads(frame.removeprefix(b"data: "))["error"]
    return found


FAILURES: dict[str, Handler] = {
    "dies": dies(),
    "full": answers(error("capacity_exceeded"), 503),
    "engine": answers(error("engine_error"), 500),
    "dies after its headers": streams(die=True),
    "begins with an error": streams(event(error("worker_unavailable")), DONE),
}


@pytest.fixture
def no_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests in which the partner of a worker that failed never reports anything."""
    monkeypatch.setattr(exchange, "GRACE_SECONDS", 0.0)


@pytest.mark.usefixtures("no_grace")
@pytest.mark.parametrize("failure", FAILURES)
@pytest.mark.parametrize("side", ["prefill", "decode"])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_side_that_fails_before_the_first_byte_is_replaced_unseen(stream, side, failure) -> None:
    fails, good = FAILURES[failure], journals(COUNT) if stream else answers(OK)
    sides = ([fails, answers({})], [never(), good]) if side == "prefill" else ([never(), answers({})], [fails, good])
    async with serve_pools(*sides) as pools:
        status, body = await pools.post("/generate", STREAM if stream else {"text": "a"})
        assert status == 200
        assert body == WHOLE if stream else json.loads(body) == OK
        (first,), (second,) = getattr(pools, side)[0].bodies, pools.decode[1].bodies
        assert (first["rid"], first["sampling_params"]) == (second["rid"], second["sampling_params"])
        assert first["bootstrap_room"] != second["bootstrap_room"]
        assert [b["dispatch"]["attempt"] for b in (first, second)] == [0, 1]


async def test_a_side_that_cannot_be_reached_is_replaced_unseen() -> None:
    gone = "http://127.0.0.1:9"
    async with start_worker(answers({})) as p, start_worker(answers(OK)) as d:
        prefill = (PrefillConfig(gone, 1), PrefillConfig(p.url, 1))
        async with (
            start_router(prefill=prefill, decode=(gone, d.url), health_interval=60) as router,
            aiohttp.ClientSession() as client,
            client.post(router + "/generate", json={}) as response,
        ):
            assert (response.status, await response.json()) == (200, OK)


async def test_of_two_workers_that_share_a_failure_the_one_at_fault_is_replaced_and_the_other_kept() -> None:
    async def waits_for_the_second(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return await (journals(COUNT) if body["dispatch"]["attempt"] else never())(request, body)

    async with serve_pools([dies(), answers({})], [waits_for_the_second]) as pools:
        assert await pools.post("/generate", STREAM) == (200, WHOLE)
        assert [len(p.bodies) for p in pools.prefill] == [1, 1]


@pytest.mark.parametrize("status", [400, 404, 409, 499])
async def test_what_the_request_is_to_blame_for_is_not_tried_again(status) -> None:
    async with serve_pools([never()] * 2, [answers(error("invalid_request"), status), answers(OK)]) as pools:
        assert (await pools.post("/generate", {"text": "a"}))[0] == status
        assert pools.decode[1].bodies == []


async def test_a_request_that_has_had_its_time_gets_no_more() -> None:
    timed_out = answers(error("deadline_exceeded"), 504)
    async with serve_pools([never()] * 2, [timed_out, answers(OK)]) as pools:
        assert (await pools.post("/generate", {"text": "a"}))[0] == 504
        assert pools.decode[1].bodies == []


async def test_the_same_pair_is_not_asked_twice_and_a_full_deployment_answers_at_once() -> None:
    full = answers(error("capacity_exceeded"), 503)
    async with serve_pools([answers({})], [full]) as pools:
        assert (await pools.post("/generate", {"text": "a"}))[0] == 503
        assert len(pools.decode[0].bodies) == 1
    async with serve_pools([answers({})] * 2, [full] * 2) as pools:
        assert (await pools.post("/generate", {"text": "a"}))[0] == 503
        assert [len(d.bodies) for d in pools.decode] == [1, 1]


async def test_an_error_that_may_be_the_partners_is_tried_with_both_replaced_or_the_one_that_can_be() -> None:
    quoted = answers(error("kv_transfer_failed"), 500)
    async with serve_pools([answers({})] * 2, [quoted, journals(COUNT)]) as pools:
        assert await pools.post("/generate", STREAM) == (200, WHOLE)
        assert [len(w.bodies) for w in (*pools.prefill, *pools.decode)] == [1, 1, 1, 1]

    async def fails_once(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return await (journals(COUNT) if body["dispatch"]["attempt"] else quoted)(request, body)

    async with serve_pools([answers({})] * 2, [fails_once]) as pools:
        assert await pools.post("/generate", STREAM) == (200, WHOLE)


async def test_tries_are_bounded() -> None:
    async with serve_pools([never()], [dies()] * 5, max_retries=2, max_prefill_retries=9) as pools:
        status, body = await pools.post("/generate", {"text": "a", "rid": "mine"})
        assert status == 502
        message = json.loads(body)["error"]["message"]
        assert "request mine (stage: dispatch, try 3)" in message
        assert "--max-retries" in message
        assert sum(len(d.bodies) for d in pools.decode) == 3


@pytest.mark.parametrize("how", ["field", "header"])
async def test_nothing_is_tried_after_the_requests_deadline(how) -> None:
    body = {"text": "a"} | ({"timeout": 1e-6} if how == "field" else {})
    async with serve_pools([never()], [dies(), answers(OK)]) as pools:
        headers = {"X-Request-Timeout": "0.000001"} if how == "header" else None
        status, answer = await pools.post("/generate", body, headers)
        assert status == 502
        assert "longer timeout" in json.loads(answer)["error"]["message"]
        assert json.loads(answer)["error"]["code"] == "deadline_exceeded"
        assert pools.decode[1].bodies == []


async def test_the_second_try_has_what_is_left_of_the_clients_time() -> None:
    async with serve_pools([answers({})], [dies(), answers(OK)]) as pools:
        assert (await pools.post("/generate", {"text": "a", "timeout": 600}))[0] == 200
        assert 500 < pools.decode[1].bodies[0]["timeout"] < 600
        assert pools.decode[1].bodies[0]["dispatch"]["elapsed"] > 0


# Bytes of a delta that did not come whole: nothing, half an event, an event without its line, half a line.
PIECES = [b"", b'data: {"i"', b'data: {"i": 77}\n\n', b'data: {"i": 77}\n\n: {"index"']


@pytest.mark.parametrize("piece", PIECES)
@pytest.mark.parametrize("cut", range(COUNT + 1))
async def test_a_stream_that_breaks_anywhere_goes_on_elsewhere(cut, piece) -> None:
    async with serve_pools([answers({})] * 2, [journals(COUNT, until=cut, then=piece), journals(COUNT)]) as pools:
        assert await pools.post("/generate", STREAM) == (200, WHOLE)
        assert told(pools, 1) == list(range(cut))
        assert (await pools.post("/generate", STREAM))[0] == 200


async def test_a_stream_that_ends_without_its_end_goes_on_elsewhere() -> None:
    async with serve_pools([answers({})], [journals(COUNT, until=3, die=False), journals(COUNT)]) as pools:
        assert await pools.post("/generate", STREAM) == (200, WHOLE)


@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.integers(0, COUNT), st.sampled_from(PIECES)), min_size=3, max_size=3))
def test_however_often_it_breaks_no_token_is_lost_or_comes_twice(breaks: list[tuple[int, bytes]]) -> None:
    async def run() -> None:
        decodes = [*(journals(COUNT, until=cut, then=piece) for cut, piece in breaks), journals(COUNT)]
        async with serve_pools([answers({})], decodes) as pools:
            assert await pools.post("/generate", STREAM) == (200, WHOLE)

    asyncio.run(run())


async def test_an_error_that_another_worker_need_not_have_moves_the_stream() -> None:
    shutting_down = event(error("worker_unavailable", "shutting down")) + DONE
    decodes = [journals(COUNT, until=2, then=shutting_down, die=False), journals(COUNT)]
    async with serve_pools([answers({})], decodes) as pools:
        assert await pools.post("/generate", STREAM) == (200, WHOLE)
        assert told(pools, 1) == [0, 1]


async def test_an_error_of_the_request_ends_the_stream() -> None:
    decodes = [journals(COUNT, until=2, then=event(error("aborted")) + DONE, die=False), journals(COUNT)]
    async with serve_pools([answers({})], decodes) as pools:
        status, body = await pools.post("/generate", STREAM)
        assert (status, last_error(body)["code"]) == (200, "aborted")
        assert body.count(b'{"i"') == 2
        assert pools.decode[1].bodies == []


async def test_with_nobody_left_a_stream_ends_with_an_error_that_says_so() -> None:
    async with serve_pools([answers({})], [journals(COUNT, until=2)]) as pools:
        status, body = await pools.post("/generate", STREAM | {"rid": "mine"})
        assert status == 200
        message = last_error(body)["message"]
        for part in (
            "request mine",
            "stage: streaming",
            "decode worker went away",
            "no",
            "retry in a moment; if none is starting",
        ):
            assert part in message
        assert "http" not in message
        assert body.count(b'{"i"') == 2


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_reads_no_workers_address_and_the_log_has_it(stream: bool, caplog: Any) -> None:
    caplog.set_level("WARNING")
    text = "KV transfer of room 7 failed: prefill at bootstrap address {}:4711: {}. http://w.internal:1/x is gone."

    async def fails(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        message = text.format(body["bootstrap_host"], f"lost 10.1.2.3:99, {pools.prefill[0].url}")
        failure = event(error("kv_transfer_failed", message))
        return await (
            journals(COUNT, until=1, then=failure + DONE, die=False)
            if stream
            else answers(error("kv_transfer_failed", message), 500)
        )(request, body)

    async with serve_pools([answers({})], [fails]) as pools:
        _, body = await pools.post("/generate", {"text": "a", "stream": stream, "rid": "mine"})
        message = (last_error(body) if stream else json.loads(body)["error"])["message"]
        assert "request mine (stage: " in message
        assert "KV transfer of room 7 failed" in message
        for address in ("127.0.0.1", "10.1.2.3", "internal", "4711", "http"):
            assert address not in message
        assert ".;" not in message
        assert f"worker={pools.decode[0].url}" in caplog.text
        assert "10.1.2.3:99" in caplog.text


async def test_the_id_of_a_request_cannot_add_a_line_to_the_log(caplog: Any) -> None:
    caplog.set_level("WARNING")
    async with serve_pools([answers({})], [dies(), answers(OK)]) as pools:
        assert (await pools.post("/generate", {"text": "a", "rid": "a\nrequest moves rid=b"}))[0] == 200
    assert "request moves rid=" in caplog.text
    assert "\nrequest moves" not in caplog.text


async def test_a_stream_without_a_journal_is_never_begun_again() -> None:
    async with serve_pools([answers({})], [streams(b"data: 1\n\n", die=True), streams(b"data: 1\n\n", DONE)]) as pools:
        _, body = await pools.post("/generate", STREAM)
        assert "send the request again" in last_error(body)["message"]
        assert pools.decode[1].bodies == []


async def test_a_stream_with_a_journal_does_not_go_on_at_a_worker_that_keeps_none() -> None:
    decodes = [journals(COUNT, until=2), streams(b"data: 1\n\n", DONE)]
    async with serve_pools([answers({})], decodes) as pools:
        _, body = await pools.post("/generate", STREAM)
        assert b"data: 1\n" not in body
        assert "decode worker" in last_error(body)["message"]


async def test_refusals_of_workers_that_drain_or_change_their_roles_are_no_retries() -> None:
    decodes = [journals(COUNT, until=0, then=REFUSAL, die=False), reports("worker_draining", 503), journals(COUNT)]
    async with serve_pools([answers({})], decodes, max_retries=0) as pools:
        assert await pools.post("/generate", STREAM) == (200, WHOLE)
        assert len(pools.decode[0].bodies) == 1


async def test_a_worker_that_refuses_for_ever_gets_a_request_only_a_few_times() -> None:
    options = {"health_interval": 0.05, "worker_wait_timeout": 60.0, "max_retries": 2}
    async with serve_pools([answers({})], [reports("worker_draining", 503)], **options) as pools:
        status, body = await pools.post("/generate", {"text": "a"})
        assert (status, json.loads(body)["error"]["code"]) == (503, "worker_draining")
        # The first refusal does not count.
        assert len(pools.decode[0].bodies) == 4


@pytest.mark.parametrize("has_same", [False, True])
async def test_a_stream_goes_on_only_at_a_worker_with_its_weights(has_same: bool) -> None:
    """However many others there are."""
    others = [reports("other_model", 503) for _ in range(5)]
    async with serve_pools([answers({})], [journals(COUNT, until=2), *others, *[journals(COUNT)] * has_same]) as pools:
        status, body = await pools.post("/generate", STREAM)
        assert status == 200
        assert all(len(worker.bodies) <= 1 for worker in pools.decode)
        if has_same:
            assert body == WHOLE
        else:
            assert last_error(body)["code"] == "other_model"


async def test_a_worker_that_gives_no_sign_of_life_loses_its_streams_to_another() -> None:
    decodes = [journals(COUNT, until=2, hang=True), journals(COUNT)]
    async with serve_pools([answers({})], decodes, health_interval=0.05, hang_timeout=0.5) as pools:
        pools.decode[0].is_stopped = True
        assert await pools.post("/generate", STREAM) == (200, WHOLE)
        assert told(pools, 1) == [0, 1]


async def test_a_scheduler_that_hangs_behind_a_front_end_that_answers_is_found_out() -> None:
    decodes = [journals(COUNT, until=2, hang=True), journals(COUNT)]
    async with serve_pools([answers({})], decodes, health_interval=0.05, hang_timeout=0.5) as pools:
        pools.decode[0].load_status = 504
        assert await pools.post("/generate", STREAM) == (200, WHOLE)
        assert told(pools, 1) == [0, 1]


async def test_a_prefill_that_hangs_loses_its_requests_to_another() -> None:
    async with serve_pools(
        [never(), answers({})],
        [journals(COUNT, until=0, hang=True), journals(COUNT)],
        health_interval=0.05,
        hang_timeout=0.5,
    ) as pools:
        pools.prefill[0].is_stopped = True
        assert await pools.post("/generate", STREAM) == (200, WHOLE)


async def test_a_worker_that_came_back_is_somebody_to_go_on_at_where_all_others_have_failed() -> None:
    async def prefill(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return await (never() if body["dispatch"]["attempt"] < 2 else answers({}))(request, body)

    async def decode(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return await (never() if body["dispatch"]["attempt"] < 2 else journals(COUNT))(request, body)

    options: dict[str, Any] = {"health_interval": 0.05, "hang_timeout": 0.5, "max_prefill_retries": 2}
    async with serve_pools([prefill] * 2, [decode], **options) as pools:
        first, second = pools.prefill
        first.is_stopped = True
        request = asyncio.create_task(pools.post("/generate", STREAM))
        await asyncio.wait_for(second.arrived.wait(), 60)
        first.is_stopped = False
        async with asyncio.timeout(60):
            while not await is_healthy(pools, first.url):
                pass
        second.is_stopped = True
        assert await request == (200, WHOLE)
        assert [len(p.bodies) for p in pools.prefill] == [2, 1]


async def is_healthy(pools: Pools, url: str) -> bool:
    async with pools.client.get(pools.router + "/workers") as response:
        return next(w["healthy"] for w in (await response.json())["workers"] if w["url"] == url)


async def test_a_slow_worker_that_answers_questions_keeps_its_stream() -> None:
    go_on = asyncio.Event()
    decodes = [journals(COUNT, until=2, go_on=go_on), never()]
    async with serve_pools([answers({})], decodes, health_interval=0.02, hang_timeout=0.5) as pools:
        request = asyncio.create_task(pools.post("/generate", STREAM))
        await asyncio.wait_for(pools.decode[0].asked_often.wait(), 60)
        go_on.set()
        assert await request == (200, WHOLE)
        assert pools.decode[1].bodies == []


async def test_a_prefill_that_dies_while_the_decode_waits_moves_to_another_prefill() -> None:
    arrived = asyncio.Event()

    async def dies_later(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        await arrived.wait()
        return await dies()(request, body)

    async def waits(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        arrived.set()
        return await never()(request, body)

    async with serve_pools([dies_later, answers({})], [waits, journals(COUNT)]) as pools:
        assert await pools.post("/generate", STREAM) == (200, WHOLE)
        await asyncio.wait_for(pools.decode[0].cancelled.wait(), 60)


async def test_where_the_decode_reports_a_lost_partner_the_prefill_is_at_fault() -> None:
    prefill_fails = asyncio.Event()
    decode = [answers(error("peer_lost"), 500), journals(COUNT)]
    async with serve_pools([after(prefill_fails, answers({})), answers({})], decode) as pools:
        assert await pools.post("/generate", STREAM) == (200, WHOLE)
        # It may retry on a worker that it did not blame, but not on the prefill worker.
        assert [len(p.bodies) for p in pools.prefill] == [1, 1]


async def test_the_prompts_logprobs_come_from_whichever_prefill_served() -> None:
    def native(i: int) -> bytes:
        frame = {"text": "x" * i, "meta_info": {"input_token_logprobs": [], "output_token_logprobs": [i]}}
        return event(frame) + b': {"index":0,"token_ids":[%d]}\n\n' % i

    def worker(first: int, last: int, end: bool) -> Handler:
        async def handler(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            response = web.StreamResponse(headers={"content-type": "text/event-stream", "x-splitserve-journal": "1"})
            await response.prepare(request)
            for i in range(first, last):
                await response.write(native(i))
            if end:
                await response.write(DONE)
            return response

        return handler

    prefill = streams(event({"meta_info": {"input_token_logprobs": [[-1.0, 5, None]]}}), DONE)
    async with serve_pools([prefill] * 2, [worker(0, 2, False), worker(2, 4, True)]) as pools:
        _, body = await pools.post("/generate", STREAM | {"return_logprob": True, "logprob_start_len": 0})
        frames = [json.loads(e.removeprefix(b"data: ")) for e in body.split(b"\n\n")[:-2]]
        assert [f["meta_info"]["output_token_logprobs"] for f in frames] == [[i] for i in range(4)]
        assert all(f["meta_info"]["input_token_logprobs"] == [[-1.0, 5, None]] for f in frames)


async def test_a_colocated_worker_is_replaced_by_another() -> None:
    async with (
        start_worker(journals(COUNT, until=3)) as first,
        start_worker(journals(COUNT)) as second,
        start_router(workers=(first.url, second.url)) as router,
        aiohttp.ClientSession() as client,
        client.post(router + "/generate", json=STREAM) as response,
    ):
        assert await response.read() == WHOLE
        assert [line["token_ids"] for line in second.bodies[0]["dispatch"]["told"]] == [[0], [1], [2]]


async def test_a_client_cannot_speak_as_a_router() -> None:
    async with serve_pools([answers({})], [journals(COUNT)]) as pools:
        forged = {"attempt": 9, "told": [{"index": 0, "token_ids": [1]}]}
        assert await pools.post("/generate", STREAM | {"dispatch": forged}) == (200, WHOLE)
        assert pools.decode[0].bodies[0]["dispatch"]["told"] == []


async def test_retries_and_migrations_are_counted() -> None:
    async with serve_pools([answers({})], [journals(COUNT, until=2), journals(COUNT)]) as pools:
        assert await pools.post("/generate", STREAM) == (200, WHOLE)
        async with pools.client.get(pools.router + "/metrics") as response:
            text = await response.text()
        assert 'splitserve_router:retries_total{kind="migration",side="decode"} 1.0' in text
