"""Cases of `bench transfer`, whether they fit into this machine's memory, and the report of their figures. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from splitserve.core.options import size_text
from splitserve.tools.bench.limits import LIMITS
from splitserve.tools.bench.report import Cells, Report, ReportTable
from splitserve.tools.bench.stats import median, percentile
from splitserve.transfer.copies import COPY, Copies, coalesce

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30

# Smaller writes are sent several at once, each between its own places. So many requests are always in flight, and no
# cache holds their pages. At 32 MiB, a cache of the same size still held some pages of a memcpy.
_MIN_BYTES_AT_ONCE = 64 * MIB
# Minimum bytes of a run: smaller batches are repeated. With half of it, two measurements of raw sockets differed by up
# to 5 % (medians of 5).
_MIN_BYTES_A_RUN = GIB
# Writes for the latency of one page: the first number, but fewer if they would move more than this many bytes.
_LATENCY_WRITES = 300
_MIN_LATENCY_WRITES = 100
_MAX_LATENCY_BYTES = 128 * MIB
# Buffers in use: source and target of the transport, source and target of the limit.
_BUFFERS = 4
# Share of the available memory to use: other processes need memory, too.
_MEMORY_SHARE = 0.5

_LEGEND = (
    "GB/s: 10^9 bytes a second; what is small goes several writes at once, {at_once} in all, from memory that no cache "
    "holds. Limit: {limits}, the same bytes, in turn with ours. Alone: one write, no other in flight. "
    "p50, p99: one page a write. "
    "CPU s/GB: both processes. Per copy: bytes of one copy after coalescing. GB/s and limit: of the run "
    "with the median ratio, of {runs}; medians otherwise. "
    "A limit is one thread's work: large writes of shm and nixl are shared by two, and libraries get the pieces as "
    "they come, so these ratios may be well above 1; no transport is faster than raw sockets. Hand-over: pages change "
    "owner in a shared pool and no byte moves, p50 and p99 of one exchange of all of them. Checksum: "
    "--transfer-checksum, on one worker; its p99 is the longest of {runs} runs."
)


@dataclass(frozen=True, slots=True)
class TransferCase:
    """`total_bytes` in pages of `page_bytes`."""

    page_bytes: int
    total_bytes: int
    # Source and target pages each in their own random order. False: both in order, which coalesces to one copy.
    scattered: bool

    @property
    def num_pages(self) -> int:
        return self.total_bytes // self.page_bytes


@dataclass(frozen=True, slots=True)
class TransferPlan:
    page_sizes: tuple[int, ...]
    totals: tuple[int, ...]
    # Runs of each case. The figure is their median.
    runs: int

    def cases(self, total_bytes: int) -> Iterator[TransferCase]:
        for page_bytes in self.page_sizes:
            if page_bytes <= total_bytes:
                yield TransferCase(page_bytes, total_bytes, scattered=True)
                yield TransferCase(page_bytes, total_bytes, scattered=False)


FULL = TransferPlan((4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB), (MIB, 64 * MIB, GIB), runs=5)
QUICK = TransferPlan((4 * KIB, 64 * KIB), (8 * MIB,), runs=3)


def copies_of(case: TransferCase, seed: int = 0) -> Copies:
    """Return copies from region 0 into region 0, both of the case's size, coalesced like those of KV transfers."""
    pages = np.arange(case.num_pages, dtype=np.uint64) * np.uint64(case.page_bytes)
    table = np.zeros(case.num_pages, dtype=COPY)
    random = np.random.default_rng(seed)
    table["src_offset"] = random.permutation(pages) if case.scattered else pages
    table["dst_offset"] = random.permutation(pages) if case.scattered else pages
    table["length"] = case.page_bytes
    return coalesce(table)


def writes_at_once(total_bytes: int) -> int:
    return max(1, _MIN_BYTES_AT_ONCE // total_bytes)


def memory_of(total_bytes: int) -> int:
    """Return the bytes of one side."""
    return writes_at_once(total_bytes) * total_bytes


def batch_of(case: TransferCase) -> list[Copies]:
    """Return the writes in flight at once, each with the same pages in the next range of memory."""
    writes = []
    for i in range(writes_at_once(case.total_bytes)):
        copies = copies_of(case)
        for offset in ("src_offset", "dst_offset"):
            copies[offset] += np.uint64(i * case.total_bytes)
        writes.append(copies)
    return writes


def batches_a_run(total_bytes: int) -> int:
    return max(1, _MIN_BYTES_A_RUN // memory_of(total_bytes))


def latency_writes(page_bytes: int) -> int:
    return max(_MIN_LATENCY_WRITES, min(_LATENCY_WRITES, _MAX_LATENCY_BYTES // page_bytes))


def fits(total_bytes: int, available_bytes: int) -> bool:
    """Return whether all buffers of a case leave enough of the machine's memory to other processes."""
    return _BUFFERS * memory_of(total_bytes) <= _MEMORY_SHARE * available_bytes


# JSON object of one case over one backend. None: there is no limit to compare with, or no byte moves.
TransferRow = dict[str, Any]
PER_BYTE = ("gb_per_s", "cpu_seconds_per_gb", "bytes_per_write")


def transfer_row(
    backend: str,
    case: TransferCase,
    *,
    gb_per_s: float,
    limit_gb_per_s: float | None = None,
    alone: Sequence[float],
    latencies: Sequence[float],
    cpu_seconds_per_gb: float,
    num_writes: int,
) -> TransferRow:
    """Return the figures of a case.

    `alone`: seconds of writes of all bytes with no other in flight. `latencies`: seconds of writes of one page, one
    after another. `cpu_seconds_per_gb`: user and system time of both processes. `num_writes`: copies of the case.
    """
    return {
        **asdict(case),
        "backend": backend,
        "gb_per_s": gb_per_s,
        "limit_gb_per_s": limit_gb_per_s,
        "ratio": None if limit_gb_per_s is None else gb_per_s / limit_gb_per_s,
        "alone_us": median(alone) * 1e6,
        "p50_us": percentile(latencies, 50) * 1e6,
        "p99_us": percentile(latencies, 99) * 1e6,
        "cpu_seconds_per_gb": cpu_seconds_per_gb,
        "bytes_per_write": case.total_bytes / num_writes,
    }


def transfer_report(runs: int, rows: Sequence[TransferRow]) -> Report:
    """Return the report. JSON has one object per case, a log a digest of the cases."""
    backends = dict.fromkeys(row["backend"] for row in rows)
    limits = dict.fromkeys(f"{LIMITS[b].name} for {b}" for b in backends if b in LIMITS)
    table, shown = ReportTable.by_row(_COLUMNS, rows), ReportTable.by_row(_COLUMNS, digest(rows))
    return Report(
        title="KV transfer between two processes",
        figures=rows,
        tables=[replace(table, digest=shown.rows)],
        legend=_LEGEND.format(limits=", ".join(limits), at_once=size_text(memory_of(1)), runs=runs),
    )


def digest(rows: Sequence[TransferRow]) -> list[TransferRow]:
    """Return, per backend, the cases of the largest total that are scattered, and one that is contiguous."""
    chosen = []
    for backend in dict.fromkeys(row["backend"] for row in rows):
        found = [row for row in rows if row["backend"] == backend]
        if backend in LIMITS:
            largest = max(row["total_bytes"] for row in found)
            found = [row for row in found if row["total_bytes"] == largest]
            found = [row for row in found if row["scattered"]] + [row for row in found if not row["scattered"]][:1]
        chosen += found
    return chosen


_COLUMNS: Cells[TransferRow] = [
    ("transport", "{backend}"),
    ("in all", "{total_bytes:size}"),
    ("pages", "{page_bytes:size}"),
    ("order", lambda row: "scattered" if row["scattered"] else "contiguous"),
    ("GB/s", "{gb_per_s:.2f}"),
    ("limit", "{limit_gb_per_s:.2f}"),
    ("ratio", "{ratio:.2f}"),
    ("alone, µs", "{alone_us:,.0f}"),
    ("p50, µs", "{p50_us:,.0f}"),
    ("p99, µs", "{p99_us:,.0f}"),
    ("CPU s/GB", "{cpu_seconds_per_gb:.2f}"),
    ("per copy", "{bytes_per_write:size}"),
]
