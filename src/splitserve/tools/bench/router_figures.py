"""Definitions of the figures of `bench router`. Pure. All times are in seconds.

added latency   One connection, one request after another: a percentile through the router, minus the same percentile
                without a router in the same round.
requests/s      All connections. Each sends its next request after the answer to the last one.
chunks/s        As requests/s, with streamed answers. No two events of a stream are sent together.
CPU             User and system time of the router's process and its children.

A figure is the median of the rounds. In a round all routers take turns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from splitserve.tools.bench.stats import median


@dataclass(frozen=True, slots=True)
class Round:
    """Figures of one router in one round."""

    # Latency of requests one after another.
    latency_p50: float
    latency_p99: float
    requests_per_second: float
    # CPU seconds of the router per request, and per event of a stream.
    cpu_per_request: float
    chunks_per_second: float
    cpu_per_chunk: float


@dataclass(frozen=True, slots=True)
class RouterFigures:
    name: str
    requests_per_second: float
    latency_p50: float
    # None: the worker itself, without a router.
    added_latency_p50: float | None
    added_latency_p99: float | None
    cpu_per_request: float | None
    chunks_per_second: float
    cpu_per_chunk: float | None

    @classmethod
    def of(cls, name: str, rounds: Sequence[Round], direct: Sequence[Round] | None) -> RouterFigures:
        """Return the figures of a router. `direct`: the same rounds without a router. None: these are those rounds."""
        return cls(
            name=name,
            requests_per_second=median([r.requests_per_second for r in rounds]),
            latency_p50=median([r.latency_p50 for r in rounds]),
            added_latency_p50=None if direct is None else _added(rounds, direct, "latency_p50"),
            added_latency_p99=None if direct is None else _added(rounds, direct, "latency_p99"),
            cpu_per_request=None if direct is None else median([r.cpu_per_request for r in rounds]),
            chunks_per_second=median([r.chunks_per_second for r in rounds]),
            cpu_per_chunk=None if direct is None else median([r.cpu_per_chunk for r in rounds]),
        )


def _added(rounds: Sequence[Round], direct: Sequence[Round], figure: str) -> float:
    pairs = zip(rounds, direct, strict=True)
    return median([getattr(through, figure) - getattr(straight, figure) for through, straight in pairs])
