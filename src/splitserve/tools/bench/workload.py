"""Requests of a load generator and their times. Pure: the same plan gives every system the same requests.

1. Lengths come from options, or from a trace (`splitserve.tools.bench.trace`).
2. In an open loop each request has a time: from a trace, or a random one. A closed loop ignores times.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import Protocol

from splitserve.tools.bench.prompts import Encode, Prompt, PromptMaker

WARM_UP_OUTPUT_TOKENS = 8


@dataclass(frozen=True, slots=True)
class LoadRequest:
    prompt: Prompt
    # The answer has exactly this many tokens.
    max_tokens: int
    # Seconds after the start of the run.
    send_at: float = 0.0


def arrival_times(rate: float, burstiness: float, seed: int) -> Iterator[float]:
    """Yield seconds from the start without end, with a mean of `rate` per second.

    Gaps are sampled from a gamma distribution of shape `burstiness`: 1 is a Poisson process, less gives bursts, and
    more is more regular.
    """
    draws, now = random.Random(seed), 0.0
    while True:
        now += draws.gammavariate(burstiness, 1.0 / (rate * burstiness))
        yield now


class TraceLoad(Protocol):
    """Requests that a trace recorded."""

    @property
    def longest(self) -> int:
        """Return the maximum tokens of a prompt and its answer together."""
        ...

    def requests(self, maker: PromptMaker) -> Iterator[LoadRequest]: ...


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """Load of one run, the same for every system."""

    # Clients of a closed loop. None: an open loop.
    concurrency: int | None
    # Requests per second of an open loop. None with a trace: the trace's own times.
    request_rate: float | None
    burstiness: float
    # Ignored with a trace.
    input_tokens: int
    output_tokens: int
    # None: as many as `duration` allows.
    num_prompts: int | None
    # Seconds after which no request is sent. None: all are sent.
    duration: float | None
    seed: int
    trace: TraceLoad | None = None

    def requests(self, encode: Encode) -> Iterator[LoadRequest]:
        """Yield new prompts of the same seed each time. Endless if neither `num_prompts` nor a trace limits it."""
        maker = PromptMaker(encode, self.seed)
        requests = self.trace.requests(maker) if self.trace is not None else self._random(maker)
        if self.request_rate is not None:
            times = arrival_times(self.request_rate, self.burstiness, self.seed)
            requests = (replace(request, send_at=at) for request, at in zip(requests, times, strict=False))
        return islice(requests, self.num_prompts)

    def warm_up(self, encode: Encode, count: int) -> list[LoadRequest]:
        """Return the first requests with other prompts and short answers."""
        first = list(islice(replace(self, seed=self.seed + 1, duration=None).requests(encode), count))
        return [replace(r, max_tokens=min(r.max_tokens, WARM_UP_OUTPUT_TOKENS)) for r in first]

    @property
    def longest(self) -> int:
        """Return the maximum tokens of a prompt and its answer together."""
        return self.trace.longest if self.trace is not None else self.input_tokens + self.output_tokens

    def describe(self) -> str:
        """Return the load in words for a report."""
        if self.concurrency is not None:
            pace = f"closed loop, {self.concurrency} at once"
        elif self.request_rate is not None:
            pace = f"open loop, {self.request_rate:g} requests/s, burstiness {self.burstiness:g}"
        else:
            pace = "open loop, at the trace's times"
        shape = "a trace" if self.trace else f"{self.input_tokens:,} prompt and {self.output_tokens:,} output tokens"
        return f"{pace}; {shape}"

    def _random(self, maker: PromptMaker) -> Iterator[LoadRequest]:
        while True:
            yield LoadRequest(maker.make(self.input_tokens), self.output_tokens)
