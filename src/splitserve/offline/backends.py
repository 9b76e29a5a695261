"""Backends of an offline engine: a scheduler process of its own, or the router of a cluster on this machine.

Both have the same methods, used from one event loop. `open` and `answers` raise SplitserveError. `answers` yields the
native answer objects to a body of POST /generate; closing the generator aborts the request. `close` is also called
after a failed or cancelled `open`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import AsyncExitStack, aclosing, suppress
from pathlib import Path
from typing import Any

import httpx
import msgspec

from splitserve.api import validation
from splitserve.api.responses import EventSplitter, event_data
from splitserve.api.schemas import GenerateBody
from splitserve.api.tokenizer import Tokenizer
from splitserve.core.config import WorkerConfig
from splitserve.core.errors import (
    CapacityError,
    DeadlineExceededError,
    EngineError,
    GrammarError,
    InvalidRequestError,
    PromptTooLongError,
    RequestAbortedError,
    SplitserveError,
    WorkerUnavailableError,
)
from splitserve.observe.worker_metrics import WorkerMetrics
from splitserve.ranks.processes import Schedulers, open_schedulers
from splitserve.router.args import LBArgs
from splitserve.server.front_end import FrontEnd, RequestTable
from splitserve.server.generate_route import samples_of
from splitserve.server.generation import AbortedAnswerError, Generation
from splitserve.server.memory import MemoryControl
from splitserve.server.native import answer_object, read_generate
from splitserve.worker.memory import WorkerMemory
from splitserve.worker.registration import RouterRegistration
from splitserve.worker.role_switch import OwnBootstrap

# Native answer objects of one request: those of a stream contain all output so far, otherwise there is one.
Answers = AsyncGenerator[dict[str, Any], None]

# Seconds for which a last message of the scheduler may still arrive after its end.
_LAST_WORDS_SECONDS = 1.0
_CONNECT_SECONDS = 5.0
# Longer than the router's timeout, so that the router reports the reason first.
_ANSWER_SECONDS = LBArgs().timeout + 30.0
_BY_REASON: dict[str, type[SplitserveError]] = {
    kind.reason: kind
    for kind in (
        InvalidRequestError,
        PromptTooLongError,
        RequestAbortedError,
        CapacityError,
        WorkerUnavailableError,
        DeadlineExceededError,
        EngineError,
        GrammarError,
    )
}


class SchedulerBackend:
    """Front end without HTTP, with a scheduler process of its own."""

    def __init__(self, config: WorkerConfig, folder: Path, tokenizer: Tokenizer, load_timeout: float) -> None:
        self.tokenizer = tokenizer
        self._config = config
        self._folder = folder
        self._load_timeout = load_timeout
        self._closing = AsyncExitStack()
        self._front: FrontEnd | None = None

    async def open(self) -> None:
        schedulers = await open_schedulers(self._config, str(self._folder), self._closing)
        watch = asyncio.create_task(_fail_at_end(schedulers), name="scheduler-end")
        self._closing.callback(watch.cancel)
        await schedulers.group.ready(self._load_timeout)
        self._front = FrontEnd(
            config=self._config,
            scheduler=schedulers.group,
            tokenizer=self.tokenizer,
            model_path=str(self._folder),
            bootstrap_port=0,
            requests=RequestTable(self._config.max_open_requests),
            metrics=WorkerMetrics(self._config.model.model),
            scheduler_pids=schedulers.pids,
        )
        self._front.memory = memory = _memory_of(self._front)
        self._closing.push_async_callback(memory.close)

    @property
    def memory(self) -> MemoryControl:
        """Memory of the scheduler's process."""
        assert self._front is not None
        assert self._front.memory is not None
        return self._front.memory

    async def answers(self, body: dict[str, Any]) -> Answers:
        front = self._front
        assert front is not None
        received_at = front.clock.now()
        parsed = validation.parse(GenerateBody, body)
        with validation.stage(body["rid"], "validation"):
            fanout = samples_of(front, parsed, body["rid"], read_generate(front, parsed, body["rid"]))
        try:
            generation = Generation(front, fanout, received_at)
            with generation.memory:
                async with aclosing(generation.updates()) as updates:
                    async for answer, _ in updates:
                        if parsed.stream or answer.finish is not None:
                            yield answer_object(front, answer, False)
        except AbortedAnswerError as error:
            raise _named_error(error.message, error.reason, error.http_status, error.param) from error

    async def close(self) -> None:
        await self._closing.aclose()


class RouterBackend:
    """Client of the router at `url`."""

    def __init__(self, url: str, tokenizer: Tokenizer, transport: httpx.AsyncBaseTransport | None = None) -> None:
        self.tokenizer = tokenizer
        self._url = f"{url}/generate"
        # No limit on connections, as the engine's slots are the limit. No proxy to this machine.
        self._http = httpx.AsyncClient(
            timeout=httpx.Timeout(_ANSWER_SECONDS, connect=_CONNECT_SECONDS),
            limits=httpx.Limits(max_connections=None),
            trust_env=False,
            transport=transport,
        )

    @property
    def memory(self) -> MemoryControl:
        """Raise InvalidRequestError: the workers have routes for it."""
        raise InvalidRequestError(
            "this engine has prefill and decode workers: create one without them to change its memory or weights"
        )

    async def open(self) -> None:
        """Do nothing: the router already serves."""

    async def answers(self, body: dict[str, Any]) -> Answers:
        try:
            async with self._http.stream("POST", self._url, json=body) as response:
                if response.status_code != 200:
                    raise _refusal(await response.aread(), response.status_code)
                if not body["stream"]:
                    yield msgspec.json.decode(await response.aread())
                    return
                splitter = EventSplitter()
                async for chunk in response.aiter_bytes():
                    for frame in map(event_data, splitter.feed(chunk)):
                        if frame is not None and "error" in frame:
                            raise _error_of(frame["error"])
                        if frame is not None:
                            yield frame
        except httpx.HTTPError as error:
            raise WorkerUnavailableError(
                f"request {body['rid']}: the cluster's router did not answer to the end "
                f"({str(error) or type(error).__name__}): close this engine and open another"
            ) from error

    async def close(self) -> None:
        await self._http.aclose()


EngineBackend = SchedulerBackend | RouterBackend


def _memory_of(front: FrontEnd) -> WorkerMemory:
    """Return the memory control of a front end without HTTP. It has no router and no bootstrap server."""
    broken: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    bootstrap, registration = OwnBootstrap(front.config.disaggregation), RouterRegistration((), "127.0.0.1", 0)
    return WorkerMemory(front, front.scheduler, bootstrap, registration, broken)


def _named_error(message: str, reason: str, status: int | None = None, param: str | None = None) -> SplitserveError:
    """Return the error of our class with this reason code, from any process. `status` None: the class's default."""
    error = _BY_REASON.get(reason, SplitserveError)(message, param=param)
    error.reason, error.http_status = reason, error.http_status if status is None else status
    return error


def _error_of(error: Mapping[str, Any], status: int | None = None) -> SplitserveError:
    """Return the error in an error object of the router."""
    return _named_error(error["message"], error["code"], status, error["param"])


def _refusal(content: bytes, status: int) -> SplitserveError:
    try:
        return _error_of(msgspec.json.decode(content)["error"], status)
    except (msgspec.DecodeError, KeyError, TypeError):
        text = content[:500].decode(errors="replace")
        return WorkerUnavailableError(f"the cluster's router answered HTTP {status}: {text}")


async def _fail_at_end(schedulers: Schedulers) -> None:
    """When a process ends, end all open requests with that error, unless it has reported its own."""
    what = await asyncio.shield(schedulers.ended)
    with suppress(SplitserveError):
        await schedulers.group.ready(_LAST_WORDS_SECONDS)
    schedulers.group.fail_all(
        WorkerUnavailableError(
            f"the engine's {what}; what it said is on standard error: close this engine, open another"
        )
    )
