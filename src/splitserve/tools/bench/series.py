"""Growth of a measured time with its size, compared with the growth of its work. Pure.

A series is one measurement at increasing sizes. Each point has its amount of work: the number of sequences, tokens or
requests, or of floating-point operations if work does not grow evenly with the size.

cost     Time per unit of work. It falls with the size while fixed costs dominate, and is flat in the end.
growth   Exponent between two neighbours: time ~ work ^ growth. 0: no additional cost. 1: proportional to the work.
excess   A point's cost over the least cost at any smaller size. Time grows faster than work if it stays above 1.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from splitserve.tools.bench.report import ReportTable
from splitserve.tools.bench.stats import median

Case = TypeVar("Case")
# Excess attributed to measurement noise, and to caches that one size fits into and the next does not.
TOLERANCE = 1.5


@dataclass(frozen=True, slots=True)
class SeriesPoint:
    size: int
    # Amount of work in the series' unit.
    work: float
    # Seconds of each repeat.
    times: tuple[float, ...]

    @property
    def seconds(self) -> float:
        return median(self.times)

    @property
    def cost(self) -> float:
        """Return the seconds per unit of work."""
        return self.seconds / self.work


@dataclass(frozen=True, slots=True)
class Series:
    # Name of the measurement, and its conditions.
    name: str
    conditions: str
    # Unit of the sizes, e.g. "sequences".
    size_name: str
    # One unit of work, e.g. "sequence".
    work_name: str
    # Unit of times in reports: "ms" or "µs".
    time_unit: str
    # Points in increasing order of size.
    points: Sequence[SeriesPoint]

    def shown(self, seconds: float) -> float:
        """Convert seconds into the series' time unit."""
        return seconds * {"ms": 1e3, "µs": 1e6}[self.time_unit]

    def growths(self) -> list[float | None]:
        """Return the growth at each point. None for the first, and beside a time too short to measure, which is 0."""
        return [
            None,
            *(
                math.log(b.seconds / a.seconds) / math.log(b.work / a.work) if a.seconds and b.seconds else None
                for a, b in itertools.pairwise(self.points)
            ),
        ]

    def worst(self) -> tuple[SeriesPoint, float]:
        """Return the point with the largest excess, and its excess. Raises ValueError with fewer than two points."""
        found: list[tuple[SeriesPoint, float]] = []
        least = self.points[0].cost
        for point in self.points[1:]:
            # A cost of 0 was too short to measure, so nothing is compared with it.
            found.append((point, point.cost / least if least else 1.0))
            least = min(least or point.cost, point.cost or least)
        return max(found, key=lambda pair: pair[1])

    @property
    def outgrows_work(self) -> bool:
        return self.worst()[1] > TOLERANCE

    def verdict(self) -> str:
        point, excess = self.worst()
        where = f"{excess:.2f} x the least cost at a smaller size, at {point.size:,} {self.size_name}"
        if self.outgrows_work:
            return f"GROWS FASTER THAN ITS WORK: up to {where}"
        return f"no faster than its work: at most {where}"

    def to_json(self) -> dict[str, Any]:
        """Return the figures as JSON values. Times are in seconds."""
        points = [
            {**asdict(point), "seconds": point.seconds, "growth": growth}
            for point, growth in zip(self.points, self.growths(), strict=True)
        ]
        verdict = {"grows_faster_than_work": self.outgrows_work, "largest_excess": self.worst()[1]}
        return {**asdict(self), "points": points, **verdict}

    def table(self) -> ReportTable:
        mark, unit = "**" if self.outgrows_work else "", self.time_unit
        rows = []
        for point, growth in zip(self.points, self.growths(), strict=True):
            middle, least, most = (_number(self.shown(t)) for t in (point.seconds, min(point.times), max(point.times)))
            shown_growth = "" if growth is None else f"{growth:.2f}"
            rows.append(
                [f"{point.size:,}", f"{middle} ({least}-{most})", _number(self.shown(point.cost)), shown_growth]
            )
        return ReportTable(
            [self.size_name, unit, f"{unit} / {self.work_name}", "growth"],
            rows,
            f"{self.name[0].upper()}{self.name[1:]} ({self.conditions}): {mark}{self.verdict()}{mark}",
        )


def _number(value: float) -> str:
    """Format with at least three digits."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}" if value >= 1 else f"{value:.3f}"


def alternate(
    cases: Sequence[Case], run: Callable[[Case], float], repeats: int, *, warm_ups: int | None = None
) -> dict[Case, tuple[float, ...]]:
    """Return the times of each case by `run`, which returns seconds.

    The cases alternate, so that a disturbance of the machine affects all of them. The first `warm_ups` cases run once
    before that. None: all.
    """
    for case in cases[:warm_ups]:
        run(case)
    rounds = [[run(case) for case in cases] for _ in range(repeats)]
    return dict(zip(cases, zip(*rounds, strict=True), strict=True))


def measure(
    sizes: Sequence[int],
    work: Callable[[int], float],
    run: Callable[[int], float],
    repeats: int,
    *,
    warm_ups: int | None = None,
) -> list[SeriesPoint]:
    """Time `run`, which returns seconds, at each of the sizes by turns."""
    return [SeriesPoint(n, work(n), times) for n, times in alternate(sizes, run, repeats, warm_ups=warm_ups).items()]


def doublings(first: int, last: int) -> list[int]:
    """Return first, 2 x first, ... up to and including `last`. Empty if `last` is below `first`."""
    return [first << i for i in range((last // first).bit_length())]
