"""Outputs of one client request's samples, from the reader task to the task that answers the client.

Bounded without backpressure: outputs that a slow reader has not read are merged into one message per sample. So the
stream never holds more than the requested tokens.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import msgspec

from splitserve.core.errors import DeadlineExceededError, SplitserveError
from splitserve.core.messages import TokenOutput


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
        self._error: SplitserveError | None = None
        self._arrived = asyncio.Event()

    def put(self, output: TokenOutput) -> None:
        """Add an output. Called by the owner of the pipe."""
        if output.rid not in self._unfinished:
            return
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
        given_up = [rid for rid in self.rids if rid in self._unfinished]
        self._unfinished.clear()
        self._pending.clear()
        if given_up:
            self._on_close(given_up)

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
        input_logprobs=first.input_logprobs if second.input_logprobs is None else second.input_logprobs,
        num_cached_tokens=max(first.num_cached_tokens, second.num_cached_tokens),
    )
