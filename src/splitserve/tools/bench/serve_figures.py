"""Figures of `bench serve`: percentiles, throughput, goodput under service level objectives, and their report. Pure.

Goodput: requests per second that completed and met every objective, if any. Times in records are seconds. Figures of a
load are milliseconds, as usual in the field. ITL counts the gaps of all requests.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from splitserve.core.errors import ConfigError
from splitserve.tools.bench.options import ServeBenchOptions
from splitserve.tools.bench.report import Cells, Report, ReportTable
from splitserve.tools.bench.stats import StreamRecord, mean, percentile, share_together, together_remarks
from splitserve.tools.client import Transfers

_LEGEND = (
    "TTFT, TPOT, E2E: p50 / p90 / p99 over requests; ITL: mean / p50 / p99 over all gaps. Goodput: requests/s that "
    "ended well and met {slos}."
)
_FEW_LEGEND = "The p99 of fewer than 100 requests is the largest value."
_IDLE_LEGEND = "Idle TTFT: median (min-max), one prompt of {tokens:,} tokens at a time with nothing else in flight."
_TRANSFER_LEGEND = (
    "Transfer, of those prompts: from the first write to the proof of the last, means; exposed: what of that came "
    "after the last forward pass; hidden: the rest. GB/s of the whole of it, compute between chunks included."
)
_TRACES_LEGEND = (
    "With / without traces: output tok/s of a router with stored traces over one without, median (quartiles) of rounds "
    "in turns."
)
# Metrics of objectives. The bound of itl applies to each gap of a request, the others to its single value.
SLO_METRICS = ("ttft", "itl", "tpot", "e2e")
# Times of the load that come first in JSON.
_FIRST = ("ttft_ms_p50", "ttft_ms_p99", "itl_ms_mean", "itl_ms_p50", "itl_ms_p99")
# JSON object of one system. None: there is no such value.
SystemRow = dict[str, Any]


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
        """Return whether a request meets the bound. One without a value meets it, such as one token's gaps."""
        return all(value * 1e3 <= self.limit_ms for value in _values(self.metric, [record]))


def _values(metric: str, records: Sequence[StreamRecord]) -> list[float]:
    """Return the values of a metric in seconds."""
    if metric == "itl":
        return [gap for record in records for gap in record.itls]
    if metric == "tpot":
        return [record.tpot for record in records if record.tpot is not None]
    return [record.ttft if metric == "ttft" else record.e2e for record in records]


def load_figures(
    records: Sequence[StreamRecord], errors: Mapping[str, int], elapsed: float, slos: Sequence[Slo]
) -> SystemRow:
    """Return the figures of a load. Times are in milliseconds. None: no request has such a value.

    `errors`: number of failed requests by their message. `elapsed`: seconds from the first request to the end of the
    last, failed or not.
    """

    def rate(count: int) -> float:
        return count / elapsed if elapsed > 0 else 0.0

    times: dict[str, float | None] = {}
    for metric in SLO_METRICS:
        values = [seconds * 1e3 for seconds in _values(metric, records)]
        times[f"{metric}_ms_mean"] = mean(values) if values else None
        for q in (50, 90, 99):
            times[f"{metric}_ms_p{q}"] = percentile(values, q) if values else None
    num_output, num_failed = sum(r.num_output_tokens for r in records), sum(errors.values())
    return {
        **{name: times.pop(name) for name in _FIRST},
        "output_tok_s": rate(num_output),
        "total_tok_s": rate(num_output + sum(r.num_prompt_tokens for r in records)),
        "goodput": rate(sum(all(slo.is_met(r) for slo in slos) for r in records)),
        **times,
        "tokens_together": share_together(records),
        "requests_per_s": rate(len(records)),
        "num_requests": len(records) + num_failed,
        "num_failed": num_failed,
        "errors": dict(errors),
    }


def transfer_figures(sums: Transfers) -> SystemRow:
    """Return the KV transfer of one request, mean over those in `sums`.

    `hidden`: share of its seconds that overlaps with prompt computation, in [0, 1].
    """
    n = max(1, sums.count)
    return {
        "num_bytes": sums.num_bytes / n,
        "seconds": sums.seconds / n,
        "exposed_seconds": sums.exposed_seconds / n,
        "hidden": sums.hidden,
        "gb_per_s": sums.gb_per_s,
    }


def serve_report(options: ServeBenchOptions, load_shape: str, rows: Sequence[SystemRow], slos: Sequence[Slo]) -> Report:
    """Return the report: JSON with one object per system, and a table with one column per system.

    JSON has milliseconds, tokens and requests per second. `load_shape`: description of the load.
    """
    for row in rows:
        row["idle_ttft_of_null"] = _idle_ratio(row, rows)
    remarks = [
        f"{_name(row)}: {row['num_failed']} of {row['num_requests']} requests failed: "
        + "; ".join(f"{count} x {message}" for message, count in row["errors"].items())
        for row in rows
        if row["errors"]
    ]
    remarks += [
        f"{_name(row)}: no request was sent within --duration: give a longer one"
        for row in rows
        if not row["num_requests"]
    ]
    # Another server does not report its dtype.
    dtype = f"in {options.dtype}" if options.url is None else f"at {options.url}, dtype unknown"
    return Report(
        title=f"Serving {options.model} {dtype}: {load_shape}",
        figures=rows,
        has_others=True,
        tables=[ReportTable.by_column([_name(row) for row in rows], _ROWS, rows)],
        legend=_legend(rows, slos),
        remarks=[*remarks, *together_remarks({_name(row): row["tokens_together"] for row in rows})],
        failed=bool(remarks),
    )


def _legend(rows: Sequence[SystemRow], slos: Sequence[Slo]) -> str:
    """Return the definitions of the figures that any row has."""
    goals = " and ".join(f"{s.metric.upper()} <= {s.limit_ms:g} ms" for s in slos) or "every objective (none set)"
    parts = [_LEGEND.format(slos=goals)]
    if any(row["num_requests"] - row["num_failed"] < 100 for row in rows):
        parts.append(_FEW_LEGEND)
    if idle := next((row["idle_ttft"] for row in rows if row["idle_ttft"]), None):
        parts.append(_IDLE_LEGEND.format(tokens=idle["num_prompt_tokens"]))
    parts += [
        text
        for key, text in (("transfer", _TRANSFER_LEGEND), ("trace_cost", _TRACES_LEGEND))
        if any(row[key] for row in rows)
    ]
    return " ".join(parts)


def _name(row: SystemRow) -> str:
    chunk = row["chunked_prefill_size"]
    backend = f" {row['transfer_backend']}" if row["transfer_backend"] else ""
    return f"{row['mode']}{backend}{'' if chunk is None else f', chunks of {chunk:,}'}"


def _idle_ratio(row: SystemRow, rows: Sequence[SystemRow]) -> float | None:
    """Return the median idle TTFT of this system, divided by that of the colocated one with the same chunk size."""
    chunk = "chunked_prefill_size"
    null = next((other for other in rows if other["mode"] == "null" and other[chunk] == row[chunk]), None)
    if null is None or null["idle_ttft"] is None or row["idle_ttft"] is None:
        return None
    return float(row["idle_ttft"]["ttft_median"] / null["idle_ttft"]["ttft_median"])


_ROWS: Cells[SystemRow] = (
    ("requests (failed)", "{num_requests} ({num_failed})"),
    ("TTFT, ms", "{ttft_ms_p50:short} / {ttft_ms_p90:short} / {ttft_ms_p99:short}"),
    ("ITL, ms", "{itl_ms_mean:short} / {itl_ms_p50:short} / {itl_ms_p99:short}"),
    ("TPOT, ms", "{tpot_ms_p50:short} / {tpot_ms_p90:short} / {tpot_ms_p99:short}"),
    ("E2E, ms", "{e2e_ms_p50:short} / {e2e_ms_p90:short} / {e2e_ms_p99:short}"),
    ("output tok/s", "{output_tok_s:,.1f}"),
    ("total tok/s", "{total_tok_s:,.1f}"),
    ("goodput, requests/s", "{goodput:.2f}"),
    ("idle TTFT, ms", "{idle_ttft.ttft_median:ms,.0f} ({idle_ttft.ttft_min:ms,.0f}-{idle_ttft.ttft_max:ms,.0f})"),
    ("idle TTFT / null's", "{idle_ttft_of_null:.3f}"),
    ("KV moved, MB", "{transfer.num_bytes:MB.1f}"),
    ("transfer, ms", "{transfer.seconds:ms.1f}"),
    ("transfer, GB/s", "{transfer.gb_per_s:.2f}"),
    ("exposed, ms", "{transfer.exposed_seconds:ms.1f}"),
    ("hidden", "{transfer.hidden:.0%}"),
    (
        "throughput with / without traces",
        "{trace_cost.ratio:.4f} ({trace_cost.ratio_low:.4f}-{trace_cost.ratio_high:.4f})",
    ),
    ("CPU threads", "{threads}"),
    ("cores taken by others", "{cores_taken_by_others:.1f}"),
)
