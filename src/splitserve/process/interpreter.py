"""Settings of the Python interpreter in the project's own processes. They affect the whole process."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

# Maximum seconds that a thread computes in Python while another one waits. The engine's thread waits between any two
# kernels; with Python's default of 5 ms it would wait until the scheduler has finished its work.
_SWITCH_INTERVAL = 1e-4
# New objects between two garbage collections. A step, or a request at the router, creates many objects that are freed
# with it, and hardly a cycle.
_GARBAGE_THRESHOLD = 20_000


@contextmanager
def collect_rarely() -> Iterator[None]:
    """Collect garbage rarely after everything is loaded. Restore the old settings on exit."""
    thresholds = gc.get_threshold()
    gc.set_threshold(_GARBAGE_THRESHOLD, *thresholds[1:])
    # Loaded objects stay: the collector need not traverse them again in the middle of a step.
    gc.collect()
    gc.freeze()
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
