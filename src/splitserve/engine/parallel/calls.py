"""The calls of the model that the ranks make together in one step: one of the body, then those of the head.

In each call a rank waits for all others. So if a rank fails between two calls, it must still make the remaining ones.
Only a failure within a call leaves the ranks out of step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
import torch

from splitserve.core.errors import RanksLostError, clause
from splitserve.engine.upload import to_device

# Rows of the step with logits that are computed in one call.
Rows = Sequence[int]


class StepCalls:
    """The calls of one step, on the driver."""

    def __init__(self, head: Callable[[torch.Tensor], torch.Tensor], told: Sequence[Rows] | None) -> None:
        """`told`: rows of each call of the head that the other ranks were sent; None: no rank waits in any call."""
        self._head = head
        self._is_shared = told is not None
        self._left = deque(told or ())
        # [T, hidden_size], once the body was called.
        self._hidden: torch.Tensor | None = None
        # Error of a call, after which the ranks are out of step.
        self._failure: Exception | None = None

    def run_body(self, body: Callable[[], torch.Tensor]) -> None:
        """Call the body; first of all calls, and once."""
        self._hidden = self._together(body)

    def logits(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the logits [n, vocab_size] after these rows [n] of the step."""
        hidden = self._hidden
        assert hidden is not None
        if self._left:
            self._left.popleft()
        return self._together(lambda: self._head(hidden[rows]))

    def make_up(self, error: Exception) -> None:
        """Make the remaining calls after `error` of this rank. Raises RanksLostError if the ranks are out of step."""
        if not self._is_shared:
            return
        try:
            if self._failure is not None or self._hidden is None:
                raise self._failure or error
            while self._left:
                self.logits(to_device(np.array(self._left[0]), self._hidden.device))
        except Exception as cause:
            raise RanksLostError(
                f"The ranks of this worker are out of step: {type(cause).__name__}: {clause(cause)}. Start it again."
            ) from cause

    def _together(self, call: Callable[[], torch.Tensor]) -> torch.Tensor:
        try:
            return call()
        except Exception as error:
            self._failure = error
            raise
