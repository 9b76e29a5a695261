"""What the figures of `bench router` mean. Pure: times in, numbers out; all times in seconds.

added latency   one connection, one request after another: a percentile through the router minus the same straight to
                the worker, in the same round.
requests/s      all connections, each sending its next request when the answer to its last has come.
chunks/s        the same with streamed answers; no two events of a stream travel together.
CPU             of the router's process with its children, user and system.

A figure is the median of the rounds. In a round all routers take turns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from splitserve.bench.stats import median


@dataclass(frozen=True, slots=True)
class Round:
    """One router in one round."""

    # Of requests that went one after another.
    latency_p50: float
    latency_p99: float
    requests_per_second: float
    # CPU seconds of the router for a request, and for an event of a stream.
    cpu_per_request: float
    chunks_per_second: float
    cpu_per_chunk: float


@dataclass(frozen=True, slots=True)
class RouterFigures:
    name: str
    requests_per_second: float
    latency_p50: float
    # None: this is the worker itself.
    added_latency_p50: float | None
    added_latency_p99: float | None
    cpu_per_request: float | None
    chunks_per_second: float
    cpu_per_chunk: float | None

    @classmethod
    def of(cls, name: str, rounds: Sequence[Round], direct: Sequence[Round] | None) -> RouterFigures:
        """`direct`: the same rounds without a router; None: these are they."""
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
