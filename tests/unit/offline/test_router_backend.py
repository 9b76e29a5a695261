"""The router's answers as an engine reads them: one, a stream, and every way that a request fails."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from splitserve.core.errors import InvalidRequestError, PromptTooLongError, SplitserveError, WorkerUnavailableError
from splitserve.offline.backends import RouterBackend

ANSWERS = [{"text": "a", "output_ids": [1]}, {"text": "ab", "output_ids": [1, 2]}]


async def ask(reply: Any, *, stream: bool) -> list[dict[str, Any]]:
    backend = RouterBackend("http://router", None, httpx.MockTransport(reply))
    try:
        body = {"rid": "r-0", "input_ids": [1], "stream": stream}
        return [answer async for answer in backend.answers(body)]
    finally:
        await backend.close()


def error_object(code: str) -> dict[str, Any]:
    return {"error": {"message": "it is wrong", "type": "x", "param": "input_ids", "code": code}}


def events(*frames: Any) -> bytes:
    return b"".join(b"data: " + json.dumps(f).encode() + b"\n\n" for f in frames) + b"data: [DONE]\n\n"


async def test_an_answer_is_what_was_sent():
    def reply(request: httpx.Request) -> httpx.Response:
        assert request.url == "http://router/generate"
        assert json.loads(request.content)["input_ids"] == [1]
        return httpx.Response(200, json=ANSWERS[1])

    assert await ask(reply, stream=False) == ANSWERS[1:]


async def test_a_stream_is_its_frames():
    assert await ask(lambda _: httpx.Response(200, content=events(*ANSWERS)), stream=True) == ANSWERS


@pytest.mark.parametrize(
    ("code", "status", "kind"),
    [("prompt_too_long", 400, PromptTooLongError), ("kv_transfer_failed", 500, SplitserveError)],
)
async def test_a_refusal_is_the_error_of_our_tree(code, status, kind):
    with pytest.raises(kind, match="it is wrong") as caught:
        await ask(lambda _: httpx.Response(status, json=error_object(code)), stream=False)
    assert (caught.value.reason, caught.value.http_status, caught.value.param) == (code, status, "input_ids")


async def test_an_error_in_midstream_ends_it():
    frames = events(ANSWERS[0], error_object("invalid_request"))
    with pytest.raises(InvalidRequestError, match="it is wrong"):
        await ask(lambda _: httpx.Response(200, content=frames), stream=True)


async def test_a_router_that_is_gone_or_talks_nonsense_is_named():
    def refuse(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused", request=request)

    with pytest.raises(WorkerUnavailableError, match=r"request r-0: the cluster's router .*\(refused\)"):
        await ask(refuse, stream=True)
    with pytest.raises(WorkerUnavailableError, match="HTTP 502: <html>"):
        await ask(lambda _: httpx.Response(502, content=b"<html>"), stream=False)
