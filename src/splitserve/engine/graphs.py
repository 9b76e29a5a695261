"""Decode steps as CUDA graphs: hundreds of kernel launches become one.

1. At startup the model's body is recorded for a few batch sizes (`bucket_sizes`), the largest first, so that the
   smaller ones reuse its memory pool. A step of a recorded size allocates no more memory.
2. A decode step uses the smallest size that holds it. The rows that are left over compute a padding token; its KV goes
   to the pool's padding page.
3. `run` copies the step's tokens and positions into the tensors of that recording, fills the attention with its pages,
   and replays. The result is valid until the next step.

The caller computes a step that is no decode, or too large. The recorder is a parameter: `CudaRecorder`, or in tests a
function that runs everything anew.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from splitserve.engine.attention.base import PagedBatch
from splitserve.engine.attention.flashinfer import FlashInferBackend, FlashInferFixedDecode
from splitserve.engine.inputs import StepInputs
from splitserve.engine.probe import run_body

# Parts of torch.cuda have no types.
_cuda: Any = torch.cuda
# Records a function's work on the device. Returns a function that repeats it, and the tensor that it returned.
Recorder = Callable[[Callable[[], torch.Tensor]], tuple[Callable[[], None], torch.Tensor]]


def bucket_sizes(largest: int) -> tuple[int, ...]:
    """Return the powers of two up to `largest`, and `largest` itself; none for 0. So a step is at most half padding."""
    powers = [1 << i for i in range(max(largest, 0).bit_length())]
    return tuple(sorted({*(p for p in powers if p <= largest), *([largest] if largest > 0 else [])}))


def bucket_for(num_requests: int, sizes: Sequence[int]) -> int | None:
    """Return the smallest of `sizes` (in rising order) that is at least `num_requests`. None: all are smaller."""
    return next((size for size in sizes if size >= num_requests), None)


def padded(batch: PagedBatch, size: int, padding_page: int, window_padding_page: int | None = None) -> PagedBatch:
    """Return a decode step of `size` requests: those of `batch`, and behind them some that write to the padding page.

    `window_padding_page`: padding page of the windowed layers' own pool; None: there is no such pool.
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
    # [1, size] each: input of a replay.
    token_ids: torch.Tensor
    positions: torch.Tensor
    attention: FlashInferFixedDecode
    replay: Callable[[], None]
    # [size, hidden_size]: output of a replay.
    hidden: torch.Tensor


class DecodeGraphs:
    """Recorded decode steps, for the model's thread only. `max_pages`: per request."""

    def __init__(
        self,
        model: Any,
        attention: FlashInferBackend,
        record: Recorder,
        *,
        sizes: Sequence[int],
        max_pages: int,
        page_size: int,
        padding_page: int,
        device: torch.device,
        window_padding_page: int | None = None,
    ) -> None:
        self._model = model
        self._sizes = tuple(sorted(sizes))
        self._padding_pages = padding_page, window_padding_page
        empty = PagedBatch(np.zeros(0, np.int64), np.zeros(0, np.int64), (), page_size)
        self._recordings: dict[int, _Recording] = {}
        for size in reversed(self._sizes):
            fixed = attention.fixed_decode(size, max_pages)
            fixed.fill(padded(empty, size, *self._padding_pages))
            token_ids = torch.zeros(1, size, dtype=torch.int64, device=device)
            self._recordings[size] = self._record(record, token_ids, torch.zeros_like(token_ids), fixed)

    def _record(
        self, record: Recorder, token_ids: torch.Tensor, positions: torch.Tensor, fixed: FlashInferFixedDecode
    ) -> _Recording:
        def compute() -> torch.Tensor:
            return run_body(self._model, token_ids, positions, fixed)

        replay, hidden = record(compute)
        return _Recording(token_ids, positions, fixed, replay, hidden)

    def run(self, inputs: StepInputs) -> torch.Tensor | None:
        """Return the body's output [T, hidden_size] of a decode step, valid until the next `run`. None: other step."""
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
        return recording.hidden[:num_requests]


class CudaRecorder:
    """Recorder of CUDA graphs that share one memory pool, because they run one after the other."""

    def __init__(self, device: torch.device) -> None:
        self._stream = _cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, compute: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
        current = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            # On first use libraries choose and compile kernels, and attention plans: none of it can be recorded.
            for _ in range(2):
                compute()
        current.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        # Work of other threads on the device must not enter the recording.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            out = compute()
        return graph.replay, out
