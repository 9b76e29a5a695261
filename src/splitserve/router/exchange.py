"""Exchange of one client request with a pair of workers, from dispatch to the last byte.

1. The same bytes are sent to both workers at the same time.
2. Decode's answer is forwarded to the client: a stream with a journal delta by delta (see `journal.py`), any other
   answer byte for byte.
3. The prefill's answer is read in parallel. It confirms the KV transfer and carries the prompt's logprobs.
4. If one worker fails, the pair fails: the other request is cancelled; its worker detects the disconnect and aborts.
   The cause (see `failure.py`) is raised, and the caller decides whether another pair can continue.
5. If the client disconnects, both requests are cancelled (see `client_stream.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import msgspec

from splitserve.api.responses import EventSplitter, Headers, event_data, event_of
from splitserve.api.schemas import JOURNAL_HEADER
from splitserve.core.request import DisaggregationMode
from splitserve.router.admission import IsolationTurn
from splitserve.router.client_stream import ClientStream
from splitserve.router.failure import UpstreamError, error_in_event
from splitserve.router.journal import DeltaReader, Journal
from splitserve.router.logprobs import merge_answer, merge_event
from splitserve.router.upstream import Upstream, WorkerCall, answer_headers
from splitserve.router.worker import Worker, WorkerPair

# Seconds in which the second worker may report its cause after the first has failed without a conclusive one.
GRACE_SECONDS = 0.25
# Seconds in which the prefill worker may finish its answer after decode has answered in full.
LINGER_SECONDS = 5.0


@dataclass(slots=True)
class ForwardedRequest:
    """One attempt of a client request, as it is sent to the workers."""

    path: str
    body: bytes
    headers: Headers
    # Timeout of the request, seconds.
    seconds: float
    journal: Journal
    # Turn of a suspect request. None: it is not suspect.
    turn: IsolationTurn | None = None
    # Whether the prompt's logprobs are taken from the prefill's answer.
    merge_logprobs: bool = False
    # Whether the prompt is known to have been processed.
    is_prefilled: bool = False

    def mark_prefilled(self) -> None:
        self.is_prefilled = True
        if self.turn is not None:
            self.turn.end()


async def forward(
    upstream: Upstream, target: WorkerPair | Worker, call: ForwardedRequest, client: ClientStream
) -> None:
    """Serve a request with a pair or one worker.

    If it fails, raise the UpstreamError that is the cause, after all requests to workers have ended.
    """
    if isinstance(target, Worker):
        side = "colocated" if target.mode is DisaggregationMode.NULL else target.mode.value
        await _Answer(upstream, target, side, call, client).forward(None)
        return
    with target.prefill.serving_on(target.prefill_rank):
        await _PairExchange(upstream, target, call, client).run()


class _PairExchange:
    def __init__(self, upstream: Upstream, pair: WorkerPair, call: ForwardedRequest, client: ClientStream) -> None:
        self._upstream = upstream
        self._pair = pair
        self._call = call
        self._client = client

    async def run(self) -> None:
        prefill = asyncio.create_task(self._read_prefill())
        try:
            errors = await self._forward(prefill)
            if errors:
                raise min(errors, key=lambda e: e.cause)
            if not prefill.done():
                await asyncio.wait({prefill}, timeout=LINGER_SECONDS)
        finally:
            if not prefill.done():
                prefill.cancel()
                await asyncio.gather(prefill, return_exceptions=True)

    async def _forward(self, prefill: asyncio.Task[list[Any]]) -> list[UpstreamError]:
        """Forward decode's answer to the client, unless prefill fails. Return the failures, the first one first.

        Empty: the client has the whole answer. If one worker fails, the other may still report the cause for a short
        time; decode may also finish successfully in that time.
        """
        answer = _Answer(self._upstream, self._pair.decode, "decode", self._call, self._client)
        scope = asyncio.timeout(None)

        def interrupt(task: asyncio.Task[list[Any]]) -> None:
            """End the scope if prefill failed: at once, or if that explains nothing after decode could report more."""
            error = None if task.cancelled() else task.exception()
            if error is None:
                return
            is_vague = isinstance(error, UpstreamError) and not error.is_conclusive
            # It raises if the scope has ended.
            with suppress(RuntimeError):
                scope.reschedule(asyncio.get_running_loop().time() + (GRACE_SECONDS if is_vague else 0.0))

        try:
            async with scope:
                prefill.add_done_callback(interrupt)
                await answer.forward(prefill if self._call.merge_logprobs else None)
            return []
        except TimeoutError:
            errors = [_error_of(prefill)]
        except UpstreamError as error:
            if _error_of(prefill) is not None:
                errors = [_error_of(prefill), error]
            else:
                if not error.is_conclusive:
                    await asyncio.wait({prefill}, timeout=GRACE_SECONDS)
                errors = [error, _error_of(prefill)]
        finally:
            prefill.remove_done_callback(interrupt)
        return [error for error in errors if error is not None]

    async def _read_prefill(self) -> list[Any]:
        """Return the prefill's answer: its object, list elements or stream events. Empty: not needed."""
        call, worker = self._call, self._pair.prefill
        sent = self._upstream.post(worker, "prefill", call.path, call.body, call.headers, call.seconds)
        try:
            await sent.head()
            body = await sent.read()
        finally:
            sent.close()
        parsed: Any = []
        if sent.is_event_stream:
            parsed = _events(body, worker)
        elif call.merge_logprobs:
            parsed = _decode_json(body, worker)
        call.mark_prefilled()
        return parsed if isinstance(parsed, list) else [parsed]


class _Answer:
    """Forwarder of one worker's answer to the client."""

    def __init__(
        self, upstream: Upstream, worker: Worker, side: str, call: ForwardedRequest, client: ClientStream
    ) -> None:
        self._upstream = upstream
        self._worker = worker
        self._side = side
        self._call = call
        self._client = client

    async def forward(self, prefill: asyncio.Task[list[Any]] | None) -> None:
        """Send the request and forward the answer. `prefill`: source of logprobs. Raises UpstreamError."""
        call = self._call
        sent = self._upstream.post(self._worker, self._side, call.path, call.body, call.headers, call.seconds)
        try:
            await sent.head()
            if JOURNAL_HEADER in sent.headers:
                await self._generate_deltas(sent, prefill)
                return
            if call.journal.lines:
                raise sent.broken_off()
            if sent.is_event_stream:
                await self._generate_stream(sent, prefill)
                return
            body = await sent.read()
        finally:
            sent.close()
        if prefill is not None:
            body = merge_answer(await asyncio.shield(prefill), body)
        await self._client.respond(sent.status, body, answer_headers(sent))

    async def _generate_deltas(self, sent: WorkerCall, prefill: asyncio.Task[list[Any]] | None) -> None:
        reader, journal = DeltaReader(), self._call.journal
        while chunk := await sent.chunk():
            deltas = reader.feed(chunk)
            events = deltas.events
            if prefill is not None and events:
                events = [_merge_into(await asyncio.shield(prefill), event) for event in events]
            if not self._client.started and (events or deltas.is_done):
                await self._client.start(sent.status, answer_headers(sent))
            # Update journal and client without an await in between. Otherwise the next worker could continue at the
            # wrong delta.
            self._client.accept(b"".join(events))
            journal.lines += deltas.lines
            if deltas.lines:
                self._call.mark_prefilled()
            journal.is_done = deltas.is_done
            if deltas.error is not None:
                raise UpstreamError.answered(self._side, self._worker.url, *deltas.error)
            if deltas.is_done:
                await self._client.end()
                return
            if events:
                await self._client.write()
        raise sent.broken_off()

    async def _generate_stream(self, sent: WorkerCall, prefill: asyncio.Task[list[Any]] | None) -> None:
        async for chunk in _chunks(sent) if prefill is None else _merged(_chunks(sent), prefill):
            if not self._client.started:
                self._raise_if_error(chunk)
                self._call.mark_prefilled()
                await self._client.start(sent.status, answer_headers(sent))
            await self._client.write(chunk)
        if not self._client.started:
            await self._client.start(sent.status, answer_headers(sent))
        await self._client.end()

    def _raise_if_error(self, first_chunk: bytes) -> None:
        """If a stream begins with an error, raise it with its status: the client has received nothing yet."""
        if b'"error"' not in first_chunk[:64]:
            return
        error = error_in_event(event_data(first_chunk.split(b"\n\n", 1)[0]))
        if error is not None:
            raise UpstreamError.answered(self._side, self._worker.url, *error)


async def _chunks(sent: WorkerCall) -> AsyncIterator[bytes]:
    while chunk := await sent.chunk():
        yield chunk


async def _merged(chunks: AsyncIterator[bytes], prefill: asyncio.Task[list[Any]]) -> AsyncIterator[bytes]:
    """Yield the stream with the prompt's logprobs in each of its events."""
    splitter = EventSplitter()
    async for chunk in chunks:
        for event in splitter.feed(chunk):
            yield event if event_data(event) is None else _merge_into(await asyncio.shield(prefill), event)
    if splitter.rest:
        yield splitter.rest


def _merge_into(prefill: list[Any], event: bytes) -> bytes:
    data = event_data(event)
    if data is None:
        return event
    merge_event(prefill, data)
    return event_of(msgspec.json.encode(data))


def _error_of(task: asyncio.Task[Any]) -> UpstreamError | None:
    """Return the error of an ended task. Raises any error that is not an UpstreamError: it is a bug."""
    error = task.exception() if task.done() else None
    if error is None or isinstance(error, UpstreamError):
        return error
    raise error


def _events(body: bytes, worker: Worker) -> list[Any]:
    """Return the events of the prefill's stream. Raises UpstreamError if one of them reports an error."""
    events = [event_data(event) for event in EventSplitter().feed(body)]
    for event in events:
        error = error_in_event(event)
        if error is not None:
            raise UpstreamError.answered("prefill", worker.url, *error)
    return [event for event in events if event is not None]


def _decode_json(body: bytes, worker: Worker) -> Any:
    try:
        return msgspec.json.decode(body)
    except msgspec.DecodeError:
        message = "the prefill worker sent an answer that is not JSON: check that it is a worker"
        raise UpstreamError.lost("prefill", worker.url, 502, message) from None
