"""One streamed completion, with the time of each token at its client.

1. The body requests an exact number of tokens, greedy, with their ids: a token without complete text brings no text,
   and would not be detected.
2. Each frame with tokens is recorded. If a server sends no ids, a frame with text counts as one token, and `usage` at
   the end gives the total.
3. An answer of another length than requested is an error, because figures of unequal work cannot be compared.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec

from splitserve.core.errors import SplitserveError
from splitserve.tools.bench.stats import StreamRecord
from splitserve.tools.bench.workload import LoadRequest

# Fields beyond OpenAI's. Splitserve and vLLM support both. Most servers ignore unknown fields.
_EXACT = {"ignore_eos": True, "return_token_ids": True}


class LoadError(SplitserveError):
    """A stream of the benchmark failed."""

    reason = "load_failed"


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

    def body(self, request: LoadRequest) -> dict[str, Any]:
        prompt = request.prompt
        if self.prompt_as_text and not prompt.text:
            raise LoadError("this tokenizer has too few words of one token for prompts as text: send token ids")
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


class MeasuredStream:
    """Streamed completion that other tasks of the same event loop may read while it runs."""

    def __init__(self, endpoint: Endpoint, request: LoadRequest) -> None:
        self._endpoint = endpoint
        self._request = request
        self.sent_at = 0.0
        # Arrival times of tokens, on the clock of time.perf_counter.
        self.arrived_at: list[float] = []
        # Number of tokens that arrived at arrived_at[i].
        self.arrived: list[int] = []
        # `usage` from the server. None: not received yet.
        self._usage: dict[str, Any] | None = None

    async def run(self, session: aiohttp.ClientSession) -> StreamRecord:
        """Run the stream. Raises LoadError, with the server's message if there is one."""
        try:
            return await self._run(session)
        except TimeoutError as error:
            raise LoadError(f"{self._endpoint.url}: a stream had not ended at its deadline") from error
        except (aiohttp.ClientError, ValueError, msgspec.MsgspecError) as error:
            raise LoadError(f"a stream of {self._endpoint.url} failed: {str(error) or type(error).__name__}") from error

    async def _run(self, session: aiohttp.ClientSession) -> StreamRecord:
        url, body = self._endpoint.url, self._endpoint.body(self._request)
        self.sent_at = time.perf_counter()
        async with session.post(f"{url}/v1/completions", json=body) as response:
            if response.status != 200:
                raise LoadError(f"{url}: HTTP {response.status}: {(await response.text())[:500]}")
            async for line in response.content:
                self._note(line, time.perf_counter())
        usage, asked = self._usage or {}, self._request.max_tokens
        num_tokens = usage.get("completion_tokens") or sum(self.arrived)
        if num_tokens != asked or not self.arrived_at:
            raise LoadError(f"{url}: a stream brought {num_tokens} of {asked} tokens: see the server's log")
        num_prompt_tokens = usage.get("prompt_tokens") or len(self._request.prompt.ids)
        return StreamRecord(self.sent_at, tuple(self.arrived_at), num_prompt_tokens, num_tokens)

    def _note(self, line: bytes, now: float) -> None:
        frame = parse_frame(line)
        if frame is None:
            return
        self._usage = frame.get("usage") or self._usage
        count = num_tokens_of(frame)
        if count:
            self.arrived_at.append(now)
            self.arrived.append(count)


def parse_frame(line: bytes) -> dict[str, Any] | None:
    """Return the JSON in one line of a Server-Sent Events stream. None: it has none. Raises LoadError for an error."""
    data = line.removeprefix(b"data:").strip()
    if not line.startswith(b"data:") or data == b"[DONE]":
        return None
    frame: dict[str, Any] = msgspec.json.decode(data, type=dict[str, Any])
    if error := frame.get("error"):
        raise LoadError(f"a stream ended with an error: {error.get('message') if isinstance(error, dict) else error}")
    return frame


def num_tokens_of(frame: Mapping[str, Any]) -> int:
    """Return the number of output tokens of one frame."""
    total = 0
    for choice in frame.get("choices") or ():
        ids = choice.get("token_ids")
        total += len(ids) if ids is not None else bool(choice.get("text"))
    return total


async def wait_closed(tasks: list[asyncio.Task[Any]]) -> None:
    """Cancel running tasks. Their connections close, which aborts their requests."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
