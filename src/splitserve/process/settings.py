"""Settings of the project's own processes: logging, garbage collection, switching of threads.

They affect the whole process. Logging writes one line per record on standard error (`log_format.py`).
"""

from __future__ import annotations

import ctypes
import gc
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from splitserve.core.config import LOG_LEVELS
from splitserve.core.errors import OptionError
from splitserve.process.log_format import FORMATTERS

# Libraries, and the lowest level of their records that is useful to operators.
_QUIET = {"uvicorn.error": logging.WARNING, "uvicorn.access": logging.WARNING, "httpx": logging.WARNING}
# Maximum seconds that a thread computes in Python while another one waits. The engine's thread waits between any two
# kernels; with Python's default of 5 ms it would wait until the scheduler has finished its work.
_SWITCH_INTERVAL = 1e-4
# New objects between two garbage collections. A step, or a request at the router, creates many objects that are freed
# with it, and hardly a cycle.
_GARBAGE_THRESHOLD = 20_000


def setup_logger(level: str, form: str = "text") -> None:
    """Set up logging. `form`: one of LOG_FORMATS. Raises ConfigError for an unknown level."""
    if level.lower() not in LOG_LEVELS:
        raise OptionError("--log-level", f"{level!r}: choose one of {', '.join(LOG_LEVELS)}")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(FORMATTERS[form]())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    # Our lines do not contain the source location; logging's documentation describes this way to skip its look-up.
    logging._srcfile = None
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    for name, minimum in _QUIET.items():
        logging.getLogger(name).setLevel(max(minimum, logging.getLogger().level))


def trim_memory() -> None:
    """Return freed memory to the system, because a load leaves much of it in the allocator. No-op without glibc."""
    with suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


@contextmanager
def collect_rarely() -> Iterator[None]:
    """Collect garbage rarely after everything is loaded. Restore the old settings on exit."""
    thresholds = gc.get_threshold()
    gc.set_threshold(_GARBAGE_THRESHOLD, *thresholds[1:])
    # Loaded objects stay: the collector need not traverse them again in the middle of a step.
    gc.collect()
    gc.freeze()
    trim_memory()
    try:
        yield
    finally:
        gc.unfreeze()
        gc.set_threshold(*thresholds)


@contextmanager
def set_up_interpreter() -> Iterator[None]:
    """Set up the interpreter of a scheduler process after everything is loaded. Restore the old settings on exit."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(_SWITCH_INTERVAL)
    try:
        with collect_rarely():
            yield
    finally:
        sys.setswitchinterval(interval)
