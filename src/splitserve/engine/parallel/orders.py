"""Orders of the driver to the other ranks: all data that they need to compute their share of a step.

One message per step, the same for all ranks. Its size is that of its tokens and page numbers.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from splitserve.core.batch import LAST_DRAWN, StepPlan
from splitserve.core.errors import EngineError
from splitserve.engine.attention.base import IntArray, PagedBatch


class StepOrder(msgspec.Struct, frozen=True, array_like=True, tag="step", gc=False):
    """One forward pass. Arrays are the bytes of int64 numbers, `pages` of int32, in this host's byte order."""

    # Counts from 0, to detect lost or repeated orders.
    number: int
    # Tokens of all requests, one after the other; none is LAST_DRAWN.
    token_ids: bytes
    # Per request: tokens computed before, tokens to compute.
    starts: bytes
    lengths: bytes
    # Page numbers of the first request, then of the second, and so on: as many for each as its tokens need.
    pages: bytes
    # Rows of the step with logits that are computed, call after call.
    head_rows: tuple[bytes, ...]
    # Page numbers in the windowed layers' own pool, arranged as `pages`. None: there is no such pool.
    window_pages: bytes | None = None

    def batch(self, page_size: int) -> PagedBatch:
        """Return the batch of the order. Raises EngineError if the order contradicts itself."""
        starts, lengths = array(self.starts), array(self.lengths)
        if len(starts) != len(lengths) or len(array(self.token_ids)) != lengths.sum():
            raise EngineError(f"order {self.number} of the driver contradicts itself")
        ends = np.cumsum(-(-(starts + lengths) // page_size))
        window_pages = None if self.window_pages is None else self._split(self.window_pages, ends)
        return PagedBatch(starts, lengths, self._split(self.pages, ends), page_size, window_pages)

    def _split(self, data: bytes, ends: IntArray) -> tuple[IntArray, ...]:
        """Split a list of pages by request; `ends`: end of each request's pages."""
        pages = np.frombuffer(data, dtype=np.int32).astype(np.int64)
        if len(pages) != ends[-1]:
            raise EngineError(f"order {self.number} of the driver has {len(pages)} pages where {ends[-1]} are needed")
        return tuple(np.split(pages, ends[:-1]))


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(StepOrder)


def encode(order: StepOrder) -> bytes:
    return _encoder.encode(order)


def decode(order: bytes) -> StepOrder:
    """Return the order. Raises EngineError if it cannot be read."""
    try:
        return _decoder.decode(order)
    except msgspec.MsgspecError as error:
        raise EngineError(f"an order of the driver cannot be read: {error}") from error


def step_order(
    number: int, plan: StepPlan, batch: PagedBatch, drawn: npt.NDArray[np.int64], head_rows: Sequence[Sequence[int]]
) -> StepOrder:
    """Build the order of a step. `drawn`: the last sampled token, by row of the page table."""
    token_ids = np.concatenate([np.asarray(r.token_ids, dtype=np.int64) for r in plan.requests])
    last = [r.row for r in plan.requests if r.token_ids[0] == LAST_DRAWN]
    if last:
        token_ids[token_ids == LAST_DRAWN] = drawn[last]
    return StepOrder(
        number=number,
        token_ids=token_ids.tobytes(),
        starts=batch.starts.tobytes(),
        lengths=batch.lengths.tobytes(),
        pages=_joined(batch.pages),
        head_rows=tuple(np.array(rows, dtype=np.int64).tobytes() for rows in head_rows),
        window_pages=None if batch.window_pages is None else _joined(batch.window_pages),
    )


def _joined(pages: Sequence[IntArray]) -> bytes:
    return np.concatenate(pages).astype(np.int32).tobytes()


def array(data: bytes) -> IntArray:
    """Return an array of an order's bytes; a copy that may be written to."""
    return np.frombuffer(data, dtype=np.int64).copy()
