"""Figures of one run of load: percentiles, throughput, and goodput under service level objectives. Pure.

Goodput: requests per second that completed and met every objective, if any. Times in records are seconds. Figures here
are milliseconds, as usual in the field. ITL counts the gaps of all requests.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from splitserve.core.errors import ConfigError
from splitserve.tools.bench.stats import StreamRecord, mean, percentile

# Metrics of objectives. The bound of itl applies to each gap of a request, the others to its single value.
SLO_METRICS = ("ttft", "itl", "tpot", "e2e")


@dataclass(frozen=True, slots=True)
class Slo:
    """Service level objective: a bound for each request."""

    metric: str
    limit_ms: float

    @classmethod
    def parse(cls, text: str) -> Slo:
        """Parse `METRIC=MILLISECONDS`. Raises ConfigError."""
        metric, _, value = text.partition("=")
        try:
            limit = float(value)
        except ValueError:
            limit = math.nan
        if metric not in SLO_METRICS or not limit > 0:
            raise ConfigError(f"--slo {text!r}: give METRIC=MILLISECONDS, METRIC one of {', '.join(SLO_METRICS)}")
        return cls(metric, limit)

    def is_met(self, record: StreamRecord) -> bool:
        """Return whether a request meets the bound.

        One without a value meets it, such as a single token without gaps.
        """
        return all(value * 1e3 <= self.limit_ms for value in _values(self.metric, [record]))


@dataclass(frozen=True, slots=True)
class Spread:
    """Mean and percentiles in milliseconds."""

    mean: float
    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Spread | None:
        """Return the figures of these values. None: there are no values."""
        if not seconds:
            return None
        values = [s * 1e3 for s in seconds]
        return cls(mean(values), *(percentile(values, q) for q in (50, 90, 99)))


@dataclass(frozen=True, slots=True)
class LoadFigures:
    num_requests: int
    num_failed: int
    # None: no request completed, or no answer has a second token.
    ttft: Spread | None
    itl: Spread | None
    tpot: Spread | None
    e2e: Spread | None
    # Output tokens of completed requests, per second from the first request to the end of the last.
    output_tokens_per_second: float
    # Includes the prompts' tokens.
    total_tokens_per_second: float
    requests_per_second: float
    goodput: float

    @classmethod
    def of(cls, records: Sequence[StreamRecord], num_failed: int, elapsed: float, slos: Sequence[Slo]) -> LoadFigures:
        """Compute the figures. `elapsed`: seconds from the first request to the end of the last, failed or not."""

        def rate(count: int) -> float:
            return count / elapsed if elapsed > 0 else 0.0

        num_output = sum(r.num_output_tokens for r in records)
        return cls(
            num_requests=len(records) + num_failed,
            num_failed=num_failed,
            ttft=Spread.of(_values("ttft", records)),
            itl=Spread.of(_values("itl", records)),
            tpot=Spread.of(_values("tpot", records)),
            e2e=Spread.of(_values("e2e", records)),
            output_tokens_per_second=rate(num_output),
            total_tokens_per_second=rate(num_output + sum(r.num_prompt_tokens for r in records)),
            requests_per_second=rate(len(records)),
            goodput=rate(sum(all(slo.is_met(r) for slo in slos) for r in records)),
        )


def _values(metric: str, records: Sequence[StreamRecord]) -> list[float]:
    """Return the values of a metric in seconds."""
    if metric == "itl":
        return [gap for record in records for gap in record.itls]
    if metric == "tpot":
        return [record.tpot for record in records if record.tpot is not None]
    return [record.ttft if metric == "ttft" else record.e2e for record in records]
