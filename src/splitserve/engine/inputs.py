"""A step plan as tensors on the device: the requests' tokens one after the other, with their positions and pages.

Reads the page table, which the scheduler owns, only here and only once per step: a later change of a row does not
affect a prepared or running step. Tokens that the step before is still to sample are filled in later.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from splitserve.core.batch import LAST_SAMPLED, RequestStep, StepPlan
from splitserve.core.errors import EngineError
from splitserve.engine.attention.base import IntArray, PagedBatch


def to_device(array: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """Return the array as a tensor on the device, without waiting for it. On a CPU it shares contiguous memory.

    A plain copy from the host waits until a GPU has done all work before it. From page-locked memory the copy is queued
    among the kernels, and the host continues. Torch keeps that memory until the copy is done, and then reuses it.
    """
    host = torch.from_numpy(np.ascontiguousarray(array))
    if device.type != "cuda":
        return host.to(device)
    return host.pin_memory().to(device, non_blocking=True)


def wait_for(device: torch.device) -> None:
    """Wait for the work of this thread on the device: transports read the step's KV outside torch's order."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


PageTable = npt.NDArray[np.int32]
# Page -> page of the windowed layers' own pool (`cache/window_pages.py`).
WindowTable = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class StepInputs:
    """Input of one forward pass."""

    # [1, T], on the device.
    token_ids: torch.Tensor
    positions: torch.Tensor
    # Location of the tokens in the pool.
    batch: PagedBatch
    # Request i's tokens are [offsets[i], offsets[i + 1]) of the step.
    offsets: IntArray
    # Rows of the page table with last tokens that go to `places` of the step, [n] each, on the device; None: no such
    # row.
    last_sampled_rows: torch.Tensor | None = None
    places: torch.Tensor | None = None

    def fill_in(self, sampled: torch.Tensor) -> None:
        """Fill in the last sampled tokens. `sampled`: last token of every row of the page table."""
        if self.last_sampled_rows is not None:
            self.token_ids[0, self.places] = sampled[self.last_sampled_rows]


def build_inputs(
    plan: StepPlan,
    page_table: PageTable,
    page_size: int,
    vocab_size: int,
    device: torch.device,
    window_table: WindowTable | None = None,
) -> StepInputs:
    """Flatten a plan of at least one request.

    Raises EngineError if a request has no tokens, a token outside the vocabulary, or too few pages.
    """
    pages = tuple(_pages_of(r, page_table, page_size) for r in plan.requests)
    batch = PagedBatch(
        starts=np.array([r.start for r in plan.requests], dtype=np.int64),
        lengths=np.array([len(r.token_ids) for r in plan.requests], dtype=np.int64),
        pages=pages,
        page_size=page_size,
        window_pages=None if window_table is None else tuple(window_table[p].astype(np.int64) for p in pages),
    )
    token_ids = np.concatenate([np.asarray(r.token_ids, dtype=np.int64) for r in plan.requests])
    if token_ids.max() >= vocab_size or token_ids.min() < LAST_SAMPLED:
        raise EngineError(f"a token of this step is not in the model's vocabulary of {vocab_size}")
    places = np.flatnonzero(token_ids == LAST_SAMPLED)
    rows = np.array([r.row for r in plan.requests if r.token_ids[0] == LAST_SAMPLED], dtype=np.int64)
    return StepInputs(
        token_ids=to_device(token_ids, device).unsqueeze(0),
        positions=to_device(batch.positions, device).unsqueeze(0),
        batch=batch,
        offsets=batch.offsets,
        last_sampled_rows=to_device(rows, device) if len(rows) else None,
        places=to_device(places, device) if len(rows) else None,
    )


def _pages_of(request: RequestStep, page_table: PageTable, page_size: int) -> IntArray:
    if not request.token_ids:
        raise EngineError(f"request {request.rid} has no tokens in this step")
    num_pages = -(-(request.start + len(request.token_ids)) // page_size)
    if num_pages > page_table.shape[1]:
        raise EngineError(
            f"request {request.rid} needs {num_pages} pages in this step, but a row of the page table has "
            f"{page_table.shape[1]}"
        )
    return page_table[request.row, :num_pages].astype(np.int64)
