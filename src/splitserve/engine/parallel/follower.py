"""A rank that has no scheduler: it computes its share of the driver's steps, one after the other.

It draws no tokens and knows no requests. An order that it could not carry out leaves the other ranks waiting for it, so
its process has to end then.
"""

from __future__ import annotations

import torch

from splitserve.engine.attention.base import AttentionBackend
from splitserve.engine.head import LanguageHead
from splitserve.engine.loader import LoadedModel
from splitserve.engine.parallel.orders import array, decode
from splitserve.engine.upload import to_device
from splitserve.errors import EngineError


class FollowerRunner:
    """Carries out orders, in the order of their numbers. In one thread."""

    def __init__(self, loaded: LoadedModel, attention: AttentionBackend, page_size: int) -> None:
        self._attention = attention
        self._page_size = page_size
        self._device = loaded.device
        self._body = loaded.body()
        self._head = LanguageHead(loaded.model)
        self._next = 0

    def run(self, order: bytes) -> None:
        """This rank's share of one step. Raises EngineError: the ranks are out of step then, the process must end."""
        try:
            with torch.inference_mode():
                self._run(order)
        except EngineError:
            raise
        except Exception as error:
            raise EngineError(f"A step of the driver failed on this rank: {type(error).__name__}: {error}") from error

    def _run(self, data: bytes) -> None:
        order = decode(data)
        if order.number != self._next:
            raise EngineError(f"order {order.number} of the driver came where {self._next} was to come")
        self._next += 1
        batch = order.batch(self._page_size)
        token_ids = to_device(array(order.token_ids), self._device).unsqueeze(0)
        positions = to_device(batch.positions, self._device).unsqueeze(0)
        hidden = self._body(token_ids, positions, self._attention.plan(batch))
        if hidden is not None:
            for rows in order.head_rows:
                # Its part goes to the driver from within.
                self._head(hidden[to_device(array(rows), self._device)])
        if self._device.type == "cuda":
            # Who hands the step's KV over reads it outside torch's order.
            torch.cuda.current_stream(self._device).synchronize()
