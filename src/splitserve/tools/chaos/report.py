"""Figures of a chaos run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from splitserve.tools.bench.report import Report, ReportTable
from splitserve.tools.bench.stats import percentile
from splitserve.tools.chaos.streams import StreamOutcome

# Maximum number of quoted texts of each kind.
_NUM_QUOTED = 5


@dataclass
class Tally:
    """Counts and times that clients and fault injectors report during a run."""

    num_equal: int = 0
    # Number of clients that disconnected before the end, as some do on purpose.
    num_left: int = 0
    # Messages of failed requests, and differences between answers and those of the undisturbed run.
    errors: list[str] = field(default_factory=list)
    differences: list[str] = field(default_factory=list)
    # Longest pause of every stream that ended, seconds.
    longest_pauses: list[float] = field(default_factory=list)
    # Name of a fault -> how often it happened.
    faults: Counter[str] = field(default_factory=Counter)
    # Seconds from a fault until the router used the worker, or its replacement, again.
    recoveries: list[float] = field(default_factory=list)

    @property
    def num_requests(self) -> int:
        return self.num_equal + self.num_left + len(self.errors) + len(self.differences)

    def judge(self, name: str, outcome: StreamOutcome, expected: StreamOutcome) -> None:
        """Record one stream that has ended."""
        self.longest_pauses.append(outcome.longest_pause)
        if outcome.error is not None:
            self.errors.append(f"{name}: {outcome.error.get('message')}")
        elif difference := outcome.difference(expected):
            self.differences.append(f"{name}: {difference}")
        else:
            self.num_equal += 1


@dataclass(frozen=True, slots=True)
class ChaosResults:
    seed: int
    seconds: float
    tally: Tally
    num_migrations: int
    num_retries: int
    # Descriptions of resources that were still held at the end.
    leaks: Sequence[str]

    @property
    def is_good(self) -> bool:
        return not (self.tally.errors or self.tally.differences or self.leaks) and self.tally.num_equal > 0

    def report(self) -> Report:
        """Return the report. JSON has times in seconds."""
        tally = self.tally
        pauses = tally.longest_pauses or [0.0]
        p50, p99 = percentile(pauses, 50), percentile(pauses, 99)
        recovery = max(tally.recoveries, default=0.0)
        rows = [
            ("seconds, seed", f"{self.seconds:.0f}, {self.seed}"),
            ("requests", str(tally.num_requests)),
            ("equal to an undisturbed run", str(tally.num_equal)),
            ("left by their clients", str(tally.num_left)),
            ("faults", str(tally.faults.total())),
            *((f"- {name}", str(count)) for name, count in sorted(tally.faults.items())),
            ("migrations", str(self.num_migrations)),
            ("retries before the first byte", str(self.num_retries)),
            ("longest pause of a stream, p50 / p99 / max", f"{p50:.1f} / {p99:.1f} / {max(pauses):.1f} s"),
            ("until a worker was back, max", f"{recovery:.1f} s"),
            ("errors", str(len(tally.errors))),
            ("differing outputs", str(len(tally.differences))),
            ("leaks", str(len(self.leaks))),
        ]
        figures = {
            "seed": self.seed,
            "seconds": self.seconds,
            "requests": tally.num_requests,
            "equal": tally.num_equal,
            "left_by_client": tally.num_left,
            "faults": dict(tally.faults),
            "migrations": self.num_migrations,
            "retries": self.num_retries,
            "errors": tally.errors,
            "differences": tally.differences,
            "leaks": list(self.leaks),
            "longest_pause_p50": p50,
            "longest_pause_p99": p99,
            "longest_pause_max": max(pauses),
            "recovery_max": recovery,
        }
        quoted = [*tally.errors[:_NUM_QUOTED], *tally.differences[:_NUM_QUOTED], *self.leaks[:_NUM_QUOTED]]
        table = ReportTable(["", ""], rows)
        return Report(title="Chaos", figures=figures, tables=[table], remarks=quoted, failed=not self.is_good)
