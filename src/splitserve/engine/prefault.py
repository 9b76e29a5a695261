"""Memory of the KV pool that the system provides before a step writes to it.

The system provides memory on the first write, by huge pages of 2 MB, and zeroes it meanwhile. Neighbouring KV pages
begin a huge page of every component in the same step: with 60 components that takes 0.1 s, and all streams stall. So a
thread requests the memory ahead of the highest page that a step or a KV transfer uses, if possible while no worker of
the host computes. A burst of prompts may still overtake it. Only a part of a pool that is hardly used takes memory.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from splitserve.core.machine import HUGE_PAGE_BYTES, Arena
from splitserve.engine.kernels.cores import is_host_computing

logger = logging.getLogger(__name__)

# Bytes of each component that are provided beyond the highest page in use. More are requested when a quarter of them is
# in use: KV transfers and other requests use pages that no step has named yet.
_AHEAD_BYTES = 2 * HUGE_PAGE_BYTES
# Bytes of each component that remain ahead while the thread waits for the end of all steps.
_ENOUGH_BYTES = _AHEAD_BYTES // 2
# Seconds between two checks whether steps run, and longest wait for their end: the host may never be idle.
_CHECK_INTERVAL = 0.01
_MAX_WAIT = 1.0
# Pause after each huge page beside a step, as a multiple of the time it took. Without it, steps share a core with this
# thread, and take twice as long.
_REST = 4.0


@dataclass(slots=True)
class _Part:
    """Memory of one component: `size` bytes of the arena from `offset` on. Before `end` it is provided."""

    offset: int
    size: int
    page_bytes: int
    end: int = 0


class Prefault:
    """Provider of an arena's memory. `parts`: offset, bytes, and bytes of a page of each component.

    `is_computing`: whether any worker of this host computes a step now; None: unknown. `use` may be called from any
    thread, all else from one.
    """

    def __init__(
        self,
        arena: Arena,
        parts: Sequence[tuple[int, int, int]],
        is_computing: Callable[[], bool | None] = is_host_computing,
    ) -> None:
        self._arena = arena
        self._is_computing = is_computing
        self._parts = [_Part(*part) for part in parts]
        self._executor = ThreadPoolExecutor(1, "kv-memory")
        self._running: Future[None] | None = None
        self._is_stopping = threading.Event()
        # Highest page in use. Pages below `_num_ready` need no further work.
        self._page = -1
        self._num_ready = 0

    def use(self, page: int) -> None:
        """State that a step or a KV transfer writes to pages up to `page`. Does not wait."""
        self._page = max(self._page, page)
        if page >= self._num_ready and (self._running is None or self._running.done()):
            self._running = self._executor.submit(self._provide)

    def _provide(self) -> None:
        """Provide memory up to the page in use and what is ahead of it, a huge page of each component in turn."""
        while not self._is_stopping.is_set():
            page = self._page
            goals = [min(part.size, (page + 1) * part.page_bytes + _AHEAD_BYTES) for part in self._parts]
            behind = [(part, goal) for part, goal in zip(self._parts, goals, strict=True) if part.end < goal]
            if not behind:
                self._num_ready = page + max(1, min(_AHEAD_BYTES // 4 // part.page_bytes for part in self._parts))
                return
            for part, goal in behind:
                self._wait_for_idle(part)
                if self._is_stopping.is_set():
                    return
                end, began = min(goal, part.end + HUGE_PAGE_BYTES), time.monotonic()
                if not self._arena.provide(part.offset + part.end, end - part.end):
                    # An older system, or one without free memory: then steps get it as without this thread.
                    logger.warning("the system does not provide memory of the KV pool ahead of use")
                    self._num_ready = sys.maxsize
                    return
                part.end = end
                seconds = 0.0 if self._is_computing() is False else _REST * (time.monotonic() - began)
                if self._is_stopping.wait(seconds):
                    return

    def _wait_for_idle(self, part: _Part) -> None:
        """Wait until no step runs, unless little memory is left ahead, or for _MAX_WAIT seconds."""
        deadline = time.monotonic() + _MAX_WAIT
        while (
            part.end - (self._page + 1) * part.page_bytes > _ENOUGH_BYTES
            and self._is_computing()
            and time.monotonic() < deadline
            and not self._is_stopping.wait(_CHECK_INTERVAL)
        ):
            pass

    def forget(self) -> None:
        """Wait until no memory is being provided. The owner may then return all of it to the system."""
        self._is_stopping.set()
        if self._running is not None:
            self._running.result()
        self._is_stopping.clear()
        self._running, self._page, self._num_ready = None, -1, 0
        for part in self._parts:
            part.end = 0

    def close(self) -> None:
        """End the thread. Idempotent."""
        self._is_stopping.set()
        self._executor.shutdown()
