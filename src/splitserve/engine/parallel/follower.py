"""A rank without a scheduler: it computes its share of the driver's steps, one after the other.

It samples no tokens and knows no requests. If it cannot carry out an order, the other ranks wait for it, so its process
must end.
"""

from __future__ import annotations

import torch

from splitserve.core.errors import EngineError
from splitserve.engine.attention.base import AttentionBackend
from splitserve.engine.head import LanguageHead
from splitserve.engine.loader import LoadedModel
from splitserve.engine.parallel.orders import array, decode
from splitserve.engine.upload import to_device


class FollowerRunner:
    """Runner of the driver's orders, in the order of their numbers. In one thread."""

    def __init__(self, loaded: LoadedModel, attention: AttentionBackend, page_size: int) -> None:
        self._attention = attention
        self._page_size = page_size
        self._device = loaded.device
        self._body = loaded.body()
        self._head = LanguageHead(loaded.model)
        self._next = 0

    def run(self, order: bytes) -> None:
        """Compute this rank's share of one step. After an EngineError the ranks are out of step: end the process."""
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
                # The call itself sends this rank's part to the driver.
                self._head(hidden[to_device(array(rows), self._device)])
        if self._device.type == "cuda":
            # Transports read the step's KV outside torch's order.
            torch.cuda.current_stream(self._device).synchronize()
