"""The figures of `bench serve`, and how they are shown: JSON, a table, Markdown. Pure."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from splitserve.bench.stats import TtftFigures
from splitserve.launch.transfers import Transfers

_COLUMNS = (
    "chunk",
    "system",
    "TTFT, ms",
    "of colocated",
    "KV moved, MB",
    "transfer, ms",
    "GB/s",
    "exposed, ms",
    "hidden",
)
_LEGEND = (
    "TTFT: median (min-max) of {runs} runs at a client of the router, one prompt of {tokens:,} tokens at a time. "
    "Chunk: prompt tokens computed in a step. Transfer: from the first write to the proof of the last, means; exposed: "
    "what of that came after the last forward pass; hidden: the rest. GB/s of the whole of it, compute between chunks "
    "included."
)


@dataclass(frozen=True, slots=True)
class Handover:
    """One request's transfer, mean over the runs."""

    num_bytes: float
    seconds: float
    exposed_seconds: float
    # Share of `seconds` in which the prompt was still computed, in [0, 1].
    hidden: float
    gb_per_s: float


@dataclass(frozen=True, slots=True)
class ServeFigures:
    """One system at one chunk size."""

    # "colocated", or the transfer backend.
    system: str
    chunk_tokens: int
    ttft: TtftFigures
    # Medians: TTFT of this system / TTFT of the colocated one at the same chunk size.
    ratio: float
    # None: colocated.
    transfer: Handover | None

    @classmethod
    def of(
        cls, system: str, chunk_tokens: int, ttft: TtftFigures, colocated: TtftFigures, transfers: Transfers | None
    ) -> ServeFigures:
        """`transfers`: sums over the runs."""
        handover = None
        if transfers is not None:
            n = max(1, transfers.count)
            handover = Handover(
                transfers.num_bytes / n,
                transfers.seconds / n,
                transfers.exposed_seconds / n,
                transfers.hidden,
                transfers.gb_per_s,
            )
        return cls(system, chunk_tokens, ttft, ttft.ttft_median / colocated.ttft_median, handover)

    def cells(self) -> list[str]:
        t, ttft = self.transfer, self.ttft
        shown = f"{ttft.ttft_median * 1e3:,.0f} ({ttft.ttft_min * 1e3:,.0f}-{ttft.ttft_max * 1e3:,.0f})"
        moved = ["-"] * 5
        if t is not None:
            moved = [
                f"{t.num_bytes / 1e6:.1f}",
                f"{t.seconds * 1e3:.1f}",
                f"{t.gb_per_s:.2f}",
                f"{t.exposed_seconds * 1e3:.1f}",
                f"{t.hidden:.0%}",
            ]
        return [str(self.chunk_tokens), self.system, shown, f"{self.ratio:.3f}", *moved]


@dataclass(frozen=True, slots=True)
class ServeReport:
    model: str
    dtype: str
    # As it can be typed again.
    command: str
    machine: dict[str, str]
    figures: Sequence[ServeFigures]

    def to_json(self) -> list[dict[str, Any]]:
        """For JSON: an object a system and chunk size. Seconds, bytes."""
        return [asdict(f) for f in self.figures]

    def table(self) -> Table:
        table = Table(*_COLUMNS, title=f"{self.model} in {self.dtype}", caption=self._legend())
        for figures in self.figures:
            table.add_row(*figures.cells())
        return table

    def markdown(self, date: datetime.date) -> str:
        """A section to append to a log."""
        lines = [_line(_COLUMNS), "|---" * len(_COLUMNS) + "|", *(_line(f.cells()) for f in self.figures)]
        machine = "; ".join(f"{name}: {value}" for name, value in self.machine.items())
        return (
            f"\n## {date.isoformat()} · TTFT of {self.model} in {self.dtype}, colocated and disaggregated\n\n"
            f"`{self.command}`\n\n{machine}.\n\n{self._legend()}\n\n" + "\n".join(lines) + "\n"
        )

    def _legend(self) -> str:
        ttft = self.figures[0].ttft
        return _LEGEND.format(runs=ttft.num_runs, tokens=ttft.num_prompt_tokens)


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"
