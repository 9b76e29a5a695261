"""Figures of `splitserve bench abuse` and their verdict."""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from splitserve.tools.bench.markdown import listed, table_of

# Longest allowed time between two tokens of a running stream, seconds.
MAX_GAP = 1.0
# Largest allowed growth of the memory of one worker or of the router during one attack, bytes.
MAX_GROWTH = 300_000_000
# Statuses that only a bug in Splitserve can cause.
_FAULTS = frozenset({"HTTP 500", "HTTP 502", "HTTP 504"})
_HEADER = ("attack", "longest gap, ms", "longest TTFT, ms", "growth, MB", "outcomes", "verdict")


@dataclass(frozen=True, slots=True)
class AttackFigures:
    """Figures of one attack, in seconds and bytes."""

    name: str
    # Longest time between two tokens of one running stream.
    longest_gap: float
    # Longest time from sending a new stream to its first token. None: no stream started during the attack.
    longest_ttft: float | None
    # Largest growth of the memory of one worker with all its processes, or of the router: peak over start.
    growth: int
    # Outcome -> number of requests or connections of the attack with that outcome.
    outcomes: Mapping[str, int]
    # Problems that the streaming clients and the check after the attack found.
    errors: Sequence[str]

    @property
    def problems(self) -> list[str]:
        """Return why the attack counts as harmful. Empty: it did no harm."""
        found = []
        if self.longest_gap >= MAX_GAP:
            found.append(f"gap of {self.longest_gap:.1f} s")
        if self.growth > MAX_GROWTH:
            found.append(f"{self.growth / 1e6:.0f} MB of growth")
        faults = {outcome: count for outcome, count in self.outcomes.items() if outcome in _FAULTS}
        return [*found, *(f"{count} x {outcome}" for outcome, count in faults.items()), *self.errors]


@dataclass(frozen=True, slots=True)
class AbuseReport:
    model: str
    dtype: str
    # Command line that repeats this benchmark.
    command: str
    num_streams: int
    machine: Mapping[str, str]
    attacks: Sequence[AttackFigures]

    @property
    def is_passed(self) -> bool:
        return not any(attack.problems for attack in self.attacks)

    def to_json(self) -> dict[str, Any]:
        """Return the figures as JSON values, in seconds and bytes."""
        attacks = [asdict(attack) | {"problems": attack.problems} for attack in self.attacks]
        limits = {"longest_gap": MAX_GAP, "growth": MAX_GROWTH}
        return asdict(self) | {"attacks": attacks, "limits": limits, "passed": self.is_passed}

    def rows(self) -> list[list[str]]:
        return [
            [
                attack.name,
                f"{attack.longest_gap * 1e3:,.0f}",
                "-" if attack.longest_ttft is None else f"{attack.longest_ttft * 1e3:,.0f}",
                f"{attack.growth / 1e6:,.0f}",
                ", ".join(f"{count} x {outcome}" for outcome, count in sorted(attack.outcomes.items())),
                "; ".join(attack.problems) or "ok",
            ]
            for attack in self.attacks
        ]

    def table(self) -> Table:
        table = Table(*_HEADER, title=f"{self.num_streams} streams of {self.model} in {self.dtype} under attack")
        for row in self.rows():
            table.add_row(*row)
        return table

    def markdown(self, date: datetime.date) -> str:
        """Return a section to append to a log."""
        return (
            f"\n## {date.isoformat()} · Streams under attack: {self.model} in {self.dtype}\n\n"
            f"`{self.command}`\n\n{listed(self.machine)}.\n\n"
            f"{self.num_streams} clients stream from one prefill and one decode worker while each attack runs. Limits: "
            f"gaps of {MAX_GAP:g} s, growth of {MAX_GROWTH / 1e6:.0f} MB for each worker and for the router.\n\n"
            + table_of(list(_HEADER), self.rows())
        )
