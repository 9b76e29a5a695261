"""How much running streams suffer from other clients' long prompts: one measurement.

1. A few streams start and decode; when each has its first token, the quiet window begins.
2. After it the loaded window begins: a long prompt is sent at once and then at even intervals, answered or not.
3. When it ends, each stream's next token is waited for, so that a stall that is still going on counts, and the first
   answer to a long prompt, so that there is a TTFT. Then everything is cut off.

A gap that touches the loaded window is the loaded window's; one that lies wholly in the quiet one is the quiet one's.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import aiohttp

from splitserve.bench.load import client_session
from splitserve.bench.prompts import PromptMaker
from splitserve.bench.stats import StreamRecord, median, percentile
from splitserve.bench.stream import Endpoint, LoadError, Stream, wait_closed
from splitserve.bench.workload import LoadRequest

# Seconds between two looks at the streams.
_POLL_INTERVAL = 0.01


@dataclass(frozen=True, slots=True)
class IsolationPlan:
    num_streams: int = 4
    stream_prompt_tokens: int = 128
    # More than a stream gets to: it must not end by itself.
    stream_output_tokens: int = 4096
    # Seconds of each window.
    window: float = 10.0
    long_prompt_tokens: int = 2048
    # Seconds between two of them.
    interval: float = 1.0


@dataclass(frozen=True, slots=True)
class IsolationFigures:
    """Of one run, or medians over several. Seconds, tokens a second."""

    quiet_itl_p50: float
    quiet_itl_p99: float
    loaded_itl_p50: float
    loaded_itl_p99: float
    quiet_output_tokens_per_second: float
    loaded_output_tokens_per_second: float
    # Of the long prompts answered before the cut.
    ttft_p50: float
    num_sent: float
    # Within the window.
    num_answered: float
    prompt_tokens_per_second: float

    @classmethod
    def median_of(cls, runs: Sequence[IsolationFigures]) -> IsolationFigures:
        return cls(**{name: median([getattr(run, name) for run in runs]) for name in cls.__dataclass_fields__})


async def measure_isolation(
    endpoint: Endpoint, plan: IsolationPlan, prompts: PromptMaker, timeout: float
) -> IsolationFigures:
    """`timeout`: seconds that a wait for the streams' tokens may take. Raises LoadError."""
    async with client_session(timeout + 2 * plan.window) as session:
        run = _Run(endpoint, plan, session)
        try:
            return await run.measure(prompts, timeout)
        finally:
            await wait_closed(run.tasks)


class _Run:
    def __init__(self, endpoint: Endpoint, plan: IsolationPlan, session: aiohttp.ClientSession) -> None:
        self._endpoint = endpoint
        self._plan = plan
        self._session = session
        # Everything under way: streams first.
        self.tasks: list[asyncio.Task[StreamRecord]] = []

    async def measure(self, prompts: PromptMaker, timeout: float) -> IsolationFigures:
        plan = self._plan
        # Made before: making them takes time, which would be the streams'.
        requests = [LoadRequest(prompts.make(plan.long_prompt_tokens), 1) for _ in range(self._num_long_prompts())]
        streams = [
            self._start(LoadRequest(prompts.make(plan.stream_prompt_tokens), plan.stream_output_tokens))
            for _ in range(plan.num_streams)
        ]
        await self._until(lambda: all(s.arrived_at for s in streams), timeout)
        began = time.perf_counter()
        await asyncio.sleep(plan.window)
        loaded_from = time.perf_counter()
        long_prompts = []
        for number, request in enumerate(requests):
            await asyncio.sleep(loaded_from + number * plan.interval - time.perf_counter())
            long_prompts.append(self._start(request))
        await asyncio.sleep(loaded_from + plan.window - time.perf_counter())
        loaded_to = time.perf_counter()
        await self._until(lambda: all(s.arrived_at[-1] > loaded_to for s in streams), timeout)
        await self._until(lambda: any(s.arrived_at for s in long_prompts), timeout)
        return figures_of(streams, long_prompts, plan, began, loaded_from, loaded_to)

    def _num_long_prompts(self) -> int:
        return max(1, int(self._plan.window / self._plan.interval))

    def _start(self, request: LoadRequest) -> Stream:
        stream = Stream(self._endpoint, request)
        self.tasks.append(asyncio.create_task(stream.run(self._session)))
        return stream

    async def _until(self, is_true: Callable[[], bool], timeout: float) -> None:
        deadline = time.perf_counter() + timeout
        while not is_true():
            for task in self.tasks[: self._plan.num_streams]:
                if task.done():
                    task.result()
                    raise LoadError(f"{self._endpoint.url}: a stream ended by itself: give the streams more tokens")
            if time.perf_counter() > deadline:
                raise LoadError(f"{self._endpoint.url}: streams or long prompts brought no token for {timeout:g} s")
            await asyncio.sleep(_POLL_INTERVAL)


def figures_of(
    streams: Sequence[Stream],
    long_prompts: Sequence[Stream],
    plan: IsolationPlan,
    began: float,
    loaded_from: float,
    loaded_to: float,
) -> IsolationFigures:
    """The quiet window is [began, loaded_from), the loaded one [loaded_from, loaded_to). Raises LoadError."""
    gaps = [(a, b) for s in streams for a, b in zip(s.arrived_at, s.arrived_at[1:], strict=False)]
    quiet = [b - a for a, b in gaps if began <= a and b < loaded_from]
    loaded = [b - a for a, b in gaps if a < loaded_to and b >= loaded_from]
    answered = [s for s in long_prompts if s.arrived_at]
    if not quiet or not loaded or not answered:
        raise LoadError(f"too few tokens in windows of {plan.window:g} s to speak of gaps: the server is too slow")
    num_in_time = sum(s.arrived_at[0] < loaded_to for s in answered)
    return IsolationFigures(
        quiet_itl_p50=percentile(quiet, 50),
        quiet_itl_p99=percentile(quiet, 99),
        loaded_itl_p50=percentile(loaded, 50),
        loaded_itl_p99=percentile(loaded, 99),
        quiet_output_tokens_per_second=_tokens(streams, began, loaded_from) / (loaded_from - began),
        loaded_output_tokens_per_second=_tokens(streams, loaded_from, loaded_to) / (loaded_to - loaded_from),
        ttft_p50=median([s.arrived_at[0] - s.sent_at for s in answered]),
        num_sent=len(long_prompts),
        num_answered=num_in_time,
        prompt_tokens_per_second=num_in_time * plan.long_prompt_tokens / (loaded_to - loaded_from),
    )


def _tokens(streams: Sequence[Stream], start: float, end: float) -> int:
    return sum(n for s in streams for at, n in zip(s.arrived_at, s.arrived, strict=True) if start <= at < end)
