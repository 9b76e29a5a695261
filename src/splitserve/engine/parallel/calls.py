"""The calls of the model that the ranks make together in one step: one of the body, then those of the head.

Each waits in them for all others. So a rank that has failed between two of them, over what is its own business, has to
make those that are left all the same; only what fails in one of them leaves the ranks out of step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
import torch

from splitserve.engine.upload import to_device
from splitserve.errors import RanksLostError, clause

# Rows of the step whose logits are computed in one call.
Rows = Sequence[int]


class StepCalls:
    """One step's, on the driver."""

    def __init__(self, head: Callable[[torch.Tensor], torch.Tensor], told: Sequence[Rows] | None) -> None:
        """`told`: what the other ranks were told of the calls of the head; None: nobody waits in any call."""
        self._head = head
        self._is_shared = told is not None
        self._left = deque(told or ())
        # [T, hidden_size], once the body was called.
        self._hidden: torch.Tensor | None = None
        # Why the ranks are not at the same call.
        self._failure: Exception | None = None

    def run_body(self, body: Callable[[], torch.Tensor]) -> None:
        """First of all, and once."""
        self._hidden = self._together(body)

    def logits(self, rows: torch.Tensor) -> torch.Tensor:
        """[n, vocab_size] after these rows [n] of the step."""
        hidden = self._hidden
        assert hidden is not None
        if self._left:
            self._left.popleft()
        return self._together(lambda: self._head(hidden[rows]))

    def make_up(self, error: Exception) -> None:
        """Make the calls that `error` has kept this rank from. RanksLostError: the ranks are out of step."""
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
