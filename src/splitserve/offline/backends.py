"""Where an engine's requests go: to a scheduler process of its own, or to the router of a cluster on this machine.

Both take the body of POST /generate and give native answer objects, so nobody above can tell them apart.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, aclosing, suppress
from pathlib import Path
from typing import Any, Protocol

import httpx
import msgspec

from splitserve.config import WorkerConfig
from splitserve.errors import SplitserveError, WorkerUnavailableError
from splitserve.launch.scheduler_link import Schedulers, open_schedulers
from splitserve.metrics.worker import WorkerMetrics
from splitserve.offline.outputs import named_error
from splitserve.router.args import LBArgs
from splitserve.router.sse import EventSplitter, event_data
from splitserve.server import validation
from splitserve.server.answer import AbortedAnswerError
from splitserve.server.front_end import FrontEnd
from splitserve.server.generation import Generation
from splitserve.server.native import answer_object, prepare
from splitserve.server.requests import RequestTable
from splitserve.server.schemas import GenerateBody
from splitserve.server.tokenizer import Tokenizer

# Native answer objects of one request: those of a stream hold the whole so far, else there is one.
Answers = AsyncGenerator[dict[str, Any], None]

# Seconds that the scheduler's last words may be under way after its end.
_LAST_WORDS_SECONDS = 1.0
_CONNECT_SECONDS = 5.0
# The router gives a request up first, and says why.
_ANSWER_SECONDS = LBArgs().timeout + 30.0


class Backend(Protocol):
    """Used from one event loop. `close` also after an `open` that failed or was cancelled."""

    tokenizer: Tokenizer

    async def open(self) -> None:
        """Raises SplitserveError."""
        ...

    def answers(self, body: dict[str, Any]) -> Answers:
        """Of one prompt. Raises SplitserveError; close the generator to abort."""
        ...

    async def close(self) -> None: ...


class SchedulerBackend:
    """A front end without HTTP, over a scheduler process of its own."""

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

    async def answers(self, body: dict[str, Any]) -> Answers:
        front = self._front
        assert front is not None
        received_at = front.clock.now()
        parsed = validation.parse(GenerateBody, body)
        with validation.stage(body["rid"], "validation"):
            fanout, _ = prepare(front, parsed, body["rid"])
        try:
            async with aclosing(Generation(front, fanout, received_at).updates()) as updates:
                async for answer, _ in updates:
                    if parsed.stream or answer.finish is not None:
                        yield answer_object(front, answer, False)
        except AbortedAnswerError as error:
            raise named_error(error.message, error.reason, error.http_status, error.param) from error

    async def close(self) -> None:
        await self._closing.aclose()


class RouterBackend:
    """A client of the router at `url`."""

    def __init__(self, url: str, tokenizer: Tokenizer, transport: httpx.AsyncBaseTransport | None = None) -> None:
        self.tokenizer = tokenizer
        self._url = f"{url}/generate"
        # No limit on connections: the engine's places are the bound. No proxy stands between us and ourselves.
        self._http = httpx.AsyncClient(
            timeout=httpx.Timeout(_ANSWER_SECONDS, connect=_CONNECT_SECONDS),
            limits=httpx.Limits(max_connections=None),
            trust_env=False,
            transport=transport,
        )

    async def open(self) -> None:
        """The router serves already."""

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
                        if frame is not None:
                            yield _frame(frame)
        except httpx.HTTPError as error:
            raise WorkerUnavailableError(
                f"request {body['rid']}: the cluster's router did not answer to the end "
                f"({str(error) or type(error).__name__}): close this engine and open another"
            ) from error

    async def close(self) -> None:
        await self._http.aclose()


def _frame(frame: dict[str, Any]) -> dict[str, Any]:
    if "error" in frame:
        raise named_error(frame["error"]["message"], frame["error"]["code"], param=frame["error"]["param"])
    return frame


def _refusal(content: bytes, status: int) -> SplitserveError:
    try:
        error = msgspec.json.decode(content)["error"]
        return named_error(error["message"], error["code"], status, error["param"])
    except (msgspec.DecodeError, KeyError, TypeError):
        text = content[:500].decode(errors="replace")
        return WorkerUnavailableError(f"the cluster's router answered HTTP {status}: {text}")


async def _fail_at_end(schedulers: Schedulers) -> None:
    """When a process ends, everything open ends with that, unless it has said itself what is wrong."""
    what = await asyncio.shield(schedulers.ended)
    with suppress(SplitserveError):
        await schedulers.group.ready(_LAST_WORDS_SECONDS)
    schedulers.group.fail_all(
        WorkerUnavailableError(
            f"the engine's {what}; what it said is on standard error: close this engine, open another"
        )
    )
