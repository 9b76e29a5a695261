"""The load generator: streams over /v1/completions, timed token by token at the client.

All requests of a run start together and go on to their ends. A stream that fails, or brings another number of tokens
than asked for, fails the run: figures of unequal work would mean nothing.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import aiohttp
import msgspec

from splitserve.bench.stats import StreamRecord
from splitserve.errors import SplitserveError

# Seconds for one stream from its sending to its end.
_STREAM_TIMEOUT = 900.0


class LoadError(SplitserveError):
    """A stream of the benchmark failed."""

    reason = "load_failed"


async def run_streams(
    url: str, model: str, prompts: Sequence[Sequence[int]], max_tokens: int, timeout: float = _STREAM_TIMEOUT
) -> list[StreamRecord]:
    """One stream a prompt (token ids), all at once; exactly `max_tokens` tokens each, greedy. Raises LoadError."""
    limits = aiohttp.ClientTimeout(total=timeout)
    # One buffer holds a frame: a line may be longer than the usual 64 KiB.
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=limits, read_bufsize=2**20
    ) as session:
        tasks = [asyncio.create_task(_stream(session, url, _body(model, p, max_tokens))) for p in prompts]
        try:
            return list(await asyncio.gather(*tasks))
        except (aiohttp.ClientError, TimeoutError, ValueError, msgspec.DecodeError) as error:
            raise LoadError(f"a stream of {url} failed: {str(error) or type(error).__name__}") from error
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def _body(model: str, prompt: Sequence[int], max_tokens: int) -> dict[str, Any]:
    return {
        "model": model,
        "prompt": list(prompt),
        "max_tokens": max_tokens,
        "temperature": 0.0,
        "ignore_eos": True,
        "stream": True,
        # Without it a token whose text is not complete yet brings no frame.
        "return_token_ids": True,
    }


async def _stream(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> StreamRecord:
    arrived_at: list[float] = []
    counts: list[int] = []
    sent_at = time.perf_counter()
    async with session.post(f"{url}/v1/completions", json=body) as response:
        if response.status != 200:
            raise LoadError(f"{url}: HTTP {response.status}: {(await response.text())[:500]}")
        async for line in response.content:
            now = time.perf_counter()
            count = num_tokens_of(line)
            if count:
                arrived_at.append(now)
                counts.append(count)
    if sum(counts) != body["max_tokens"]:
        raise LoadError(f"{url}: a stream brought {sum(counts)} of {body['max_tokens']} tokens: see the workers' logs")
    return StreamRecord(sent_at, tuple(arrived_at), tuple(counts))


def num_tokens_of(line: bytes) -> int:
    """Output tokens in one line of a Server-Sent Events stream. Raises LoadError for an error frame."""
    data = line.removeprefix(b"data:").strip()
    if not line.startswith(b"data:") or data == b"[DONE]":
        return 0
    frame = msgspec.json.decode(data)
    if "error" in frame:
        raise LoadError(f"a stream ended with an error: {frame['error'].get('message')}")
    return sum(len(choice.get("token_ids") or ()) for choice in frame["choices"])
