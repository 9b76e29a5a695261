"""One client request served by a pair, from dispatch to the last byte.

1. The same bytes go to both workers at the same time.
2. The decode's answer goes to the client as it comes: a stream with a journal delta by delta (see `journal.py`), any
   other byte for byte.
3. The prefill's answer is read beside it. It says only that the KV was handed over, and carries the prompt's logprobs.
4. A side that fails fails the pair: the other request is cancelled, which its worker sees as a disconnect and aborts.
   What caused it (see `failure.py`) is raised; who calls sees whether another pair can go on.
5. A client that leaves cancels both (see `client_stream.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from splitserve.core.request import DisaggregationMode
from splitserve.router.client_stream import ClientStream
from splitserve.router.failure import Headers, UpstreamError, error_in_event
from splitserve.router.journal import DeltaReader, Journal
from splitserve.router.logprobs import merge_answer, merge_event
from splitserve.router.sse import EventSplitter, encode_event, event_data
from splitserve.router.upstream import Upstream, WorkerCall, answer_headers
from splitserve.router.worker import Pair, Worker
from splitserve.server.dispatch import JOURNAL_HEADER

# Seconds the second side gets to report its cause after the first has failed without a conclusive one.
GRACE_SECONDS = 0.25
# Seconds the prefill gets to say goodbye after the decode has answered in full.
LINGER_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Call:
    """One client request as it goes to the workers."""

    path: str
    body: bytes
    headers: Headers
    # Seconds it may take.
    seconds: float
    journal: Journal
    # Called when the prompt has been processed, if this is known before the answer ends.
    on_prefilled: Callable[[], None]
    # The prompt's logprobs are to be taken from the prefill's answer.
    merge_logprobs: bool = False


async def forward_single(upstream: Upstream, worker: Worker, call: Call, client: ClientStream) -> None:
    """Serve a request by one worker. Raises UpstreamError."""
    side = "colocated" if worker.mode is DisaggregationMode.NULL else worker.mode.value
    await _Answer(upstream, worker, side, call, client).forward(None)


class PairExchange:
    def __init__(self, upstream: Upstream, pair: Pair, call: Call, client: ClientStream) -> None:
        self._upstream = upstream
        self._pair = pair
        self._call = call
        self._client = client

    async def run(self) -> None:
        """Serve the request. Raises the UpstreamError that is the cause if it fails; both requests have ended then."""
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
        """Decode's answer goes to the client, unless prefill fails. How the two failed, the first one first; empty if
        the client has its whole answer.

        Where a side fails the other may yet report the cause, for a short while; decode may also end well meanwhile.
        """
        answer = _Answer(self._upstream, self._pair.decode, "decode", self._call, self._client)
        interruption = _Interruption(prefill)
        try:
            with interruption:
                await answer.forward(prefill if self._call.merge_logprobs else None)
            if not interruption.has_happened:
                return []
            errors = [_error_of(prefill)]
        except UpstreamError as error:
            if _error_of(prefill) is not None:
                errors = [_error_of(prefill), error]
            else:
                if not error.is_conclusive:
                    await asyncio.wait({prefill}, timeout=GRACE_SECONDS)
                errors = [error, _error_of(prefill)]
        return [error for error in errors if error is not None]

    async def _read_prefill(self) -> list[Any]:
        """The prefill's whole answer: its object, its list's elements, or its stream's events; empty if not needed."""
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
        call.on_prefilled()
        return parsed if isinstance(parsed, list) else [parsed]


class _Answer:
    """The way of one worker's answer to the client."""

    def __init__(self, upstream: Upstream, worker: Worker, side: str, call: Call, client: ClientStream) -> None:
        self._upstream = upstream
        self._worker = worker
        self._side = side
        self._call = call
        self._client = client

    async def forward(self, prefill: asyncio.Task[list[Any]] | None) -> None:
        """Send the request and pass the answer on. `prefill`: whose logprobs are merged in. Raises UpstreamError."""
        call = self._call
        sent = self._upstream.post(self._worker, self._side, call.path, call.body, call.headers, call.seconds)
        try:
            await sent.head()
            if JOURNAL_HEADER in sent.headers:
                await self._generate_deltas(sent, prefill)
                return
            if call.journal.lines:
                raise sent.broke_off()
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
            # Together, or the next worker would begin too early or too late.
            self._client.accept(b"".join(events))
            journal.lines += deltas.lines
            if deltas.lines:
                self._call.on_prefilled()
            journal.is_done = deltas.is_done
            if deltas.error is not None:
                raise UpstreamError.answered(self._side, self._worker.url, *deltas.error)
            if deltas.is_done:
                await self._client.end()
                return
            if events:
                await self._client.write()
        raise sent.broke_off()

    async def _generate_stream(self, sent: WorkerCall, prefill: asyncio.Task[list[Any]] | None) -> None:
        async for chunk in _chunks(sent) if prefill is None else _merged(_chunks(sent), prefill):
            if not self._client.started:
                self._raise_if_error(chunk)
                self._call.on_prefilled()
                await self._client.start(sent.status, answer_headers(sent))
            await self._client.write(chunk)
        if not self._client.started:
            await self._client.start(sent.status, answer_headers(sent))
        await self._client.end()

    def _raise_if_error(self, first_chunk: bytes) -> None:
        """A stream that begins with an error is an answer with that status: the client has seen nothing yet."""
        if b'"error"' not in first_chunk[:64]:
            return
        error = error_in_event(event_data(first_chunk.split(b"\n\n", 1)[0]))
        if error is not None:
            raise UpstreamError.answered(self._side, self._worker.url, *error)


async def _chunks(sent: WorkerCall) -> AsyncIterator[bytes]:
    while chunk := await sent.chunk():
        yield chunk


async def _merged(chunks: AsyncIterator[bytes], prefill: asyncio.Task[list[Any]]) -> AsyncIterator[bytes]:
    """The stream with the prompt's logprobs in each of its events."""
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
    return encode_event(data)


class _Interruption:
    """Ends what the block waits for when `prefill` fails: at once if that is the cause, else when decode has had its
    time to explain itself. `has_happened` after the block: whether it did."""

    def __init__(self, prefill: asyncio.Task[list[Any]]) -> None:
        self._prefill = prefill
        self._work: asyncio.Task[Any] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self.has_happened = False

    def __enter__(self) -> None:
        self._work = asyncio.current_task()
        self._prefill.add_done_callback(self._on_end)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> bool:
        work, self._work = self._work, None
        self._prefill.remove_done_callback(self._on_end)
        if self._timer is not None:
            self._timer.cancel()
        # Somebody else may want this task to end, too.
        return self.has_happened and work is not None and work.uncancel() == 0 and kind is asyncio.CancelledError

    def _on_end(self, prefill: asyncio.Task[list[Any]]) -> None:
        error = None if prefill.cancelled() else prefill.exception()
        if isinstance(error, UpstreamError) and not error.is_conclusive:
            self._timer = asyncio.get_running_loop().call_later(GRACE_SECONDS, self._interrupt)
        elif error is not None:
            self._interrupt()

    def _interrupt(self) -> None:
        if self._work is not None:
            self.has_happened = True
            self._work.cancel()


def _error_of(task: asyncio.Task[Any]) -> UpstreamError | None:
    """What an ended task failed with. Raises what is not an UpstreamError: a bug."""
    error = task.exception() if task.done() else None
    if error is None or isinstance(error, UpstreamError):
        return error
    raise error


def _events(body: bytes, worker: Worker) -> list[Any]:
    """The events of the prefill's stream. Raises UpstreamError if one of them reports an error."""
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
