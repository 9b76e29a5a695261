"""Arithmetic and report of `splitserve bench gpu`.

Memory bounds a decode step: it must read every weight once, and the KV of all contexts. Arithmetic bounds a prompt. A
KV transfer is a copy. So each figure is the engine's throughput of that kind, beside the card's in the same run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from splitserve.core.layout import KVLayout
from splitserve.tools.bench.report import Cells, Report, ReportTable


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


def gpu_report(
    command: str,
    machine: dict[str, str],
    *,
    device: str,
    model: str,
    attention: str,
    max_graph_batch: int,
    limits: GpuThroughput,
    figures: Sequence[Figure],
) -> Report:
    """Return the report. `max_graph_batch`: largest batch that is replayed as a CUDA graph. 0: no graphs."""
    graphs = f"CUDA graphs up to batch {max_graph_batch}" if max_graph_batch else "no CUDA graphs"
    return Report(
        title=f"{model} on {device}",
        command=command,
        machine=machine,
        setting=f"Attention by {attention}, {graphs}",
        legend="Times are medians of whole steps of the engine, sampling and the host's part included; limits are the "
        "card's own in the same run.",
        figures={
            "command": command,
            "device": device,
            "model": model,
            "attention": attention,
            "max_graph_batch": max_graph_batch,
            "machine": machine,
            "limits": asdict(limits),
            "figures": [{**asdict(f), "per_second": f.per_second, "share": f.share} for f in figures],
        },
        tables=[ReportTable.by_row(_COLUMNS, figures)],
    )


_COLUMNS: Cells[Figure] = [
    ("", lambda f: f.name),
    ("ms", lambda f: f"{f.seconds * 1e3:,.2f}"),
    ("reached", lambda f: f"{f.per_second:,.0f} G{f.unit}/s"),
    ("limit", lambda f: f"{f.limit:,.0f} G{f.unit}/s"),
    ("share", lambda f: f"{f.share:.2f}"),
    ("wanted", lambda f: f"{f.wanted:.1f}"),
]
