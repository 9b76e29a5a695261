"""`splitserve bench gpu`: the arithmetic of its figures, and how they are shown.

A decode step is bound by memory: it must read every weight once and the KV of all contexts. A prompt is bound by
arithmetic. A hand-over is a copy. So each figure is what the engine does of that a second, beside what the card did of
it in the same run.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from splitserve.core.layout import KVLayout


@dataclass(frozen=True, slots=True)
class Limits:
    """What the card did, 10^9 a second."""

    # Bytes read and written, whichever way was fastest.
    memory_gb_per_s: float
    # Floating-point operations of a large matrix product.
    matmul_gflop_per_s: float
    # Bytes copied: half of what a copy reads and writes.
    copy_gb_per_s: float


@dataclass(frozen=True, slots=True)
class Figure:
    name: str
    # Of one run, median. What it moved or computed is `amount` x 10^9 of `unit`.
    seconds: float
    amount: float
    unit: str
    # 10^9 `unit` a second that the card did.
    limit: float
    # The share of it that this project wants.
    wanted: float

    @property
    def per_second(self) -> float:
        return self.amount / self.seconds

    @property
    def share(self) -> float:
        return self.per_second / self.limit


def decode_gb(weight_bytes: int, layout: KVLayout, batch: int, context: int) -> float:
    """10^9 bytes that a decode step must read, or write: weights once, and the KV of `context` tokens a request."""
    return (weight_bytes + batch * sum(_kv_bytes(layout, context))) / 1e9


def _kv_bytes(layout: KVLayout, context: int) -> list[int]:
    """Of one request, by component. A window shows a layer only its last tokens."""
    return [
        c.page_bytes(layout.page_size) // layout.page_size * min(context, c.window or context)
        for c in layout.components
    ]


@dataclass(frozen=True, slots=True)
class GpuReport:
    # As it can be typed again.
    command: str
    device: str
    model: str
    attention: str
    # Largest batch that is replayed as a CUDA graph; 0: none.
    max_graph_batch: int
    machine: dict[str, str]
    limits: Limits
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
        lines = ["| " + " | ".join(cells) + " |" for cells in (_HEADER, *self.rows())]
        lines.insert(1, "|---" * len(_HEADER) + "|")
        machine = "; ".join(f"{name}: {value}" for name, value in self.machine.items())
        graphs = f"CUDA graphs up to batch {self.max_graph_batch}" if self.max_graph_batch else "no CUDA graphs"
        return (
            f"\n## {date.isoformat()} · {self.model} on {self.device}\n\n`{self.command}`\n\n{machine}.\n\n"
            f"Attention by {self.attention}, {graphs}. Times are medians of whole steps of the engine, sampling and "
            f"the host's part included; limits are the card's own in the same run.\n\n" + "\n".join(lines) + "\n"
        )


_HEADER = ["", "ms", "reached", "limit", "share", "wanted"]
