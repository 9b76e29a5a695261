"""Threads that share a large write, for backends whose sender moves the bytes by itself."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from splitserve.disaggregation.transports.base import TransportOptions
from splitserve.errors import ConfigError

# The name in TransportOptions.extra.
OPTION = "threads"
# Unless it says otherwise; fewer where there are fewer cores.
NUM_THREADS = 2
MAX_THREADS = 64


def threads_of(options: TransportOptions) -> int:
    """Of one large write. Raises ConfigError."""
    wanted = options.extra.get(OPTION)
    return min(NUM_THREADS, len(os.sched_getaffinity(0))) if wanted is None else thread_count(wanted)


def thread_count(wanted: str) -> int:
    """The number that the option says. Raises ConfigError."""
    if not (wanted.isascii() and wanted.isdigit() and 1 <= int(wanted) <= MAX_THREADS):
        raise ConfigError(f"--transfer-option {OPTION}={wanted}: a number from 1 to {MAX_THREADS}")
    return int(wanted)


def run_together(works: Sequence[Callable[[], None]]) -> None:
    """The first in this thread, each of the others in one of its own. When this returns, or raises, all have ended.

    All have one store of work, and whoever finds it empty ends: a system that has no more threads leaves it to those
    that there are. Raises what this thread's has raised, else what another's has.
    """
    first, *others = works
    if not others:
        first()
        return
    with ThreadPoolExecutor(len(others), "kv-share") as pool:
        shares = []
        with contextlib.suppress(RuntimeError):
            for work in others:
                shares.append(pool.submit(work))
        first()
    for share in shares:
        share.result()
