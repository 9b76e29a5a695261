"""Front end's client of one scheduler, over two ZMQ pipes.

Life cycle of one client request:
1. `submit` sends its samples (one GenerateRequest each). It opens one OutputStream for all of them, or uses the given
   one that also has samples in other schedulers.
2. The reader task receives StepOutputs and puts each TokenOutput into the stream of its rid.
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
from dataclasses import dataclass

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
    GenerateRequest,
    KVIndexReply,
    KVIndexRequest,
    RoleReply,
    RoleRequest,
    RoleStep,
    SchedulerFailed,
    SchedulerReady,
    SchedulerState,
    StateReply,
    StateRequest,
    StepOutputs,
    TokenOutput,
    ToScheduler,
    decode_from_scheduler,
    encode,
)
from splitserve.core.request import DisaggregationMode
from splitserve.server.output_stream import OutputStream

logger = logging.getLogger(__name__)

_Reply = FlushCacheReply | StateReply | KVIndexReply | RoleReply

# Unread messages to a scheduler. With more it counts as hung.
SEND_HIGH_WATER_MARK = 16384
# Maximum output tokens that a sample is expected to generate. Samples without a limit rarely generate more.
FORESEEN_TOKENS = 4096


@dataclass(frozen=True, slots=True)
class OpenSample:
    stream: OutputStream
    # Tokens of its prompt and of the expected output.
    num_tokens: int


class SchedulerClient:
    """Client that binds `to_scheduler` (PUSH) and `from_scheduler` (PULL); the scheduler connects to both.

    Endpoints are ipc:// or tcp:// strings; after `start`, the attributes are the bound endpoints (`:*` is resolved).
    `output_timeout`: seconds a stream waits for its next output before it aborts the request.
    """

    def __init__(self, to_scheduler: str, from_scheduler: str, *, output_timeout: float = 900.0) -> None:
        self.to_scheduler = to_scheduler
        self.from_scheduler = from_scheduler
        self.info: SchedulerReady | None = None
        self.failure: SplitserveError | None = None
        self._output_timeout = output_timeout
        self._context: zmq.asyncio.Context = zmq.asyncio.Context()
        # A plain socket, not asyncio's: its sends never wait, so a task that is being cancelled can send an abort.
        self._push: zmq.Socket[bytes] = zmq.Socket(self._context, zmq.PUSH)
        self._pull = self._context.socket(zmq.PULL)
        self._reader: asyncio.Task[None] | None = None
        self._settled = asyncio.Event()
        # Open samples by rid.
        self._open: dict[str, OpenSample] = {}
        # Tokens of all open samples.
        self.num_tokens_outstanding = 0
        self._calls: dict[int, asyncio.Future[_Reply]] = {}
        self._call_ids = itertools.count(1)

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
                await self._settled.wait()
        except TimeoutError:
            raise DeadlineExceededError(
                f"the scheduler was not ready after {timeout:g} s (stage: loading the model): look at its log"
            ) from None
        if self.info is None:
            raise self.failure or WorkerUnavailableError("the scheduler's client was closed")
        return self.info

    def submit(self, *requests: GenerateRequest, into: OutputStream | None = None) -> OutputStream:
        """Send samples of one client request. Raises WorkerUnavailableError.

        `into`: their stream, with an owner that calls `give_up`. None: a new one.
        """
        self._check_serving()
        stream = into or OutputStream([r.rid for r in requests], self.give_up, self._output_timeout)
        for request in requests:
            num_tokens = len(request.prompt_ids) + min(request.params.max_new_tokens, FORESEEN_TOKENS)
            self._open[request.rid] = OpenSample(stream, num_tokens)
            self.num_tokens_outstanding += num_tokens
        try:
            for request in requests:
                self._send(request)
        except WorkerUnavailableError:
            stream.close()
            raise
        return stream

    def abort(self, rid: str, message: str = "aborted") -> None:
        """End a request; its stream gets the scheduler's final message. An unknown rid is ignored."""
        if rid in self._open and self.failure is None:
            self._send(AbortRequest(rid=rid, message=message))

    async def flush_cache(self, timeout: float = 10.0) -> int:
        """Drop the unused prefix cache. Return the number of pages freed."""
        call_id = next(self._call_ids)
        reply = await self._call(call_id, FlushCacheRequest(call_id=call_id), timeout)
        assert isinstance(reply, FlushCacheReply)
        return reply.num_pages_freed

    async def state(self, timeout: float = 2.0) -> SchedulerState:
        """Return a snapshot. Raises DeadlineExceededError, WorkerUnavailableError."""
        call_id = next(self._call_ids)
        reply = await self._call(call_id, StateRequest(call_id=call_id), timeout)
        assert isinstance(reply, StateReply)
        return reply.state

    async def kv_index(self, timeout: float = 10.0) -> bytes:
        """Return all held blocks: JSON of an IndexSnapshot. Raises DeadlineExceededError, WorkerUnavailableError."""
        call_id = next(self._call_ids)
        reply = await self._call(call_id, KVIndexRequest(call_id=call_id), timeout)
        assert isinstance(reply, KVIndexReply)
        return reply.snapshot

    async def role(
        self,
        step: RoleStep,
        *,
        mode: DisaggregationMode = DisaggregationMode.NULL,
        bootstrap_url: str | None = None,
        settle: float = 0.0,
        timeout: float = 30.0,
    ) -> RoleReply:
        """Order a step of a role switch, see RoleRequest. Return the reply: done or refused.

        Raises DeadlineExceededError, or WorkerUnavailableError if the outcome is unknown. `settle`: seconds that the
        scheduler itself may take for the step.
        """
        call_id = next(self._call_ids)
        order = RoleRequest(call_id=call_id, step=step, mode=mode, bootstrap_url=bootstrap_url, timeout=settle)
        reply = await self._call(call_id, order, timeout)
        assert isinstance(reply, RoleReply)
        return reply

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
        self._settled.set()
        for stream in {sample.stream for sample in self._open.values()}:
            stream.fail(error)
        self._open.clear()
        self.num_tokens_outstanding = 0
        for call in self._calls.values():
            if not call.done():
                call.set_exception(error)

    def failed(self, message: str) -> None:
        """Store the failure that the scheduler, or a rank that it needs, reported at its end."""
        self.fail_all(ModelLoadError(message) if self.info is None else SchedulerLostError(message))

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
                self._dispatch(frame)
            except msgspec.DecodeError as error:
                self.fail_all(
                    WorkerUnavailableError(f"the scheduler speaks another version ({error}): restart the whole worker")
                )

    def _dispatch(self, frame: bytes) -> None:
        match decode_from_scheduler(frame):
            case StepOutputs(outputs=outputs):
                for output in outputs:
                    self._deliver(output)
            case FlushCacheReply() | StateReply() | KVIndexReply() | RoleReply() as reply:
                call = self._calls.get(reply.call_id)
                if call is not None and not call.done():
                    call.set_result(reply)
            case SchedulerReady() as info:
                self.info = info
                self._settled.set()
            case SchedulerFailed(message=message):
                self.failed(message)

    def _deliver(self, output: TokenOutput) -> None:
        # Outputs of a stream that was closed early may still arrive: they are dropped.
        sample = self._open.get(output.rid)
        if sample is None:
            return
        if output.finish is not None:
            self._forget(output.rid)
        sample.stream.put(output)

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

    async def _call(self, call_id: int, message: ToScheduler, timeout: float) -> _Reply:
        self._check_serving()
        call: asyncio.Future[_Reply] = asyncio.get_running_loop().create_future()
        self._calls[call_id] = call
        try:
            self._send(message)
            async with asyncio.timeout(timeout):
                return await call
        except TimeoutError:
            name = type(message).__name__
            raise DeadlineExceededError(f"the scheduler did not answer {name} within {timeout:g} s") from None
        finally:
            del self._calls[call_id]

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
