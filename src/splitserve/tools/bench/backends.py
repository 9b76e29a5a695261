"""Choice of the transfer backends that a benchmark measures: the named ones, or its default ones that are present."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console

from splitserve.core.errors import ConfigError
from splitserve.transfer.transports import missing


def choose_backends(named: Sequence[str], default: Iterable[str], option: str, console: Console) -> list[str]:
    """Return the backends to measure. Raises ConfigError if a named one is absent.

    An absent default backend is left out with a remark on `console`.
    """
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
