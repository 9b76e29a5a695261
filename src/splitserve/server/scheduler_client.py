"""Front end's client of one scheduler, over two ZMQ pipes.

Life cycle of one client request:
1. `submit` sends one sample (a GenerateRequest). Its OutputStream may also have samples in other schedulers.
2. The reader task receives StepOutputs and puts each TokenOutput into the stream of its rid. Outputs that a slow reader
   has not read are merged into one message per sample. So a stream never holds more than the requested tokens.
3. The stream returns them in order of arrival and ends after the last sample's final message.
4. If it is closed early, the scheduler is ordered to abort the running samples without a final message. Their rids are
   forgotten at once.

If the scheduler dies, `fail_all` ends every stream, call and wait with one error, and later calls raise it. This
module does not know HTTP, text or the start of processes. Used from one event loop's thread.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import msgspec
import zmq
import zmq.asyncio

from splitserve.core.errors import (
    DeadlineExceededError,
    ModelLoadError,
    SchedulerLostError,
    SplitserveError,
    WorkerUnavailableError,
)
from splitserve.core.messages import (
    AbortRequest,
    FlushCacheReply,
    FlushCacheRequest,
    FromScheduler,
    GenerateRequest,
    KVIndexReply,
    KVIndexRequest,
    MemoryRequest,
    RoleReply,
    RoleRequest,
    SchedulerFailed,
    SchedulerReady,
    StateReply,
    StateRequest,
    StepOutputs,
    StepsReply,
    StepsRequest,
    TokenOutput,
    ToScheduler,
    decode_from_scheduler,
    encode,
)

logger = logging.getLogger(__name__)
_Call = FlushCacheRequest | StateRequest | KVIndexRequest | StepsRequest | RoleRequest | MemoryRequest
_Reply = FlushCacheReply | StateReply | KVIndexReply | StepsReply | RoleReply
R = TypeVar("R", FlushCacheReply, StateReply, KVIndexReply, StepsReply, RoleReply)
# Unread messages to a scheduler. With more it counts as hung.
SEND_HIGH_WATER_MARK = 16384
# Seconds between two checks that the scheduler's pipe is connected.
CONNECT_POLL_SECONDS = 0.002
# Maximum output tokens that a sample is expected to generate. Samples without a limit rarely generate more.
FORESEEN_TOKENS = 4096


class OutputStream:
    """Async iterator of TokenOutput; ends after every sample's final one. Raises the error given to `fail`.

    `on_close` gets the rids of samples that are dropped before their end.
    """

    def __init__(self, rids: Sequence[str], on_close: Callable[[list[str]], None], timeout: float = 900.0) -> None:
        self.rids = tuple(rids)
        self._on_close = on_close
        # Timeout of one output, seconds.
        self._timeout = timeout
        # Samples that have not returned their final message yet.
        self._unfinished = set(rids)
        # rid -> outputs that arrived since the last read, merged; oldest first.
        self._pending: dict[str, TokenOutput] = {}
        # rid -> clock time at which the scheduler sent the first output, and the latest output, of the sample.
        self.first_sent_at: dict[str, float] = {}
        self.last_sent_at: dict[str, float] = {}
        self._error: SplitserveError | None = None
        self._arrived = asyncio.Event()

    def put(self, output: TokenOutput, sent_at: float = 0.0) -> None:
        """Add an output that the scheduler sent at this clock time. Called by the owner of the pipe."""
        if output.rid not in self._unfinished:
            return
        self.first_sent_at.setdefault(output.rid, sent_at)
        self.last_sent_at[output.rid] = sent_at
        earlier = self._pending.get(output.rid)
        self._pending[output.rid] = output if earlier is None else merge(earlier, output)
        self._arrived.set()

    def fail(self, error: SplitserveError) -> None:
        """End the stream with `error`, after the outputs that have arrived."""
        self._error = error
        self._arrived.set()

    def drop(self, rid: str) -> None:
        """Drop one sample because a stop string matched. No more of its outputs are returned."""
        if rid in self._unfinished:
            self._unfinished.discard(rid)
            self._pending.pop(rid, None)
            self._on_close([rid])

    def close(self) -> None:
        """Drop all unfinished samples. Idempotent; never waits, so a cancelled task may call it."""
        dropped = [rid for rid in self.rids if rid in self._unfinished]
        self._unfinished.clear()
        self._pending.clear()
        if dropped:
            self._on_close(dropped)

    def __aiter__(self) -> OutputStream:
        return self

    async def __anext__(self) -> TokenOutput:
        while not self._pending:
            if not self._unfinished:
                raise StopAsyncIteration
            if self._error is not None:
                raise self._error
            await self._wait()
        output = self._pending.pop(next(iter(self._pending)))
        if output.finish is not None:
            self._unfinished.discard(output.rid)
        return output

    async def _wait(self) -> None:
        self._arrived.clear()
        try:
            async with asyncio.timeout(self._timeout):
                await self._arrived.wait()
        except TimeoutError:
            raise DeadlineExceededError(
                f"request {self.rids[0]}: no output from the scheduler for {self._timeout:g} s "
                "(stage: generation); the request was aborted, send it again"
            ) from None


def merge(first: TokenOutput, second: TokenOutput) -> TokenOutput:
    """Merge two consecutive outputs of one sample."""
    return msgspec.structs.replace(
        second,
        token_ids=[*first.token_ids, *second.token_ids],
        logprobs=[*first.logprobs, *second.logprobs],
        hidden_states=[*first.hidden_states, *second.hidden_states],
        input_logprobs=first.input_logprobs if second.input_logprobs is None else second.input_logprobs,
        num_cached_tokens=max(first.num_cached_tokens, second.num_cached_tokens),
        stages=second.stages or first.stages,
    )


@dataclass(frozen=True, slots=True)
class OpenSample:
    stream: OutputStream
    # Tokens of its prompt and of the expected output.
    num_tokens: int
    submission: int


class SchedulerClient:
    """Client that binds `to_scheduler` (PUSH) and `from_scheduler` (PULL); the scheduler connects to both.

    Endpoints are ipc:// or tcp:// strings; after `start`, the attributes are the bound endpoints (`:*` is resolved).
    """

    def __init__(self, to_scheduler: str, from_scheduler: str) -> None:
        self.to_scheduler = to_scheduler
        self.from_scheduler = from_scheduler
        self.info: SchedulerReady | None = None
        self.failure: SplitserveError | None = None
        self._context: zmq.asyncio.Context = zmq.asyncio.Context()
        # A plain socket, not asyncio's: its sends never wait, so a task that is being cancelled can send an abort.
        self._push: zmq.Socket[bytes] = zmq.Socket(self._context, zmq.PUSH)
        self._pull = self._context.socket(zmq.PULL)
        self._reader: asyncio.Task[None] | None = None
        self._is_known = asyncio.Event()
        # Open samples by rid.
        self._open: dict[str, OpenSample] = {}
        # Tokens of all open samples.
        self.num_tokens_outstanding = 0
        self._calls: dict[int, asyncio.Future[_Reply]] = {}
        self._call_ids = itertools.count(1)
        self._submissions = itertools.count(1)

    async def start(self) -> None:
        self._push.set_hwm(SEND_HIGH_WATER_MARK)
        # Unbounded: there is one message per step, and every token must arrive.
        self._pull.set_hwm(0)
        for socket in (self._push, self._pull):
            socket.linger = 0
        self._push.bind(self.to_scheduler)
        self._pull.bind(self.from_scheduler)
        self.to_scheduler = self._push.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")
        self.from_scheduler = self._pull.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")
        self._reader = asyncio.create_task(self._read(), name="scheduler-reader")

    async def ready(self, timeout: float) -> SchedulerReady:
        """Wait until the scheduler is ready.

        Raises ModelLoadError, DeadlineExceededError, or the error given to `fail_all`.
        """
        try:
            async with asyncio.timeout(timeout):
                await self._is_known.wait()
        except TimeoutError:
            raise DeadlineExceededError(
                f"the scheduler was not ready after {timeout:g} s (stage: loading the model): look at its log"
            ) from None
        if self.info is None:
            raise self.failure or WorkerUnavailableError("the scheduler's client was closed")
        return self.info

    def submit(self, request: GenerateRequest, stream: OutputStream) -> None:
        """Send a sample with outputs for `stream`. Raises WorkerUnavailableError."""
        self._check_serving()
        num_tokens = len(request.prompt_ids) + min(request.params.max_new_tokens, FORESEEN_TOKENS)
        submission = next(self._submissions)
        self._open[request.rid] = OpenSample(stream, num_tokens, submission)
        self.num_tokens_outstanding += num_tokens
        self._send(msgspec.structs.replace(request, sent_at=time.monotonic(), submission=submission))

    def abort(self, rid: str, message: str = "aborted") -> None:
        """End a request; its stream gets the scheduler's final message. An unknown rid is ignored."""
        if rid in self._open and self.failure is None:
            self._send(AbortRequest(rid=rid, message=message))

    async def call(self, request: Callable[[int], _Call], reply: type[R], timeout: float) -> R:
        """Return the scheduler's reply to the message that `request` makes with the id of this call.

        Raises DeadlineExceededError, WorkerUnavailableError; then the outcome is unknown.
        """
        self._check_serving()
        message = request(next(self._call_ids))
        call: asyncio.Future[_Reply] = asyncio.get_running_loop().create_future()
        self._calls[message.call_id] = call
        try:
            self._send(message)
            async with asyncio.timeout(timeout):
                answer = await call
        except TimeoutError:
            name = type(message).__name__
            raise DeadlineExceededError(f"the scheduler did not answer {name} within {timeout:g} s") from None
        finally:
            del self._calls[message.call_id]
        assert isinstance(answer, reply)
        return answer

    def break_off(self, error: SplitserveError) -> None:
        """End all open requests with `error`. The scheduler continues to serve."""
        for stream in {sample.stream for sample in self._open.values()}:
            stream.fail(error)
        self.give_up(list(self._open))

    def fail_all(self, error: SplitserveError) -> None:
        """End all open requests with `error` because the scheduler is lost. The first error stays."""
        if self.failure is not None:
            return
        self.failure = error
        self.info = None
        self._is_known.set()
        for stream in {sample.stream for sample in self._open.values()}:
            stream.fail(error)
        self._open.clear()
        self.num_tokens_outstanding = 0
        for call in self._calls.values():
            if not call.done():
                call.set_exception(error)

    def failed(self, message: str, exit_code: int = 1) -> None:
        """Store the failure that the scheduler, or a rank that it needs, reported at its end."""
        kind = ModelLoadError if self.info is None else SchedulerLostError
        self.fail_all(kind(message, exit_code=exit_code))

    async def close(self) -> None:
        """Close the sockets. Idempotent."""
        self.fail_all(WorkerUnavailableError("this worker is shutting down: send the request to another"))
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.gather(self._reader, return_exceptions=True)
            self._reader = None
        self._push.close()
        self._pull.close()
        self._context.term()

    async def _read(self) -> None:
        while True:
            frame = await self._pull.recv()
            try:
                message = decode_from_scheduler(frame)
                if isinstance(message, SchedulerReady):
                    await self._connected()
                self._dispatch(message)
            except msgspec.DecodeError as error:
                self.fail_all(
                    WorkerUnavailableError(f"the scheduler speaks another version ({error}): restart the whole worker")
                )

    async def _connected(self) -> None:
        """Wait until requests can be sent: the two pipes connect one by one, so "ready" may arrive before."""
        # A plain socket does not report its connection.
        while self.failure is None and not self._push.poll(0, zmq.POLLOUT):  # noqa: ASYNC110
            await asyncio.sleep(CONNECT_POLL_SECONDS)

    def _dispatch(self, message: FromScheduler) -> None:
        match message:
            case StepOutputs(outputs=outputs, sent_at=sent_at):
                for output in outputs:
                    # Late outputs of a stream that was closed early are dropped, also if a newer one has its rid.
                    sample = self._open.get(output.rid)
                    if sample is not None and sample.submission == output.submission:
                        if output.finish is not None:
                            self._forget(output.rid)
                        sample.stream.put(output, sent_at)
            case FlushCacheReply() | StateReply() | KVIndexReply() | StepsReply() | RoleReply() as reply:
                call = self._calls.get(reply.call_id)
                if call is not None and not call.done():
                    call.set_result(reply)
            case SchedulerReady() as info if self.failure is None:
                self.info = info
                self._is_known.set()
            case SchedulerFailed(message=text, exit_code=exit_code):
                self.failed(text, exit_code)

    def _forget(self, rid: str) -> bool:
        """Remove a sample. Return whether it was open."""
        sample = self._open.pop(rid, None)
        if sample is not None:
            self.num_tokens_outstanding -= sample.num_tokens
        return sample is not None

    def give_up(self, rids: list[str]) -> None:
        """Abort samples that are no longer needed. Unknown rids are skipped."""
        for rid in rids:
            if self._forget(rid) and self.failure is None:
                try:
                    self._send(AbortRequest(rid=rid, quiet=True))
                except WorkerUnavailableError as error:
                    logger.error("could not abort request %s: %s", rid, error)

    def _check_serving(self) -> None:
        if self.failure is not None:
            raise WorkerUnavailableError(f"this worker's scheduler is gone: {self.failure}")
        if self.info is None:
            raise WorkerUnavailableError("this worker is still loading its model: retry when /health answers 200")

    def _send(self, message: ToScheduler) -> None:
        try:
            self._push.send(encode(message), zmq.NOBLOCK)
        except zmq.Again:
            raise WorkerUnavailableError("this worker's scheduler does not read its messages: restart it") from None
