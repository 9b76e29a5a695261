"""Decode steps as CUDA graphs: hundreds of kernel launches become one.

1. At the start the model's body is recorded for a few batch sizes (`bucket_sizes`), the largest first, so that the
   smaller ones find their memory in its pool. A step of a recorded size takes no memory any more.
2. A decode step goes to the smallest size that holds it. The rows that are left over compute a token of nobody, whose
   KV goes to the pool's padding page.
3. `run` copies the step's tokens and positions into the tensors of that recording, has the attention filled with its
   pages, and replays. What it returns holds until the next step.

A step that is no decode, or too large, is left to the caller. Who records is given from outside: `CudaRecorder`, or in
tests a function that runs everything anew.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from splitserve.engine.attention.base import FixedDecode, PagedBatch, ReplayableBackend
from splitserve.engine.inputs import StepInputs

# Parts of it have no types.
_cuda: Any = torch.cuda
# Records what a function does on the device: what does it again, and the tensor that it returned.
Recorder = Callable[[Callable[[], torch.Tensor]], tuple[Callable[[], None], torch.Tensor]]


def bucket_sizes(largest: int) -> tuple[int, ...]:
    """Powers of two, and `largest` itself, in rising order; none for 0. So a step is at most half padding."""
    powers = [1 << i for i in range(max(largest, 0).bit_length())]
    return tuple(sorted({*(p for p in powers if p <= largest), *([largest] if largest > 0 else [])}))


def bucket_for(num_requests: int, sizes: Sequence[int]) -> int | None:
    """The smallest of `sizes` (rising) that holds so many; None where none does."""
    return next((size for size in sizes if size >= num_requests), None)


def padded(batch: PagedBatch, size: int, padding_page: int, window_padding_page: int | None = None) -> PagedBatch:
    """A decode step of `size` requests: those of `batch`, and behind them some that write to the padding page.

    `window_padding_page`: that of the windowed layers' own pool; None: there is none.
    """
    extra = size - len(batch.starts)
    window_pages = None
    if window_padding_page is not None:
        window_pages = (*(batch.window_pages or ()), *[np.array([window_padding_page], np.int64)] * extra)
    return PagedBatch(
        starts=np.concatenate((batch.starts, np.zeros(extra, np.int64))),
        lengths=np.concatenate((batch.lengths, np.ones(extra, np.int64))),
        pages=(*batch.pages, *[np.array([padding_page], np.int64)] * extra),
        page_size=batch.page_size,
        window_pages=window_pages,
    )


@dataclass(frozen=True, slots=True)
class _Recording:
    # [1, size] each: where a replay finds its input.
    token_ids: torch.Tensor
    positions: torch.Tensor
    attention: FixedDecode
    replay: Callable[[], None]
    # [1, size, hidden_size]: where it leaves its output.
    hidden: torch.Tensor


class DecodeGraphs:
    """`body`: the model without its head. `max_pages`: of one request. Used by the thread that runs the model."""

    def __init__(
        self,
        body: Any,
        attention: ReplayableBackend,
        record: Recorder,
        *,
        sizes: Sequence[int],
        max_pages: int,
        page_size: int,
        padding_page: int,
        device: torch.device,
        window_padding_page: int | None = None,
    ) -> None:
        self._body = body
        self._sizes = tuple(sorted(sizes))
        self._padding_pages = padding_page, window_padding_page
        nobody = PagedBatch(np.zeros(0, np.int64), np.zeros(0, np.int64), (), page_size)
        self._recordings: dict[int, _Recording] = {}
        for size in reversed(self._sizes):
            fixed = attention.fixed_decode(size, max_pages)
            fixed.fill(padded(nobody, size, *self._padding_pages))
            token_ids = torch.zeros(1, size, dtype=torch.int64, device=device)
            self._recordings[size] = self._record(record, token_ids, torch.zeros_like(token_ids), fixed)

    def _record(
        self, record: Recorder, token_ids: torch.Tensor, positions: torch.Tensor, fixed: FixedDecode
    ) -> _Recording:
        def compute() -> torch.Tensor:
            out = self._body(input_ids=token_ids, position_ids=positions, use_cache=False, step_attention=fixed)
            hidden: torch.Tensor = out.last_hidden_state
            return hidden

        replay, hidden = record(compute)
        return _Recording(token_ids, positions, fixed, replay, hidden)

    def run(self, inputs: StepInputs) -> torch.Tensor | None:
        """The body's output [T, hidden_size] for a decode step, until the next `run`; None for any other step."""
        batch = inputs.batch
        num_requests = len(batch.starts)
        size = bucket_for(num_requests, self._sizes)
        if size is None or (batch.lengths != 1).any():
            return None
        recording = self._recordings[size]
        recording.token_ids[:, :num_requests].copy_(inputs.token_ids)
        recording.positions[:, :num_requests].copy_(inputs.positions)
        recording.attention.fill(padded(batch, size, *self._padding_pages))
        recording.replay()
        return recording.hidden[0, :num_requests]


class CudaRecorder:
    """Recorder of CUDA graphs that share one pool of memory: they run one after the other."""

    def __init__(self, device: torch.device) -> None:
        self._stream = _cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, compute: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
        current = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            # Libraries choose and compile kernels on first use, and attention plans: none of it can be recorded.
            for _ in range(2):
                compute()
        current.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        # What other threads do with the device meanwhile is no business of the recording.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            out = compute()
        return graph.replay, out
