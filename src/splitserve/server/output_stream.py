"""The outputs of one client request's samples, from the reader task to whoever answers the client.

Bounded without ever waiting: a reader that lags behind finds what came meanwhile merged, at most one message a sample,
so that what is held never exceeds the tokens that were asked for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import msgspec

from splitserve.errors import DeadlineExceededError, SplitserveError
from splitserve.messages import TokenOutput


class OutputStream:
    """Async iterator of TokenOutput; ends after every sample's final one. Raises the error given to `fail`.

    `on_close` gets the rids whose samples are given up before their end.
    """

    def __init__(self, rids: Sequence[str], on_close: Callable[[list[str]], None], timeout: float = 900.0) -> None:
        self.rids = tuple(rids)
        self._on_close = on_close
        # Seconds to wait for one output.
        self._timeout = timeout
        # Samples whose final message has not been handed out.
        self._unfinished = set(rids)
        # rid -> what has arrived since the reader last looked, oldest first.
        self._pending: dict[str, TokenOutput] = {}
        self._error: SplitserveError | None = None
        self._arrived = asyncio.Event()

    def put(self, output: TokenOutput) -> None:
        """Called by the owner of the pipe."""
        if output.rid not in self._unfinished:
            return
        earlier = self._pending.get(output.rid)
        self._pending[output.rid] = output if earlier is None else merge(earlier, output)
        self._arrived.set()

    def fail(self, error: SplitserveError) -> None:
        """End the stream with `error`, after what has arrived."""
        self._error = error
        self._arrived.set()

    def drop(self, rid: str) -> None:
        """Give up one sample: a stop string matched. No more of it is handed out."""
        if rid in self._unfinished:
            self._unfinished.discard(rid)
            self._pending.pop(rid, None)
            self._on_close([rid])

    def close(self) -> None:
        """Give up all that is unfinished. Idempotent; never waits, so a cancelled task may call it."""
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
    """Two consecutive outputs of one sample as one."""
    return msgspec.structs.replace(
        second,
        token_ids=[*first.token_ids, *second.token_ids],
        logprobs=[*first.logprobs, *second.logprobs],
        input_logprobs=first.input_logprobs if second.input_logprobs is None else second.input_logprobs,
        num_cached_tokens=max(first.num_cached_tokens, second.num_cached_tokens),
    )
