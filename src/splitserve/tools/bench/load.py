"""Load generator: streamed requests to /v1/completions in a closed or an open loop, with the time of each token.

closed loop   `concurrency` clients. Each sends its next request after the last token of the one before.
open loop     Each request is sent at its own time, whatever is in flight. A slow server does not slow down its load.

1. A request asks for an exact number of tokens, greedy, with their ids: a token without complete text brings no text,
   and would not be detected. If a server sends no ids, an event with text counts as one token, and `usage` at the end
   gives the total.
2. An answer of another length than requested is an error, because figures of unequal work cannot be compared.
3. Failed requests are counted, and the load goes on. The caller decides what they mean for the figures.
"""

from __future__ import annotations

import asyncio
import math
import re
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

import aiohttp

from splitserve.tools.bench.stats import StreamRecord
from splitserve.tools.bench.workload import LoadRequest, Prompt
from splitserve.tools.client import STREAM_TIMEOUT, RequestFailedError, open_session, parse_event, stream

_REQUEST_ID = re.compile(r"\b[0-9a-f]{32}\b")
# Fields beyond OpenAI's. Splitserve and vLLM support both. Most servers ignore unknown fields.
_EXACT = {"ignore_eos": True, "return_token_ids": True}


@dataclass(frozen=True, slots=True)
class Endpoint:
    """An OpenAI-compatible server."""

    # URL without /v1.
    url: str
    model: str
    # Whether prompts are sent as text: not every server accepts token ids.
    prompt_as_text: bool = False
    # Fields of the body to add or replace. None: omit the field.
    extra_body: Mapping[str, Any] = field(default_factory=dict)
    # Headers of each request.
    headers: Mapping[str, str] = field(default_factory=dict)

    def body(self, request: LoadRequest) -> dict[str, Any]:
        prompt = request.prompt
        if self.prompt_as_text and not prompt.text:
            raise RequestFailedError(
                "this tokenizer has too few words of one token for prompts as text: send token ids"
            )
        body = {
            "model": self.model,
            "prompt": prompt.text if self.prompt_as_text else prompt.ids,
            "max_tokens": request.max_tokens,
            "temperature": 0.0,
            "stream": True,
            "stream_options": {"include_usage": True},
            **_EXACT,
            **self.extra_body,
        }
        return {name: value for name, value in body.items() if value is not None}

    def ask(self, prompts: Iterable[Prompt], max_tokens: int, **how: Any) -> list[StreamRecord]:
        """Send prompts as `running_load` does, all at once by default, and return their records.

        Raises RequestFailedError if one fails.
        """
        requests = [LoadRequest(prompt, max_tokens) for prompt in prompts]
        return asyncio.run(run_load(self, requests, **{"concurrency": len(requests), **how})).complete()


async def complete(
    session: aiohttp.ClientSession, endpoint: Endpoint, request: LoadRequest, record: StreamRecord
) -> None:
    """Run one stream and fill `record` as its tokens arrive. Raises RequestFailedError."""
    usage: dict[str, Any] = {}
    has_ids = True

    def take(line: bytes) -> None:
        nonlocal has_ids
        now = time.perf_counter()
        event = parse_event(line)
        if event is None:
            return
        usage.update(event.get("usage") or {})
        if count := num_tokens_of(event):
            record.arrived_at.append(now)
            record.arrived.append(count)
            has_ids = has_ids and all(choice.get("token_ids") is not None for choice in event["choices"])

    await stream(session, f"{endpoint.url}/v1/completions", endpoint.body(request), take, endpoint.headers)
    num_arrived = sum(record.arrived)
    # Tokens with ids are counted exactly: `usage` could have tokens that did not arrive.
    record.num_output_tokens = num_arrived if has_ids else usage.get("completion_tokens") or num_arrived
    record.num_prompt_tokens = usage.get("prompt_tokens") or len(request.prompt.ids)
    if record.num_output_tokens != request.max_tokens or not record.arrived_at:
        brought = f"{record.num_output_tokens} of {request.max_tokens} tokens"
        raise RequestFailedError(f"{endpoint.url}: a stream brought {brought}: see the server's log")


def num_tokens_of(event: Mapping[str, Any]) -> int:
    """Return the number of output tokens of one event."""
    total = 0
    for choice in event.get("choices") or ():
        ids = choice.get("token_ids")
        total += len(ids) if ids is not None else bool(choice.get("text"))
    return total


@dataclass(slots=True)
class StreamLoad:
    """One run of a load, with its results so far."""

    endpoint: Endpoint
    session: aiohttp.ClientSession
    # All streams in the order in which they were sent, and those that have not ended.
    streams: list[StreamRecord] = field(default_factory=list)
    running: list[StreamRecord] = field(default_factory=list)
    # Records in the order of the ends of their requests.
    records: list[StreamRecord] = field(default_factory=list)
    # Messages of failed requests -> number of requests.
    errors: Counter[str] = field(default_factory=Counter)
    # First message of each kind by its text without ids of requests.
    _messages: dict[str, str] = field(default_factory=dict)
    # Seconds from the start to the end of the last request.
    elapsed: float = 0.0
    # Ends with the last request.
    task: asyncio.Task[None] = field(init=False)

    @property
    def num_failed(self) -> int:
        return self.errors.total()

    def complete(self) -> list[StreamRecord]:
        """Return all records. Raises RequestFailedError if a request failed."""
        if self.errors:
            error, _ = self.errors.most_common(1)[0]
            raise RequestFailedError(
                f"{self.num_failed} of {self.num_failed + len(self.records)} requests failed: {error}"
            )
        return self.records

    async def run(
        self, requests: Iterator[LoadRequest], concurrency: int | None, duration: float, pause: float
    ) -> None:
        """Send the requests, as `running_load` describes. An open loop has a client for each of them."""
        if concurrency is None:
            sources = [iter([request]) for request in takewhile(lambda r: r.send_at < duration, requests)]
        else:
            # Clients share the iterator: the next free one takes the next request.
            sources = [requests] * concurrency
        # Preparing the requests took time.
        began = time.perf_counter()

        async def client(source: Iterator[LoadRequest]) -> None:
            for request in source:
                if concurrency is None:
                    due = began + request.send_at
                    await asyncio.sleep(due - time.perf_counter())
                else:
                    due = time.perf_counter()
                    if due - began >= duration:
                        return
                if not await self.send(request, due):
                    await asyncio.sleep(pause)

        async with asyncio.TaskGroup() as clients:
            for source in sources:
                clients.create_task(client(source))
        self.elapsed = time.perf_counter() - began

    async def send(self, request: LoadRequest, due: float) -> bool:
        """Send one request and wait for its end. Return whether it succeeded. `due`: start of its times."""
        record = StreamRecord(due)
        self.streams.append(record)
        self.running.append(record)
        try:
            await complete(self.session, self.endpoint, request, record)
        except RequestFailedError as error:
            # The first message stands for those that differ in the id of the request alone.
            self.errors[self._messages.setdefault(_REQUEST_ID.sub("", error.message), error.message)] += 1
            return False
        finally:
            # Records of two streams may be equal, so `remove` could take another one.
            self.running = [other for other in self.running if other is not record]
        self.records.append(record)
        return True


@asynccontextmanager
async def running_load(
    endpoint: Endpoint,
    requests: Iterable[LoadRequest],
    *,
    concurrency: int | None = None,
    duration: float = math.inf,
    timeout: float = STREAM_TIMEOUT,
    pause: float = 0.0,
) -> AsyncIterator[StreamLoad]:
    """Run requests in a closed loop of `concurrency`, or with None at the `send_at` of each.

    The end of the block closes the connections of requests in flight. `duration`: seconds after which no request is
    sent; those in flight continue to their end. `timeout`: seconds of a stream. `pause`: seconds for which a client of
    a closed loop waits after a request that failed.
    """
    async with open_session(timeout) as session:
        load = StreamLoad(endpoint, session)
        load.task = asyncio.create_task(load.run(iter(requests), concurrency, duration, pause))
        try:
            yield load
        finally:
            load.task.cancel()
            await asyncio.gather(load.task, return_exceptions=True)


async def run_load(endpoint: Endpoint, requests: Iterable[LoadRequest], **how: Any) -> StreamLoad:
    """Run requests as `running_load` does, to the end of the last one."""
    async with running_load(endpoint, requests, **how) as load:
        await load.task
    return load
