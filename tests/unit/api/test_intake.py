"""Bodies are read within bounds of size, time and memory; each rejection is an answer that the client can read."""

from __future__ import annotations

import asyncio
import gc
import json
import tracemalloc
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.types import Message, Receive, Scope, Send

from splitserve.api.intake import Intake, RequestMemory, Reservation, parsed_size

LIMIT = 1_000


class Echo:
    """App that answers with the length of the body, and notes the memory reserved before and after its answer began."""

    def __init__(self, memory: RequestMemory) -> None:
        self._memory = memory
        self.bodies: list[bytes] = []
        self.reserved: list[int] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        message = await receive()
        assert not message["more_body"]
        self.bodies.append(message["body"])
        self.reserved.append(self._memory.reserved)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        self.reserved.append(self._memory.reserved)
        await send({"type": "http.response.body", "body": b"ok"})


def exchange(
    pieces: list[bytes],
    *,
    announced: int | None = None,
    memory: RequestMemory | None = None,
    stalls: bool = False,
    is_routed: bool = False,
    encoding: bytes | None = None,
) -> tuple[int, dict[str, Any], Echo]:
    """Send a body in pieces. Return the status, the error object and the app.

    `stalls`: the last one is never sent. `is_routed`: a router sends it. `encoding`: of the content.
    """
    memory = memory or RequestMemory(1 << 20)
    app, sent = Echo(memory), []
    messages: list[Message] = [
        {"type": "http.request", "body": piece, "more_body": stalls or i < len(pieces) - 1}
        for i, piece in enumerate(pieces)
    ]

    async def receive() -> Message:
        if messages:
            return messages.pop(0)
        await asyncio.Event().wait()
        raise AssertionError("unreachable")

    async def send(message: Message) -> None:
        sent.append(message)

    headers = [] if announced is None else [(b"content-length", str(announced).encode())]
    headers += [(b"x-router", b"1")] if is_routed else []
    headers += [(b"content-encoding", encoding)] if encoding is not None else []
    scope = {"type": "http", "method": "POST", "path": "/", "headers": headers}
    timeout = 0.01 if stalls else 30.0
    intake = Intake(app, max_body_bytes=lambda: LIMIT, timeout=timeout, memory=memory, router_header="x-router")
    before = memory.reserved
    asyncio.run(intake(scope, receive, send))
    assert memory.reserved == before
    body = b"".join(message.get("body", b"") for message in sent)
    error = json.loads(body)["error"] if sent[0]["status"] != 200 else {}
    if error:
        assert (b"connection", b"close") in sent[0]["headers"]
    return sent[0]["status"], error, app


@given(st.lists(st.binary(max_size=200), min_size=1, max_size=12))
def test_a_body_reaches_the_app_whole_or_is_rejected_by_its_size(pieces: list[bytes]) -> None:
    body = b"".join(pieces)
    status, error, app = exchange(pieces)
    if len(body) <= LIMIT:
        assert (status, app.bodies) == (200, [body])
    else:
        assert (status, error["code"], app.bodies) == (413, "request_too_large", [])
        assert "--max-request-bytes" in error["message"]


@pytest.mark.parametrize(("encoding", "status"), [(b"identity", 200), (b"gzip", 415)])
def test_a_compressed_body_is_rejected(encoding: bytes, status: int) -> None:
    found, error, _ = exchange([b"x"], encoding=encoding)
    assert found == status
    assert not error or "the Content-Encoding gzip is not supported" in error["message"]


@pytest.mark.parametrize(("num_bytes", "status"), [(2 * LIMIT, 200), (2 * LIMIT + 1, 413)])
def test_a_body_from_a_router_may_have_as_many_bytes_as_the_memory_of_all_requests_allows(
    num_bytes: int, status: int
) -> None:
    """It may contain the journal of a stream that moves: a line for each of thousands of tokens."""
    memory = RequestMemory(2 * LIMIT * 24)
    assert exchange([bytes(num_bytes)], is_routed=True, memory=memory)[0] == status
    assert exchange([bytes(num_bytes)], memory=memory)[0] == 413


def test_an_announced_size_is_rejected_before_the_body_is_read() -> None:
    status, _, app = exchange([], announced=10**15)
    assert status == 413
    assert not app.bodies


def test_a_body_that_stalls_is_answered_and_frees_its_memory() -> None:
    status, error, app = exchange([b"half"], stalls=True)
    assert (status, error["code"], app.bodies) == (408, "request_timeout", [])


def test_memory_counts_in_full_until_the_answer_begins_and_then_as_the_body() -> None:
    _, _, app = exchange([b"x" * 100])
    assert app.reserved == [parsed_size(b"x" * 100), 100]


def test_the_estimate_covers_what_a_body_takes_and_text_takes_little() -> None:
    entries = ("{}", "[]", "[1]", "[[[[[]]]]]", '{"a":1}', '{"":{}}', '"123"', "0.25", "41234", '"\U0001f600"', '"ab"')
    bodies = [f"[{','.join([entry] * 10_000)}]" for entry in entries]
    bodies += [json.dumps({str(i): 0 for i in range(10_000)}), json.dumps({"messages": [{"role": "user"}] * 10_000})]
    text = json.dumps({"prompt": "A sentence, and one more. " * 10_000})
    for body in map(str.encode, [*bodies, text, text.replace("more", "m\u00f6re"), text.replace("and", "\U0001f600")]):
        gc.collect()
        tracemalloc.start()
        found = msgspec.json.decode(body)
        copy = msgspec.json.encode(found)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert len(body) + peak <= parsed_size(body), body[:40]
        del found, copy
    assert parsed_size(text.encode()) < 7 * len(text)


def test_a_request_beyond_the_memory_is_to_be_retried() -> None:
    memory = RequestMemory(parsed_size(b"x" * 50))
    with Reservation(memory) as other:
        assert other.resize(10)
        status, error, app = exchange([b"x" * 50], memory=memory)
        assert (status, error["code"], app.bodies) == (503, "over_capacity", [])
        assert exchange([b"x" * 40], memory=memory)[0] == 200
    # Alone, any request is admitted.
    assert exchange([b"x" * 500], memory=memory)[0] == 200


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 100)), max_size=40))
def test_the_account_is_the_sum_of_its_reservations_and_bounded(steps: list[tuple[int, int]]) -> None:
    memory = RequestMemory(120)
    reservations, sizes = [Reservation(memory) for _ in range(4)], [0] * 4
    for index, size in steps:
        if reservations[index].resize(size):
            sizes[index] = size
        else:
            assert size > sizes[index]
        assert memory.reserved == sum(sizes) <= 120
    for reservation in reservations:
        reservation.resize(0)
    assert memory.reserved == 0


def test_a_client_that_leaves_ends_quietly() -> None:
    memory, sent = RequestMemory(), []

    async def receive() -> Message:
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        sent.append(message)

    scope: Scope = {"type": "http", "method": "POST", "path": "/", "headers": []}
    asyncio.run(Intake(Echo(memory), max_body_bytes=lambda: 1, timeout=1.0, memory=memory)(scope, receive, send))
    assert not sent


@pytest.mark.parametrize("kind", ["lifespan", "websocket"])
def test_other_scopes_pass(kind: str) -> None:
    seen: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append(scope["type"])

    async def never() -> Message:
        raise AssertionError("not called")

    async def send(message: Message) -> None:
        raise AssertionError("not called")

    asyncio.run(Intake(app, max_body_bytes=lambda: 1, timeout=1.0, memory=RequestMemory())({"type": kind}, never, send))
    assert seen == [kind]
