"""Which transfer backends a benchmark measures: those named, or those of its own choice that are present."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console

from splitserve.disaggregation.transports import missing
from splitserve.errors import ConfigError


def choose_backends(named: Sequence[str], default: Iterable[str], option: str, console: Console) -> list[str]:
    """One that is absent is left out with a remark on `console`. Raises ConfigError where it was asked for by name."""
    chosen = []
    for backend in named or default:
        problem = missing(backend)
        if problem is None:
            chosen.append(backend)
        elif named:
            raise ConfigError(f"{option} {backend}: {problem}")
        else:
            console.print(f"{backend}: absent: {problem}", highlight=False, markup=False)
    return chosen
