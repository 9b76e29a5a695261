"""Threads that share a large write, for backends that move the bytes in the sender."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from splitserve.core.errors import OptionError
from splitserve.transfer.transports.base import TransportOptions

# Key in TransportOptions.extra.
OPTION = "threads"
# Default number of threads. Fewer if there are fewer cores.
NUM_THREADS = 2
MAX_THREADS = 64


def threads_of(options: TransportOptions) -> int:
    """Return the number of threads of one large write. Raises ConfigError."""
    wanted = options.extra.get(OPTION)
    return min(NUM_THREADS, len(os.sched_getaffinity(0))) if wanted is None else thread_count(wanted)


def thread_count(wanted: str) -> int:
    """Return the value of the option as a number. Raises ConfigError."""
    if not (wanted.isascii() and wanted.isdigit() and 1 <= int(wanted) <= MAX_THREADS):
        raise OptionError("--transfer-option", f"{OPTION}={wanted}: a number from 1 to {MAX_THREADS}")
    return int(wanted)


def run_together(works: Sequence[Callable[[], None]]) -> None:
    """Run the first in this thread, each other in a thread of its own. On return or error, all have ended.

    All take their parts from one queue and end when it is empty, so the work is complete even if the system has no
    more threads. Raises the error of this thread's work, else that of another.
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
