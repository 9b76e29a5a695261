"""A pair behind the router, with every way it can go well and wrong."""

from __future__ import annotations

import asyncio
import gc
import json
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from yarl import URL

from splitserve.router.args import PrefillConfig
from support.router_world import after, answers, dies, error, never, serve_pair, start_router, start_worker, streams

OK = {"text": "Paris", "meta_info": {"id": "x"}}
ERROR = {"error": {"message": "prompt too long", "type": "invalid_request_error", "param": None, "code": "too_long"}}
DONE = b"data: [DONE]\n\n"


async def test_both_sides_get_the_same_body_with_the_fields_of_a_pair() -> None:
    async with serve_pair(answers({}), answers(OK)) as pair:
        status, body, headers = await pair.post("/generate", {"text": "hi", "unknown": {"a": [1.5, None]}})
        assert status == 200
        assert json.loads(body) == OK
        assert headers["Content-Type"].startswith("application/json")
        (prefill,), (decode,) = pair.prefill.bodies, pair.decode.bodies
        assert prefill == decode
        assert prefill["unknown"] == {"a": [1.5, None]}
        assert prefill["bootstrap_host"] == "127.0.0.1"
        assert prefill["bootstrap_port"] == 8998
        assert 0 <= prefill["bootstrap_room"] < 1 << 63
        assert isinstance(prefill["sampling_params"]["seed"], int)


async def test_both_requests_start_at_the_same_time() -> None:
    prefill_arrived, decode_arrived = asyncio.Event(), asyncio.Event()

    def meets(mine: asyncio.Event, other: asyncio.Event, answer: Any) -> Any:
        async def handler(request: web.Request, _: dict[str, Any]) -> web.StreamResponse:
            mine.set()
            await asyncio.wait_for(other.wait(), 60)
            return web.json_response(answer)

        return handler

    sides = meets(prefill_arrived, decode_arrived, {}), meets(decode_arrived, prefill_arrived, OK)
    async with serve_pair(*sides) as pair:
        assert (await pair.post("/v1/completions", {"prompt": "a"}))[0] == 200


@pytest.mark.parametrize("body", [{"prompt": ["a", "b"], "n": 2}, {"prompt": [[1], [2]], "n": 2}])
async def test_a_batch_gets_lists_of_equal_length_on_both_sides(body: dict[str, Any]) -> None:
    async with serve_pair(answers({}), answers(OK)) as pair:
        await pair.post("/v1/completions", body)
        assert pair.prefill.bodies == pair.decode.bodies
        sent = pair.decode.bodies[0]
        assert len(set(sent["bootstrap_room"])) == 4
        assert sent["bootstrap_port"] == [8998] * 4


async def test_a_stream_passes_byte_for_byte_event_by_event_as_it_comes() -> None:
    first = b'data: {"a": 1}\n\n'
    chunks = [first + b"da", b"ta: \xe2\x82", b"\xac\n\n: comment\n\n", DONE]
    received_first = asyncio.Event()
    async with serve_pair(answers({}), streams(*chunks, after=received_first)) as pair:
        request = pair.client.post(pair.router + "/generate", json={"text": "a", "stream": True})
        async with request as response:
            assert response.status == 200
            assert response.content_type == "text/event-stream"
            # The rest is not sent before the first event has come through.
            got = await response.content.readexactly(len(first))
            received_first.set()
            got += await response.read()
        assert got == b"".join(chunks)


async def test_a_large_answer_passes_whole() -> None:
    big = {"text": "x" * 5_000_000}
    async with serve_pair(answers({}), answers(big)) as pair:
        assert json.loads((await pair.post("/generate", {"text": "a"}))[1]) == big


@pytest.mark.parametrize("stream", [False, True])
async def test_a_prefill_that_refuses_fails_the_pair_with_its_answer(stream: bool) -> None:
    async with serve_pair(answers(ERROR, 400), never()) as pair:
        status, body, _ = await pair.post("/generate", {"text": "a", "stream": stream})
        assert (status, json.loads(body)) == (400, ERROR)
        if pair.decode.arrived.is_set():
            await asyncio.wait_for(pair.decode.cancelled.wait(), 60)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_decode_that_refuses_fails_the_pair_with_its_answer(stream: bool) -> None:
    async with serve_pair(never(), answers(ERROR, 422)) as pair:
        status, body, _ = await pair.post("/v1/chat/completions", {"messages": [], "stream": stream})
        assert (status, json.loads(body)) == (422, ERROR)
        if pair.prefill.arrived.is_set():
            await asyncio.wait_for(pair.prefill.cancelled.wait(), 60)


async def test_a_prefill_that_fails_while_decode_has_sent_headers_only_still_sets_the_status() -> None:
    async with serve_pair(answers(ERROR, 400), streams(hang=True)) as pair:
        status, body, _ = await pair.post("/generate", {"text": "a", "stream": True})
        assert (status, json.loads(body)) == (400, ERROR)


async def test_a_prefill_that_fails_after_the_first_token_ends_the_stream_with_its_error() -> None:
    first_token_seen = asyncio.Event()
    first = b'data: {"text": "P"}\n\n'
    async with serve_pair(after(first_token_seen, answers(ERROR, 500)), streams(first, hang=True)) as pair:
        request = pair.client.post(pair.router + "/generate", json={"text": "a", "stream": True})
        async with request as response:
            assert await response.content.readexactly(len(first)) == first
            first_token_seen.set()
            rest = await response.read()
        error, done, end = rest.split(b"\n\n")
        found = json.loads(error.removeprefix(b"data: "))["error"]
        context, cause = found.pop("message").split("): ")
        assert (found | {"message": cause.split(";")[0]}, "stage: streaming" in context) == (ERROR["error"], True)
        assert (done, end) == (b"data: [DONE]", b"")
        await asyncio.wait_for(pair.decode.cancelled.wait(), 60)


async def test_a_decode_that_dies_inside_an_event_ends_the_stream_with_an_error_of_its_own() -> None:
    async with serve_pair(answers({}), streams(b'data: {"a": 1}\n\n', b'data: {"b', die=True)) as pair:
        status, body, _ = await pair.post("/generate", {"text": "a", "stream": True})
        assert status == 200
        assert body.startswith(b'data: {"a": 1}\n\n')
        *_, error, done, _ = body.split(b"\n\n")
        message = json.loads(error.removeprefix(b"data: "))["error"]["message"]
        assert "decode worker" in message
        assert "went away" in message
        assert done == b"data: [DONE]"


@pytest.mark.parametrize("side", ["prefill", "decode"])
async def test_a_worker_that_dies_before_it_answers_fails_the_pair(side: str) -> None:
    sides = (dies(), never()) if side == "prefill" else (never(), dies())
    async with serve_pair(*sides) as pair:
        status, body, _ = await pair.post("/generate", {"text": "a"})
        assert status == 502
        assert f"{side} worker" in json.loads(body)["error"]["message"]


@pytest.mark.parametrize("side", ["prefill", "decode"])
async def test_a_worker_that_is_not_there_fails_the_pair_at_once_and_is_passed_over(side: str) -> None:
    gone = "http://127.0.0.1:9"
    async with start_worker(never()) as other, aiohttp.ClientSession() as client:
        prefill, decode = (gone, other.url) if side == "prefill" else (other.url, gone)
        async with start_router(prefill=(PrefillConfig(prefill),), decode=(decode,), health_interval=60) as router:
            for _ in range(2):
                async with client.post(router + "/generate", json={"text": "a"}) as response:
                    assert response.status == 503
                    assert "Retry-After" in response.headers
                    assert f"{side} worker" in (await response.json())["error"]["message"]


async def test_what_failed_is_one_line_of_text_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    async def failing(request: web.Request, _: dict[str, Any]) -> web.StreamResponse:
        return web.Response(status=500, body='{"error": "Größe\nb"}'.encode())

    async with serve_pair(failing, failing, max_retries=0) as pair:
        assert (await pair.post("/generate", {"text": "a"}))[0] == 500
    (line,) = [record.getMessage() for record in caplog.records if "request failed" in record.getMessage()]
    assert line.endswith('error={"error": "Größe b"}')


async def test_of_two_failures_the_request_at_fault_outranks_the_partner_left_alone() -> None:
    decode_failed = asyncio.Event()

    async def fails_first(request: web.Request, _: dict[str, Any]) -> web.StreamResponse:
        decode_failed.set()
        return web.json_response({"error": {"message": "KV transfer failed", "code": "kv"}}, status=500)

    async with serve_pair(after(decode_failed, answers(ERROR, 400)), fails_first) as pair:
        status, body, _ = await pair.post("/generate", {"text": "a"})
        assert (status, json.loads(body)) == (400, ERROR)


async def test_of_two_failures_an_abort_is_the_last_to_be_the_cause() -> None:
    prefill_failed = asyncio.Event()

    async def aborted(request: web.Request, _: dict[str, Any]) -> web.StreamResponse:
        prefill_failed.set()
        return web.json_response({"error": {"message": "aborted"}}, status=499)

    async with serve_pair(aborted, after(prefill_failed, answers(ERROR, 500))) as pair:
        assert (await pair.post("/generate", {"text": "a"}))[0] == 500


async def test_an_error_inside_the_prefills_stream_fails_the_pair() -> None:
    frame = b'data: {"error": {"message": "room used twice", "code": 409}}\n\n'
    async with serve_pair(streams(frame, DONE), never()) as pair:
        status, body, _ = await pair.post("/generate", {"text": "a", "stream": True})
        assert status == 409
        assert json.loads(body)["error"]["message"] == "room used twice"


async def test_a_decode_stream_that_begins_with_an_error_becomes_a_status() -> None:
    frame = b'data: {"error": {"message": "no room left", "code": 503}}\n\n'
    async with serve_pair(answers({}), streams(frame, DONE)) as pair:
        assert (await pair.post("/generate", {"text": "a", "stream": True}))[0] == 503


@pytest.mark.parametrize("decode", [never(), streams(b"data: 1\n\n", hang=True)], ids=["before", "while streaming"])
async def test_a_client_that_leaves_cancels_both_sides(decode: Any) -> None:
    async with serve_pair(never(), decode) as pair:
        request = asyncio.create_task(pair.post("/generate", {"text": "a", "stream": True}))
        await asyncio.wait_for(asyncio.gather(pair.prefill.arrived.wait(), pair.decode.arrived.wait()), 60)
        request.cancel()
        await asyncio.wait_for(asyncio.gather(pair.prefill.cancelled.wait(), pair.decode.cancelled.wait()), 60)


async def test_a_prefill_that_says_goodbye_late_is_not_cut_off() -> None:
    answered, goodbye = asyncio.Event(), asyncio.Event()

    async def late(request: web.Request, _: dict[str, Any]) -> web.StreamResponse:
        await answered.wait()
        response = web.json_response({})
        await response.prepare(request)
        await response.write_eof()
        goodbye.set()
        return response

    async with serve_pair(late, answers(OK)) as pair:
        assert (await pair.post("/generate", {"text": "a"}))[0] == 200
        answered.set()
        await asyncio.wait_for(goodbye.wait(), 60)
        assert not pair.prefill.cancelled.is_set()


async def test_the_idle_timeout_ends_a_silent_stream_and_not_a_whole_answer() -> None:
    released = asyncio.Event()

    async def decode(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if body.get("stream"):
            return await never()(request, body)
        return await after(released, answers(OK))(request, body)

    async with serve_pair(answers({}), decode, idle_timeout=0.1) as pair:
        whole = asyncio.create_task(pair.post("/generate", {"text": "a"}))
        await asyncio.wait_for(pair.decode.arrived.wait(), 60)
        status, body, _ = await pair.post("/generate", {"text": "a", "stream": True})
        assert status == 504
        assert "did not answer in time" in json.loads(body)["error"]["message"]
        # It has been silent for longer, and its worker is not at fault.
        released.set()
        assert (await whole)[0] == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_a_worker_that_needs_more_than_the_time_of_the_request_is_not_lost(stream: bool) -> None:
    # A lost worker would make it a poison request.
    async with serve_pair(never(), never(), timeout=0.2, max_prefill_retries=0) as pair:
        for _ in range(2):
            status, body, _ = await pair.post("/generate", {"text": "a", "stream": stream, "rid": "r"})
            error = json.loads(body)["error"]
            assert (status, error["code"]) == (504, "deadline_exceeded")
            assert "request r (stage: dispatch, try 1): " in error["message"]
            assert "its 0.2 s are over: give it a longer timeout" in error["message"]
        await asyncio.wait_for(pair.decode.cancelled.wait(), 60)


async def test_a_client_that_does_not_read_holds_its_request_no_longer_than_its_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("splitserve.router.exchange.READ_SECONDS", 0.0)

    async def endless(request: web.Request, _: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        while True:
            await response.write(b"data: {}\n\n" * 10_000)

    async with serve_pair(answers({}), endless, timeout=0.5, max_running_requests=1) as pair:
        reader, writer = await asyncio.open_connection("127.0.0.1", URL(pair.router).port)
        body = b'{"text": "a", "stream": true}'
        writer.write(b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
        await asyncio.wait_for(pair.decode.cancelled.wait(), 60)
        async with pair.client.get(pair.router + "/v1/traces") as response:
            (trace,) = (await response.json())["traces"]
        assert (trace["status"], trace["error"]) == (499, "client_too_slow")
        # The bytes in the buffers of the kernel, then the end of an aborted connection.
        with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)):
            await reader.readexactly(1 << 40)
        writer.close()


async def test_a_second_request_of_a_running_id_is_refused_whichever_worker_would_get_it() -> None:
    released = asyncio.Event()
    async with serve_pair(answers({}), after(released, answers(OK))) as pair:
        first = asyncio.create_task(pair.post("/v1/completions", {"prompt": ["a", "b"], "rid": ["r", "s"]}))
        await asyncio.wait_for(pair.decode.arrived.wait(), 60)
        status, body, _ = await pair.post("/generate", {"text": "a", "rid": "s"})
        message = json.loads(body)["error"]["message"]
        assert (status, len(pair.decode.bodies)) == (400, 1)
        assert message.startswith("request s (stage: admission): a request of this id is running: use another rid")
        released.set()
        assert (await first)[0] == 200
        assert (await pair.post("/generate", {"text": "a", "rid": "s"}))[0] == 200


async def test_a_client_that_left_may_send_its_request_again_at_once() -> None:
    served = asyncio.Event()
    async with serve_pair(answers({}), after(served, answers(OK))) as pair:
        first = asyncio.create_task(pair.post("/generate", {"text": "a", "rid": "r"}))
        await asyncio.wait_for(pair.decode.arrived.wait(), 60)
        again = asyncio.create_task(pair.post("/generate", {"text": "a", "rid": "r"}))
        # The router answers a later request, so it has received the second before it can notice the client's leave.
        async with pair.client.get(pair.router + "/workers"):
            first.cancel()
        served.set()
        assert (await again)[0] == 200


async def test_a_client_may_reuse_an_id_after_the_finish_reason_and_before_the_end_of_the_stream() -> None:
    released = asyncio.Event()

    async def decode(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if not body.get("stream"):
            return await answers(OK)(request, body)
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b'data: {"text": "a", "meta_info": {"finish_reason": {"type": "length"}}}\n\n')
        await released.wait()
        await response.write(b"data: [DONE]\n\n")
        return response

    body = {"text": "a", "rid": "r", "stream": True}
    async with (
        serve_pair(answers({}), decode) as pair,
        pair.client.post(pair.router + "/generate", json=body) as first,
    ):
        assert b"finish_reason" in await first.content.readuntil(b"\n\n")
        again = asyncio.create_task(pair.post("/generate", {"text": "a", "rid": "r"}))
        # The router answers a later request, so it has received this one.
        async with pair.client.get(pair.router + "/workers"):
            released.set()
        assert (await again)[0] == 200
        assert await first.content.read() == b"data: [DONE]\n\n"


async def test_many_requests_at_once_each_get_their_own_answer() -> None:
    async def echo(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return web.json_response({"text": body["text"], "room": body["bootstrap_room"]})

    async with serve_pair(answers({}), echo) as pair:
        replies = await asyncio.gather(*(pair.post("/generate", {"text": str(i)}) for i in range(64)))
        assert [json.loads(body)["text"] for _, body, _ in replies] == [str(i) for i in range(64)]
        assert len({json.loads(body)["room"] for _, body, _ in replies}) == 64


@pytest.mark.parametrize("raw", [b"{", b"", b"[1]", b'"text"', b"\xff"])
async def test_a_body_that_is_no_json_object_is_refused_without_asking_a_worker(raw: bytes) -> None:
    async with serve_pair(never(), never()) as pair:
        status, body, _ = await pair.post("/generate", None, raw)
        assert status == 400
        assert json.loads(body)["error"]["type"] == "invalid_request_error"
        assert pair.prefill.bodies == pair.decode.bodies == []


async def test_an_error_of_prefill_after_the_whole_answer_is_no_error_of_the_router(
    caplog: pytest.LogCaptureFixture,
) -> None:
    has_answered = asyncio.Event()

    async def prefill(_request: web.Request, _body: dict[str, Any]) -> web.StreamResponse:
        await has_answered.wait()
        return web.json_response(error("worker_unavailable"), status=503)

    async with serve_pair(prefill, answers({"text": "whole"})) as pair:
        asking = asyncio.create_task(pair.post("/generate", {"text": "a"}))
        # The router has forwarded the answer of decode, and waits for the end of prefill.
        await asyncio.sleep(0.3)
        has_answered.set()
        assert (await asking)[0] == 200
    gc.collect()
    assert not [record.getMessage() for record in caplog.records if record.name == "asyncio"]
