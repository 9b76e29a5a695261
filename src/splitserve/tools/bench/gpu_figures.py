"""Arithmetic and report of `splitserve bench gpu`.

Memory bounds a decode step: it must read every weight once, and the KV of all contexts. Arithmetic bounds a prompt. A
KV transfer is a copy. So each figure is the engine's throughput of that kind, beside the card's in the same run.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from splitserve.core.layout import KVLayout
from splitserve.tools.bench.markdown import listed, table_of


@dataclass(frozen=True, slots=True)
class GpuThroughput:
    """Throughput of the card, in 10^9 per second."""

    # Bytes read and written, by the fastest method.
    memory_gb_per_s: float
    # Floating-point operations of a large matrix product.
    matmul_gflop_per_s: float
    # Bytes copied: half of the bytes that a copy reads and writes.
    copy_gb_per_s: float


@dataclass(frozen=True, slots=True)
class Figure:
    name: str
    # Seconds of one run, median. It moved or computed `amount` x 10^9 of `unit`.
    seconds: float
    amount: float
    unit: str
    # Throughput of the card, 10^9 `unit` per second.
    limit: float
    # Target of this project, as a share of the limit.
    wanted: float

    @property
    def per_second(self) -> float:
        return self.amount / self.seconds

    @property
    def share(self) -> float:
        return self.per_second / self.limit


def decode_gb(weight_bytes: int, layout: KVLayout, batch: int, context: int) -> float:
    """Return the number of bytes that a decode step must access, in 10^9 bytes.

    These are all weights once, and the KV of `context` tokens per request.
    """
    return (weight_bytes + batch * sum(_kv_bytes(layout, context))) / 1e9


def _kv_bytes(layout: KVLayout, context: int) -> list[int]:
    """Return the KV bytes of one request per component. A layer with a window reads only its last tokens."""
    return [
        c.page_bytes(layout.page_size) // layout.page_size * min(context, c.window or context)
        for c in layout.components
    ]


@dataclass(frozen=True, slots=True)
class GpuReport:
    # Command line that repeats this benchmark.
    command: str
    device: str
    model: str
    attention: str
    # Largest batch that is replayed as a CUDA graph. 0: no graphs.
    max_graph_batch: int
    machine: dict[str, str]
    limits: GpuThroughput
    figures: Sequence[Figure]

    def to_json(self) -> dict[str, Any]:
        figures = [{**asdict(f), "per_second": f.per_second, "share": f.share} for f in self.figures]
        return {**asdict(self), "figures": figures}

    def rows(self) -> list[list[str]]:
        return [
            [
                f.name,
                f"{f.seconds * 1e3:,.2f}",
                f"{f.per_second:,.0f} G{f.unit}/s",
                f"{f.limit:,.0f} G{f.unit}/s",
                f"{f.share:.2f}",
                f"{f.wanted:.1f}",
            ]
            for f in self.figures
        ]

    def table(self) -> Table:
        table = Table(*_HEADER, title=f"{self.model} on {self.device}, attention by {self.attention}")
        for row in self.rows():
            table.add_row(*row)
        return table

    def markdown(self, date: datetime.date) -> str:
        graphs = f"CUDA graphs up to batch {self.max_graph_batch}" if self.max_graph_batch else "no CUDA graphs"
        machine = listed(self.machine)
        return (
            f"\n## {date.isoformat()} · {self.model} on {self.device}\n\n`{self.command}`\n\n{machine}.\n\n"
            f"Attention by {self.attention}, {graphs}. Times are medians of whole steps of the engine, sampling and "
            f"the host's part included; limits are the card's own in the same run.\n\n" + table_of(_HEADER, self.rows())
        )


_HEADER = ["", "ms", "reached", "limit", "share", "wanted"]
