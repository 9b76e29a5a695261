"""Intervals between decode steps while another worker of the host computes prompts.

Decode steps that follow each other take their share of the host's cores without an end. With --target-itl-ms a decode
worker begins one per interval instead. For the rest of the interval the prompts have all cores.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from splitserve.core.clock import Clock

# Seconds between two checks that prompts are still computed.
_POLL = 0.005


class DecodePacing:
    """Intervals of decode steps, in seconds. Used by the engine's thread alone.

    `has_other_prompts`: whether another worker of the host computes prompts now.
    """

    def __init__(
        self,
        interval: float,
        has_other_prompts: Callable[[], bool],
        clock: Clock,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._interval = interval
        self._has_other_prompts = has_other_prompts
        self._clock = clock
        self._sleep = sleep
        # Clock time at which the last step began.
        self._began = 0.0

    @contextmanager
    def step(self) -> Iterator[None]:
        """Surround a decode step: wait until it should begin."""
        while (left := self._began + self._interval - self._clock.now()) > 0 and self._has_other_prompts():
            self._sleep(min(left, _POLL))
        self._began = self._clock.now()
        yield
