"""Exchange of one client request with a pair of workers, from dispatch to the last byte.

1. The same bytes are sent to both workers at the same time.
2. Decode's answer is forwarded to the client, a stream event by event.
3. The prefill's answer is read in parallel. It confirms the KV transfer and carries the prompt's logprobs.
4. If one worker fails, the pair fails: the other request is cancelled; its worker detects the disconnect and aborts.
   The cause (see `upstream.py`) is raised, and the caller decides whether another pair can continue.
5. If the client disconnects, both requests are cancelled (see `client_stream.py`), and also if it reads so slowly that
   the time of the request ends first.

Journal: a worker that announces one in a header sends the events of one delta and then a line, an SSE comment, that
describes them. Whole deltas are sent to the client, and their lines are stored with its stream. So the client has a
delta if and only if its line is stored, wherever the stream breaks, and the next worker continues from these lines.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from splitserve.api.responses import EventSplitter, Headers, event_data, split_trace, trace_in
from splitserve.api.schemas import JOURNAL_HEADER
from splitserve.core.errors import UNREADABLE
from splitserve.process.threads import end_tasks
from splitserve.router.admission import IsolationTurn
from splitserve.router.client_stream import ClientStream
from splitserve.router.latencies import StreamPace
from splitserve.router.pairing import Fields, PromptLogprobs, answer_objects, event_fields
from splitserve.router.request_trace import CallTrace, RequestTrace
from splitserve.router.upstream import Upstream, UpstreamError, WorkerCall, answer_headers, error_in_event
from splitserve.router.worker import Worker, WorkerPair

# Seconds in which the second worker may report its cause after the first has failed without a conclusive one.
GRACE_SECONDS = 0.25
# Seconds in which the prefill worker may finish its answer after decode has answered in full.
LINGER_SECONDS = 5.0
# Seconds after the end of a request's time in which its client may read the rest.
READ_SECONDS = 2 * LINGER_SECONDS
_DONE = b"data: [DONE]\n\n"

# Reader of the prefill's answer, for the prompt's logprobs in it. None: they are not needed.
PrefillReader = asyncio.Task[PromptLogprobs] | None


@dataclass(slots=True)
class ForwardedRequest:
    """One attempt of a client request, as it is sent to the workers."""

    client: ClientStream
    path: str
    body: bytes
    headers: Headers
    # Timeout of the request, seconds.
    seconds: float
    # Trace that records the times of the client's request.
    trace: RequestTrace
    # Meter of the time between its tokens.
    pace: StreamPace
    # Whether the answer is streamed.
    is_stream: bool
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


async def forward(upstream: Upstream, target: WorkerPair | Worker, call: ForwardedRequest) -> None:
    """Serve a request with a pair or one worker.

    If it fails, raise the UpstreamError that is the cause, after all requests to workers have ended.
    """
    try:
        # All waits for workers end with the time of the request. What lasts longer is a wait for the client.
        async with asyncio.timeout(call.seconds + READ_SECONDS):
            await _forward(upstream, target, call)
    except TimeoutError:
        await call.client.drop()


async def _forward(upstream: Upstream, target: WorkerPair | Worker, call: ForwardedRequest) -> None:
    if isinstance(target, Worker):
        await _forward_answer(upstream, target, call, None)
        return
    with target.prefill.serving_on(target.prefill_rank):
        prefill = asyncio.create_task(_read_prefill(upstream, target.prefill, call))
        try:
            errors = await _forward_unless_failed(upstream, target.decode, call, prefill)
            if errors:
                raise min(errors, key=lambda e: e.cause)
            if not prefill.done():
                await asyncio.wait({prefill}, timeout=LINGER_SECONDS)
        finally:
            if not prefill.done():
                await end_tasks((prefill,))
            elif not prefill.cancelled():
                # Its error no longer matters, but asyncio logs an error that is never read.
                prefill.exception()


async def _forward_unless_failed(
    upstream: Upstream, decode: Worker, call: ForwardedRequest, prefill: asyncio.Task[PromptLogprobs]
) -> list[UpstreamError]:
    """Forward decode's answer to the client, unless prefill fails. Return the failures, the first one first.

    Empty: the client has the whole answer. If one worker fails, the other may still report the cause for a short
    time; decode may also finish successfully in that time.
    """
    scope = asyncio.timeout(None)

    def interrupt(task: asyncio.Task[PromptLogprobs]) -> None:
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
            await _forward_answer(upstream, decode, call, prefill if call.merge_logprobs else None)
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


async def _read_prefill(upstream: Upstream, worker: Worker, call: ForwardedRequest) -> PromptLogprobs:
    """Return the prompt's logprobs in the prefill's answer, if they are needed."""
    sent, trace = _post(upstream, worker, call)
    try:
        await sent.head()
        body = await sent.read()
        if not sent.is_event_stream:
            body, sent.report = split_trace(body)
    finally:
        sent.close()
        trace.report = sent.report
    objects: list[Fields] = []
    if sent.is_event_stream:
        whole = EventSplitter().feed(body)
        trace.report = next(filter(None, map(trace_in, whole)), b"")
        for event in whole:
            if (error := _error_in(event)) is not None:
                raise UpstreamError.answered(worker, *error)
        objects = [fields for event in whole if call.merge_logprobs and (fields := event_fields(event))]
    elif call.merge_logprobs:
        try:
            objects = answer_objects(body)
        except UNREADABLE:
            message = "the prefill worker sent an answer that is not JSON: check that it is a worker"
            raise UpstreamError.lost(worker, 502, message) from None
    call.mark_prefilled()
    return PromptLogprobs(objects)


async def _forward_answer(upstream: Upstream, worker: Worker, call: ForwardedRequest, prefill: PrefillReader) -> None:
    """Send the request to a worker and forward its answer to the client. Raises UpstreamError."""
    sent, trace = _post(upstream, worker, call)
    try:
        await sent.head()
        trace.head_at = time.monotonic()
        if call.client.lines and JOURNAL_HEADER not in sent.headers:
            raise sent.broken_off()
        if sent.is_event_stream:
            await _forward_stream(sent, trace, worker, call, prefill)
            return
        body, sent.report = split_trace(await sent.read())
    finally:
        sent.close()
        trace.report = sent.report or trace.report
    if prefill is not None:
        body = (await asyncio.shield(prefill)).merge_answer(body)
    await call.client.respond(sent.status, body, answer_headers(sent))


def _post(upstream: Upstream, worker: Worker, call: ForwardedRequest) -> tuple[WorkerCall, CallTrace]:
    """Send the request to a worker. Return the call, and the trace of its times."""
    sent = upstream.post(worker, call.path, call.body, call.headers, call.seconds, is_stream=call.is_stream)
    return sent, call.trace.call(worker.url, worker.mode.value, time.monotonic())


async def _forward_stream(
    sent: WorkerCall, trace: CallTrace, worker: Worker, call: ForwardedRequest, prefill: PrefillReader
) -> None:
    client, reader = call.client, _DeltaReader(has_journal=JOURNAL_HEADER in sent.headers)
    while not client.is_done:
        chunk = await sent.chunk()
        deltas = reader.feed(chunk)
        events, trace.report = deltas.events, deltas.trace or trace.report
        if prefill is not None and events:
            events = list(map((await asyncio.shield(prefill)).merge_event, events))
        if not client.started and (events or deltas.is_done):
            await client.start(sent.status, answer_headers(sent))
        # Update journal and client without an await in between. Otherwise the next worker could continue at the wrong
        # delta.
        client.accept(b"".join(events))
        client.lines += deltas.lines
        client.is_done = deltas.is_done
        if events:
            call.mark_prefilled()
            if call.pace.is_open:
                call.pace.observe(len(deltas.lines) or len(events))
        if deltas.error is not None:
            raise UpstreamError.answered(worker, *deltas.error)
        if not chunk and not deltas.is_done:
            raise sent.broken_off()
        if events and not deltas.is_done:
            await client.write()
    await client.end()


@dataclass(slots=True)
class _Deltas:
    """Deltas completed by a chunk: events for the client, and their journal lines."""

    events: list[bytes] = field(default_factory=list)
    lines: list[bytes] = field(default_factory=list)
    is_done: bool = False
    # JSON of the worker's trace. Empty: these events contain none.
    trace: bytes = b""
    # Status and body of the error that ended the stream; its event is not among `events`.
    error: tuple[int, bytes] | None = None


class _DeltaReader:
    """Splitter of one attempt's stream into whole deltas. Without a journal each event is one, and the end is the
    end of the bytes."""

    def __init__(self, *, has_journal: bool) -> None:
        self._has_journal = has_journal
        self._splitter = EventSplitter()
        # Events that still miss their journal line.
        self._pending: list[bytes] = []

    def feed(self, chunk: bytes) -> _Deltas:
        """Return the deltas that `chunk` completes. Empty chunk: the end of the bytes."""
        ready, has_journal = _Deltas(), self._has_journal
        for event in self._splitter.feed(chunk):
            if trace := trace_in(event):
                ready.trace = trace
                continue
            if has_journal and event.startswith(b":"):
                ready.lines.append(event[1:].strip())
                ready.events += self._pending
                self._pending.clear()
                continue
            if (error := _error_in(event)) is not None:
                ready.error = error
                return ready
            if has_journal and event != _DONE:
                self._pending.append(event)
                continue
            ready.events += [*self._pending, event]
            ready.is_done = has_journal
        if not chunk and not has_journal:
            ready.events += [self._splitter.rest] if self._splitter.rest else []
            ready.is_done = True
        return ready


def _error_in(event: bytes) -> tuple[int, bytes] | None:
    """Return status and body of the error in an event. None: it is none."""
    return error_in_event(event_data(event)) if b'"error"' in event[:64] else None


def _error_of(task: asyncio.Task[Any]) -> UpstreamError | None:
    """Return the error of an ended task. Raises any error that is not an UpstreamError: it is a bug."""
    error = task.exception() if task.done() else None
    if error is None or isinstance(error, UpstreamError):
        return error
    raise error
