"""Figures of `bench serve`: percentiles, throughput, goodput under service level objectives, and their report. Pure.

Goodput: requests per second that completed and met every objective, if any. Times in records are seconds. Figures of a
load are milliseconds, as usual in the field. ITL counts the gaps of all requests.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from splitserve.core.errors import ConfigError
from splitserve.tools.bench.report import ABSENT, Cells, Report, ReportTable
from splitserve.tools.bench.stats import StreamRecord, TtftFigures, mean, percentile
from splitserve.tools.metrics import Transfers

_LEGEND = (
    "TTFT, TPOT, E2E: p50 / p90 / p99 over requests; ITL: mean / p50 / p99 over all gaps. Goodput: requests/s that "
    "ended well and met {slos}. Idle TTFT: median (min-max), one prompt of {tokens} tokens at a time with nothing else "
    "under way; the rows below it are about those prompts. Transfer: from the first write to the proof of the last, "
    "means; exposed: what of that came after the last forward pass; hidden: the rest. GB/s of the whole of it, compute "
    "between chunks included."
)


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


@dataclass(frozen=True, slots=True)
class Handover:
    """KV transfer of one request, mean over the runs."""

    num_bytes: float
    seconds: float
    exposed_seconds: float
    # Share of `seconds` that overlaps with prompt computation, in [0, 1].
    hidden: float
    gb_per_s: float

    @classmethod
    def of(cls, sums: Transfers) -> Handover:
        n = max(1, sums.count)
        return cls(sums.num_bytes / n, sums.seconds / n, sums.exposed_seconds / n, sums.hidden, sums.gb_per_s)


@dataclass(frozen=True, slots=True)
class ServeFigures:
    """Figures of one system."""

    # "null", "disaggregated" or "external".
    mode: str
    # None: no KV transfer.
    backend: str | None
    # Prompt tokens per step. None: the worker's default.
    chunk_tokens: int | None
    threads: str
    # Description of the load. The two numbers below it are None if they do not apply to it.
    load_shape: str
    concurrency: int | None
    request_rate: float | None
    # Means of the completed requests if the load is a trace.
    input_tokens: int
    output_tokens: int
    load: LoadFigures
    # Messages of failed requests -> number of requests.
    errors: Mapping[str, int]
    # None: not measured.
    idle: TtftFigures | None
    transfer: Handover | None
    # Average number of cores that processes other than the measured system and its client kept busy. None: unknown.
    cores_taken_by_others: float | None

    @property
    def name(self) -> str:
        chunk = "" if self.chunk_tokens is None else f", chunks of {self.chunk_tokens:,}"
        return f"{self.mode}{f' {self.backend}' if self.backend else ''}{chunk}"

    def to_json(self, idle_ratio: float | None) -> dict[str, Any]:
        """Return the figures as JSON values, in milliseconds, tokens and requests per second.

        null: there is no value.
        """
        load = self.load
        values: dict[str, float | None] = {}
        for name in SLO_METRICS:
            spread = getattr(load, name)
            for part in ("mean", "p50", "p90", "p99"):
                values[f"{name}_ms_{part}"] = None if spread is None else getattr(spread, part)
        first = ("ttft_ms_p50", "ttft_ms_p99", "itl_ms_mean", "itl_ms_p50", "itl_ms_p99")
        return {
            "mode": self.mode,
            "transfer_backend": self.backend,
            "concurrency": self.concurrency,
            "input_tokens": self.input_tokens,
            "output_tokens": self.output_tokens,
            **{name: values.pop(name) for name in first},
            "output_tok_s": load.output_tokens_per_second,
            "total_tok_s": load.total_tokens_per_second,
            "goodput": load.goodput,
            **values,
            "requests_per_s": load.requests_per_second,
            "request_rate": self.request_rate,
            "num_requests": load.num_requests,
            "num_failed": load.num_failed,
            "errors": dict(self.errors),
            "chunked_prefill_size": self.chunk_tokens,
            "threads": self.threads,
            "cores_taken_by_others": self.cores_taken_by_others,
            "idle_ttft": None if self.idle is None else asdict(self.idle),
            "idle_ttft_of_null": idle_ratio,
            "transfer": None if self.transfer is None else asdict(self.transfer),
        }


def serve_report(
    model: str,
    dtype: str,
    command: str,
    machine: Mapping[str, str],
    figures: Sequence[ServeFigures],
    slos: Sequence[Slo],
) -> Report:
    """Return the report: JSON with one object per system, and a table with one column per system."""
    ratios = [_idle_ratio(f, figures) for f in figures]
    goals = " and ".join(f"{s.metric.upper()} <= {s.limit_ms:g} ms" for s in slos) or "every objective (none set)"
    tokens = next((f"{f.idle.num_prompt_tokens:,}" for f in figures if f.idle is not None), "-")
    names = [f.name for f in figures]
    return Report(
        title=f"Serving {model} in {dtype}: {figures[0].load_shape}",
        command=command,
        machine=machine,
        figures=[f.to_json(ratio) for f, ratio in zip(figures, ratios, strict=True)],
        tables=[ReportTable.by_column(names, _ROWS, list(zip(figures, ratios, strict=True)))],
        legend=_LEGEND.format(slos=goals, tokens=tokens),
        remarks=failures(figures),
    )


def failures(figures: Sequence[ServeFigures]) -> list[str]:
    """Return the errors, one line per system with failed requests."""
    return [
        f"{f.name}: {f.load.num_failed} of {f.load.num_requests} requests failed: "
        + "; ".join(f"{count} x {message}" for message, count in f.errors.items())
        for f in figures
        if f.errors
    ]


def _idle_ratio(figures: ServeFigures, others: Sequence[ServeFigures]) -> float | None:
    """Return the median idle TTFT of this system, divided by that of the colocated one with the same chunk size."""
    null = next((f for f in others if f.mode == "null" and f.chunk_tokens == figures.chunk_tokens), None)
    if null is None or null.idle is None or figures.idle is None:
        return None
    return figures.idle.ttft_median / null.idle.ttft_median


def _ms(milliseconds: float) -> str:
    return f"{milliseconds:,.0f}" if milliseconds >= 100 else f"{milliseconds:.1f}"


def _spread(spread: Spread | None, *parts: str) -> str:
    return ABSENT if spread is None else " / ".join(_ms(getattr(spread, part)) for part in parts)


def _idle(idle: TtftFigures | None) -> str:
    if idle is None:
        return ABSENT
    return f"{idle.ttft_median * 1e3:,.0f} ({idle.ttft_min * 1e3:,.0f}-{idle.ttft_max * 1e3:,.0f})"


# Figures of a system with its ratio of idle TTFTs.
_Column = tuple[ServeFigures, float | None]


def _of(show: Callable[[ServeFigures], str]) -> Callable[[_Column], str]:
    return lambda column: show(column[0])


def _transfer(show: Callable[[Handover], str]) -> Callable[[_Column], str]:
    return _of(lambda figures: ABSENT if figures.transfer is None else show(figures.transfer))


_ROWS: Cells[_Column] = (
    ("requests (failed)", _of(lambda f: f"{f.load.num_requests} ({f.load.num_failed})")),
    ("TTFT, ms", _of(lambda f: _spread(f.load.ttft, "p50", "p90", "p99"))),
    ("ITL, ms", _of(lambda f: _spread(f.load.itl, "mean", "p50", "p99"))),
    ("TPOT, ms", _of(lambda f: _spread(f.load.tpot, "p50", "p90", "p99"))),
    ("E2E, ms", _of(lambda f: _spread(f.load.e2e, "p50", "p90", "p99"))),
    ("output tok/s", _of(lambda f: f"{f.load.output_tokens_per_second:,.1f}")),
    ("total tok/s", _of(lambda f: f"{f.load.total_tokens_per_second:,.1f}")),
    ("goodput, requests/s", _of(lambda f: f"{f.load.goodput:.2f}")),
    ("idle TTFT, ms", _of(lambda f: _idle(f.idle))),
    ("idle TTFT / null's", lambda column: ABSENT if column[1] is None else f"{column[1]:.3f}"),
    ("KV moved, MB", _transfer(lambda t: f"{t.num_bytes / 1e6:.1f}")),
    ("transfer, ms", _transfer(lambda t: f"{t.seconds * 1e3:.1f}")),
    ("transfer, GB/s", _transfer(lambda t: f"{t.gb_per_s:.2f}")),
    ("exposed, ms", _transfer(lambda t: f"{t.exposed_seconds * 1e3:.1f}")),
    ("hidden", _transfer(lambda t: f"{t.hidden:.0%}")),
    ("CPU threads", _of(lambda f: f.threads)),
    (
        "cores taken by others",
        _of(lambda f: ABSENT if f.cores_taken_by_others is None else f"{f.cores_taken_by_others:.1f}"),
    ),
)
