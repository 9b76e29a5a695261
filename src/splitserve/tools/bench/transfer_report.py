"""Figures of `bench transfer` as JSON, a full table, and a short table for a log. Pure."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from splitserve.tools.bench.limits import LIMITS
from splitserve.tools.bench.markdown import listed, table_of
from splitserve.tools.bench.transfer_plan import TransferCase, memory_of

_COLUMNS = (
    "transport",
    "in all",
    "pages",
    "order",
    "GB/s",
    "limit",
    "ratio",
    "alone, µs",
    "p50, µs",
    "p99, µs",
    "CPU s/GB",
    "per copy",
)
_LEGEND = (
    "GB/s: 10^9 bytes a second; what is small goes several writes at once, {at_once} in all, from memory that no cache "
    "holds. Limit: {limits}, the same bytes, in turn with ours. Alone: one write, nothing else on its way. "
    "p50, p99: one page a write. "
    "CPU s/GB: both processes. Per copy: bytes of one copy after coalescing. GB/s and limit: of the run "
    "with the median ratio, of {runs}; medians otherwise. "
    "A limit is one thread's work: large writes of shm and nixl are shared by two, and libraries get the pieces as "
    "they come, so these ratios may be well above 1; sockets cannot be beaten. Hand-over: pages change "
    "owner in a shared pool, p50 and p99 of one exchange of all of them. Checksum: --transfer-checksum, on one side."
)


@dataclass(frozen=True, slots=True)
class TransferFigures:
    """Figures of one case over one backend."""

    backend: str
    page_bytes: int
    total_bytes: int
    scattered: bool
    gb_per_s: float
    # None: there is no limit to compare with.
    limit_gb_per_s: float | None
    # gb_per_s / limit_gb_per_s.
    ratio: float | None
    # Microseconds of one write of all bytes with no other in flight, median.
    alone_us: float
    # Microseconds of writes of one page, one after another.
    p50_us: float
    p99_us: float
    # User and system time of both processes per 10^9 bytes.
    cpu_seconds_per_gb: float
    # Mean length of the copies that the transport receives.
    bytes_per_write: float

    @classmethod
    def of(
        cls,
        backend: str,
        case: TransferCase,
        *,
        gb_per_s: float,
        limit_gb_per_s: float | None,
        alone: float,
        p50: float,
        p99: float,
        cpu_seconds_per_gb: float,
        num_writes: int,
    ) -> TransferFigures:
        """Return figures from measured values. `alone`, `p50`, `p99`: seconds. `num_writes`: copies of the case."""
        return cls(
            backend=backend,
            page_bytes=case.page_bytes,
            total_bytes=case.total_bytes,
            scattered=case.scattered,
            gb_per_s=gb_per_s,
            limit_gb_per_s=limit_gb_per_s,
            ratio=None if limit_gb_per_s is None else gb_per_s / limit_gb_per_s,
            alone_us=alone * 1e6,
            p50_us=p50 * 1e6,
            p99_us=p99 * 1e6,
            cpu_seconds_per_gb=cpu_seconds_per_gb,
            bytes_per_write=case.total_bytes / num_writes,
        )

    def cells(self) -> list[str]:
        return [
            self.backend,
            size_text(self.total_bytes),
            size_text(self.page_bytes),
            "scattered" if self.scattered else "contiguous",
            f"{self.gb_per_s:.2f}",
            "" if self.limit_gb_per_s is None else f"{self.limit_gb_per_s:.2f}",
            "" if self.ratio is None else f"{self.ratio:.2f}",
            f"{self.alone_us:,.0f}",
            f"{self.p50_us:,.0f}",
            f"{self.p99_us:,.0f}",
            f"{self.cpu_seconds_per_gb:.2f}",
            size_text(self.bytes_per_write),
        ]


@dataclass(frozen=True, slots=True)
class TransferReport:
    # Command line that repeats this benchmark.
    command: str
    machine: dict[str, str]
    runs: int
    figures: Sequence[TransferFigures]

    def to_json(self) -> list[dict[str, Any]]:
        """Return one object per case."""
        return [asdict(f) for f in self.figures]

    def table(self) -> Table:
        table = Table(*_COLUMNS, caption=self._legend())
        for figures in self.figures:
            table.add_row(*figures.cells())
        return table

    def markdown(self, date: datetime.date) -> str:
        """Return a section to append to a log: per backend the largest total, scattered, and one contiguous case."""
        machine = listed(self.machine)
        return (
            f"\n## {date.isoformat()} · KV transfer between two processes\n\n`{self.command}`\n\n{machine}.\n\n"
            f"{self._legend()}\n\n" + table_of(_COLUMNS, [f.cells() for f in self.digest()])
        )

    def digest(self) -> list[TransferFigures]:
        chosen = []
        for backend in dict.fromkeys(f.backend for f in self.figures):
            of_backend = [f for f in self.figures if f.backend == backend]
            largest = max(f.total_bytes for f in of_backend)
            if backend not in LIMITS:
                chosen += of_backend
                continue
            of_largest = [f for f in of_backend if f.total_bytes == largest]
            chosen += [f for f in of_largest if f.scattered] + [f for f in of_largest if not f.scattered][:1]
        return chosen

    def _legend(self) -> str:
        backends = [f.backend for f in self.figures if f.backend in LIMITS]
        names = dict.fromkeys(f"{LIMITS[backend].name} for {backend}" for backend in backends)
        return _LEGEND.format(limits=", ".join(names), at_once=size_text(memory_of(1)), runs=self.runs)


def size_text(num_bytes: float) -> str:
    """Format in the largest unit that leaves at least one."""
    for unit, bytes_of_unit in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if num_bytes >= bytes_of_unit:
            return f"{num_bytes / bytes_of_unit:.3g} {unit}"
    return f"{num_bytes:.3g} B"
