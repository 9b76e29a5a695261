"""Figures of `bench serve` as JSON, a table and Markdown. Pure."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from splitserve.tools.bench.load_figures import LoadFigures, Slo, Spread
from splitserve.tools.bench.markdown import listed, table_of
from splitserve.tools.bench.stats import TtftFigures
from splitserve.tools.metrics import Transfers

_LEGEND = (
    "TTFT, TPOT, E2E: p50 / p90 / p99 over requests; ITL: mean / p50 / p99 over all gaps. Goodput: requests/s that "
    "ended well and met {slos}. Idle TTFT: median (min-max), one prompt of {tokens} tokens at a time with nothing else "
    "under way; the rows below it are about those prompts. Transfer: from the first write to the proof of the last, "
    "means; exposed: what of that came after the last forward pass; hidden: the rest. GB/s of the whole of it, compute "
    "between chunks included."
)


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
    # Load in words, and its numbers if it has them.
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
        spreads = {"ttft": load.ttft, "itl": load.itl, "tpot": load.tpot, "e2e": load.e2e}
        values = {
            f"{name}_ms_{part}": None if spread is None else getattr(spread, part)
            for name, spread in spreads.items()
            for part in ("mean", "p50", "p90", "p99")
        }
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


@dataclass(frozen=True, slots=True)
class ServeReport:
    model: str
    dtype: str
    # Command line that repeats this benchmark.
    command: str
    machine: Mapping[str, str]
    figures: Sequence[ServeFigures]
    slos: Sequence[Slo]

    def to_json(self) -> list[dict[str, Any]]:
        """Return one object per system."""
        return [f.to_json(self._idle_ratio(f)) for f in self.figures]

    def rows(self) -> list[list[str]]:
        """Return one row per figure: its name, then its value for each system. Omits figures without any value."""
        rows = [[name, *(show(f) for f in self.figures)] for name, show in _ROWS]
        ratios = (self._idle_ratio(f) for f in self.figures)
        rows.insert(_RATIO_ROW, ["idle TTFT / null's", *("-" if r is None else f"{r:.3f}" for r in ratios)])
        return [row for row in rows if any(cell != "-" for cell in row[1:])]

    def table(self) -> Table:
        table = Table("", *(f.name for f in self.figures), title=self._title(), caption=self._legend())
        for row in self.rows():
            table.add_row(*row)
        return table

    def markdown(self, date: datetime.date) -> str:
        """Return a section to append to a log."""
        header = ["", *(f.name for f in self.figures)]
        failures = "".join(f"\n**{message}**\n" for message in self.failures())
        return (
            f"\n## {date.isoformat()} · Serving {self._title()}\n\n`{self.command}`\n\n{listed(self.machine)}.\n\n"
            f"{self._legend()}\n{failures}\n" + table_of(header, self.rows())
        )

    def failures(self) -> list[str]:
        """Return the errors, one line per system with failed requests."""
        return [
            f"{f.name}: {f.load.num_failed} of {f.load.num_requests} requests failed: "
            + "; ".join(f"{count} x {message}" for message, count in f.errors.items())
            for f in self.figures
            if f.errors
        ]

    def warn(self, console: Console) -> bool:
        """Print the failed requests and return whether there are any."""
        for message in (failures := self.failures()):
            console.print(message, style="bold red", markup=False, highlight=False, soft_wrap=True)
        return bool(failures)

    def _idle_ratio(self, figures: ServeFigures) -> float | None:
        """Return the median idle TTFT of this system, divided by that of the colocated one with the same chunk size."""
        null = next((f for f in self.figures if f.mode == "null" and f.chunk_tokens == figures.chunk_tokens), None)
        if null is None or null.idle is None or figures.idle is None:
            return None
        return figures.idle.ttft_median / null.idle.ttft_median

    def _title(self) -> str:
        return f"{self.model} in {self.dtype}: {self.figures[0].load_shape}"

    def _legend(self) -> str:
        slos = (
            " and ".join(f"{s.metric.upper()} <= {s.limit_ms:g} ms" for s in self.slos) or "every objective (none set)"
        )
        tokens = next((f"{f.idle.num_prompt_tokens:,}" for f in self.figures if f.idle is not None), "-")
        return _LEGEND.format(slos=slos, tokens=tokens)


def _p50_90_99(spread: Spread | None) -> str:
    return "-" if spread is None else f"{_ms(spread.p50)} / {_ms(spread.p90)} / {_ms(spread.p99)}"


def _itl(spread: Spread | None) -> str:
    return "-" if spread is None else f"{_ms(spread.mean)} / {_ms(spread.p50)} / {_ms(spread.p99)}"


def _idle(idle: TtftFigures | None) -> str:
    if idle is None:
        return "-"
    return f"{idle.ttft_median * 1e3:,.0f} ({idle.ttft_min * 1e3:,.0f}-{idle.ttft_max * 1e3:,.0f})"


def _transfer(show: Callable[[Handover], str]) -> Callable[[ServeFigures], str]:
    return lambda figures: "-" if figures.transfer is None else show(figures.transfer)


def _ms(milliseconds: float) -> str:
    return f"{milliseconds:,.0f}" if milliseconds >= 100 else f"{milliseconds:.1f}"


_ROWS: list[tuple[str, Callable[[ServeFigures], str]]] = [
    ("requests (failed)", lambda f: f"{f.load.num_requests} ({f.load.num_failed})"),
    ("TTFT, ms", lambda f: _p50_90_99(f.load.ttft)),
    ("ITL, ms", lambda f: _itl(f.load.itl)),
    ("TPOT, ms", lambda f: _p50_90_99(f.load.tpot)),
    ("E2E, ms", lambda f: _p50_90_99(f.load.e2e)),
    ("output tok/s", lambda f: f"{f.load.output_tokens_per_second:,.1f}"),
    ("total tok/s", lambda f: f"{f.load.total_tokens_per_second:,.1f}"),
    ("goodput, requests/s", lambda f: f"{f.load.goodput:.2f}"),
    ("idle TTFT, ms", lambda f: _idle(f.idle)),
    ("KV moved, MB", _transfer(lambda t: f"{t.num_bytes / 1e6:.1f}")),
    ("transfer, ms", _transfer(lambda t: f"{t.seconds * 1e3:.1f}")),
    ("transfer, GB/s", _transfer(lambda t: f"{t.gb_per_s:.2f}")),
    ("exposed, ms", _transfer(lambda t: f"{t.exposed_seconds * 1e3:.1f}")),
    ("hidden", _transfer(lambda t: f"{t.hidden:.0%}")),
    ("CPU threads", lambda f: f.threads),
    ("cores taken by others", lambda f: "-" if f.cores_taken_by_others is None else f"{f.cores_taken_by_others:.1f}"),
]
# Index of the ratio's row: after the idle TTFT.
_RATIO_ROW = 9
