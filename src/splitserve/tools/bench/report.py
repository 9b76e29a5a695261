"""Figures of `bench main` as one table for the terminal and for Markdown, and as JSON."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from splitserve.tools.bench.markdown import listed, table_of
from splitserve.tools.bench.stats import StreamsFigures, TtftFigures

LEGEND = "ITL: mean / p50 / p99. TPOT: median. TTFT: median (min-max), one prompt at a time on an idle system."


@dataclass(frozen=True, slots=True)
class SystemFigures:
    name: str
    threads: str
    streams: Sequence[StreamsFigures]
    ttft: Sequence[TtftFigures]
    # Average number of cores that processes other than the measured system and its client kept busy.
    cores_taken_by_others: float


@dataclass(frozen=True, slots=True)
class MainReport:
    model: str
    dtype: str
    # Command line that repeats this benchmark.
    command: str
    # Shape of a stream in words, e.g. "128 prompt and 128 output tokens".
    stream_shape: str
    machine: dict[str, str]
    # All systems, measured in the same way and in the same order.
    systems: Sequence[SystemFigures]

    def to_json(self) -> dict[str, Any]:
        """Return the figures as JSON values. Times are in seconds, throughput in tokens/s."""
        return asdict(self)

    def rows(self) -> list[list[str]]:
        """Return one row per figure: its name, then its value for each system."""
        rows: list[list[str]] = []
        for i, streams in enumerate(self.systems[0].streams):
            of = [system.streams[i] for system in self.systems]
            name = f"{streams.num_streams} stream{'s' if streams.num_streams > 1 else ''}"
            rows.append([f"{name}: output tokens/s", *(f"{f.output_tokens_per_second:.1f}" for f in of)])
            itls = (f"{_ms(f.itl_mean)} / {_ms(f.itl_p50)} / {_ms(f.itl_p99)}" for f in of)
            rows.append([f"{name}: ITL, ms", *itls])
            rows.append([f"{name}: TPOT, ms", *(_ms(f.tpot_median) for f in of)])
        for i, ttft in enumerate(self.systems[0].ttft):
            cells = (system.ttft[i] for system in self.systems)
            ttfts = (f"{_ms(f.ttft_median)} ({_ms(f.ttft_min)}-{_ms(f.ttft_max)})" for f in cells)
            rows.append([f"{ttft.num_prompt_tokens:,} tokens: TTFT, ms", *ttfts])
        rows.append(["CPU threads", *(system.threads for system in self.systems)])
        rows.append(["cores taken by others", *(f"{system.cores_taken_by_others:.1f}" for system in self.systems)])
        return rows

    def table(self) -> Table:
        names = (system.name for system in self.systems)
        table = Table("", *names, title=f"{self.model} in {self.dtype}", caption=LEGEND)
        for row in self.rows():
            table.add_row(*row)
        return table

    def markdown(self, date: datetime.date) -> str:
        """Return a section to append to a log."""
        header = ["", *(system.name for system in self.systems)]
        runs = ", ".join(
            [f"{f.num_runs} at {f.num_streams} stream(s)" for f in self.systems[0].streams]
            + [f"{f.num_runs} for TTFT at {f.num_prompt_tokens:,}" for f in self.systems[0].ttft]
        )
        return (
            f"\n## {date.isoformat()} · Throughput and TTFT of {self.model} in {self.dtype}\n\n"
            f"`{self.command}`\n\n"
            f"{listed(self.machine)}.\n\n"
            f"Streams of {self.stream_shape}, all sent at once, prompts of random words (no prefix hits). Served "
            "systems are measured at an HTTP client of the router; transformers runs `generate` on one batch, without "
            f"HTTP. One system at a time. Runs: {runs}; medians of them. {LEGEND}\n\n" + table_of(header, self.rows())
        )


def _ms(seconds: float) -> str:
    value = seconds * 1e3
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"
