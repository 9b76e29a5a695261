"""How the time of a thing grows with its size, and whether that is faster than its work. Pure.

A series is one thing measured at rising sizes. Each point knows how much work its size is: as many units as there are
sequences, tokens or requests, or as floating-point operations where work does not rise evenly with the size.

cost     time for a unit of work. Where fixed parts dominate it falls from size to size; in the end it is flat.
growth   exponent between two neighbours: time ~ work ^ growth. 0: costs nothing more; 1: with the work.
excess   a point's cost over the least cost at any smaller size. Time grows faster than work where it stays above 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from splitserve.bench.stats import median

# Excess that is put down to the noise of a measurement, and to caches that one size fits and the next does not.
TOLERANCE = 1.5


@dataclass(frozen=True, slots=True)
class Point:
    size: int
    # In the series' unit.
    work: float
    # Of each repeat, seconds.
    times: tuple[float, ...]

    @property
    def seconds(self) -> float:
        return median(self.times)

    @property
    def cost(self) -> float:
        """Seconds for a unit of work."""
        return self.seconds / self.work


@dataclass(frozen=True, slots=True)
class Series:
    # What is timed, and under which conditions.
    name: str
    conditions: str
    # What the sizes count, e.g. "sequences".
    size_name: str
    # One unit of work, e.g. "sequence".
    work_name: str
    # How times are shown: "ms" or "µs".
    time_unit: str
    # In rising order.
    points: Sequence[Point]

    def shown(self, seconds: float) -> float:
        """In the series' time unit."""
        return seconds * {"ms": 1e3, "µs": 1e6}[self.time_unit]

    def growths(self) -> list[float | None]:
        """Of each point; the first has none."""
        pairs = zip(self.points, self.points[1:], strict=False)
        return [None, *(math.log(b.seconds / a.seconds) / math.log(b.work / a.work) for a, b in pairs)]

    def worst(self) -> tuple[Point, float]:
        """The point with the largest excess, and that. Raises ValueError with fewer than two points."""
        found: list[tuple[Point, float]] = []
        least = self.points[0].cost
        for point in self.points[1:]:
            found.append((point, point.cost / least))
            least = min(least, point.cost)
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


def measure(
    sizes: Sequence[int],
    work: Callable[[int], float],
    run: Callable[[int], float],
    repeats: int,
    *,
    warm_ups: int | None = None,
) -> list[Point]:
    """Time `run`, which returns seconds, at each of the sizes.

    All sizes take turns, so that what disturbs the machine falls on each of them. Before that the first `warm_ups`
    sizes run once, None: all.
    """
    times: dict[int, list[float]] = {size: [] for size in sizes}
    for size in sizes[:warm_ups]:
        run(size)
    for _ in range(repeats):
        for size in sizes:
            times[size].append(run(size))
    return [Point(size, work(size), tuple(times[size])) for size in sizes]


def doublings(first: int, last: int) -> list[int]:
    """first, 2 x first, ... up to and including `last`, where that is not below `first`."""
    return [first << i for i in range((last // first).bit_length())]
