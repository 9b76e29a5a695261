"""How Python runs in our processes: settings of the whole interpreter, so nobody else may change them."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

# Seconds a thread computes in Python at most while another one wants to. The engine's thread wants to between any two
# kernels; with Python's own 5 ms it would wait there until the scheduler has done all it has to.
_SWITCH_INTERVAL = 1e-4
# New objects between two looks for garbage: a step, or a request at the router, makes many that are gone with it, and
# hardly a cycle.
_GARBAGE_THRESHOLD = 20_000


@contextmanager
def collect_rarely() -> Iterator[None]:
    """Look for garbage now and then, when everything is loaded. At the end everything is as it was."""
    thresholds = gc.get_threshold()
    gc.set_threshold(_GARBAGE_THRESHOLD, *thresholds[1:])
    # What is loaded stays: the collector need not walk through all of it again, in the middle of a step.
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
        gc.set_threshold(*thresholds)


@contextmanager
def set_up_interpreter() -> Iterator[None]:
    """A scheduler's process, when everything is loaded. At the end everything is as it was."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(_SWITCH_INTERVAL)
    try:
        with collect_rarely():
            yield
    finally:
        sys.setswitchinterval(interval)
