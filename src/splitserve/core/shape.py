"""Number of ranks of a worker, and how its model is split over them, as options of the commands that start workers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from splitserve.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class WorkerShape:
    # Ranks that share each matrix, stages that share the layers, and schedulers that have a model each.
    tp_size: int = 1
    pp_size: int = 1
    dp_size: int = 1

    @classmethod
    def of(cls, role: str, tp_size: int, pp_size: int, dp_size: int) -> Self:
        """Return the shape given by options `--ROLE-tp-size` and so on. Raises ConfigError."""
        for name, size in (("tp", tp_size), ("pp", pp_size), ("dp", dp_size)):
            if size < 1:
                raise ConfigError(f"--{role}-{name}-size {size}: it must be at least 1")
        return cls(tp_size, pp_size, dp_size)

    @property
    def num_ranks(self) -> int:
        """Number of processes that compute."""
        return self.tp_size * self.pp_size * self.dp_size

    @property
    def args(self) -> list[str]:
        """Options of `splitserve serve` for this shape."""
        sizes = {"--tp-size": self.tp_size, "--pp-size": self.pp_size, "--dp-size": self.dp_size}
        return [word for name, size in sizes.items() for word in (name, str(size))]

    def __str__(self) -> str:
        return f"tp {self.tp_size} x pp {self.pp_size} x dp {self.dp_size}"
