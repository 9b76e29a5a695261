"""The contract of an attention backend: paged KV in, one output row a token out.

A step's attention has two halves. `AttentionBackend.plan` runs once a step and works out, from lengths and page
numbers, what every layer will need (index tensors, masks). `StepAttention.forward` runs once a layer: it writes the
new keys and values into the pool and attends over everything the request has computed so far.

Token i of the flattened step belongs to exactly one request; the requests lie one after the other, in plan order.
A backend knows nothing of models, sampling or scheduling. `tests/contract/test_attention.py` holds every one to this.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from splitserve.core.layout import KVComponent

IntArray = npt.NDArray[np.int64]


class PagedKV(Protocol):
    """The part of a pool that one model's layers live in."""

    device: torch.device
    # By layer: [num_pages, page_size, num_kv_heads, head_dim].
    keys: dict[int, torch.Tensor]
    values: dict[int, torch.Tensor]
    # Layers with latent attention have these instead, of one head: keys whose first elements are the values.
    latents: dict[int, torch.Tensor]
    components: tuple[KVComponent, ...]


@dataclass(frozen=True, slots=True)
class PagedBatch:
    """Where the tokens of one step lie in the pool. Host memory; R requests, T tokens."""

    # Tokens computed before this step. [R]
    starts: IntArray
    # Tokens to compute, at positions [starts, starts + lengths). At least 1. [R]
    lengths: IntArray
    # Page numbers of tokens [0, starts + lengths) of each request, exactly as many as those need. R arrays. Pages of
    # tokens that no new token sees, of a model whose layers all have windows, may hold anything.
    pages: tuple[IntArray, ...]
    page_size: int
    # The same in the pool of layers with windows, where that is another; -1 for pages that no new token sees. None:
    # there is one pool.
    window_pages: tuple[IntArray, ...] | None = None

    def is_windowed(self, window: int | None) -> bool:
        """Whether layers of that window have pages of their own."""
        return window is not None and self.window_pages is not None

    def pages_for(self, window: int | None) -> tuple[IntArray, ...]:
        """`pages` as layers of that window have them."""
        return self.pages if window is None or self.window_pages is None else self.window_pages

    @property
    def offsets(self) -> IntArray:
        """Where each request's tokens begin in the flattened step, and where the last one's end. [R + 1]"""
        return np.concatenate((np.zeros(1, np.int64), np.cumsum(self.lengths)))

    @property
    def positions(self) -> IntArray:
        """Absolute position of every token of the step. [T]"""
        return np.concatenate([np.arange(s, s + n) for s, n in zip(self.starts, self.lengths, strict=True)])


@dataclass(frozen=True, slots=True)
class AttentionParams:
    """What one layer asks of its attention."""

    # Scores are q.k times this.
    scaling: float
    # A token sees itself and the `window` - 1 tokens before it; None: all tokens before it.
    window: int | None = None
    # Scores s become softcap x tanh(s / softcap); None: they stay.
    softcap: float | None = None
    # One KV head whose value is the first v_dim elements of its key, so that the key alone is stored (`engine/mla.py`).
    is_latent: bool = False


class StepAttention(Protocol):
    """The attention of one step, planned."""

    def forward(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, params: AttentionParams
    ) -> torch.Tensor:
        """Store the step's keys and values, then attend causally over each request's tokens.

        query [T, num_heads, k_dim], key [T, num_kv_heads, k_dim], value [T, num_kv_heads, v_dim], any strides;
        returns [T, num_heads, v_dim]. Query head h reads KV head h // (num_heads / num_kv_heads).
        """
        ...


class AttentionBackend(Protocol):
    """One way to compute attention over one pool."""

    def plan(self, batch: PagedBatch) -> StepAttention:
        """Work out what all layers of a step share. The result is valid for this step only."""
        ...


class FixedDecode(StepAttention, Protocol):
    """StepAttention for any number of steps, each of as many requests with one new token. Its tensors stay where they
    are, so what is recorded of one step (a CUDA graph) computes the next one when that has been filled in."""

    def fill(self, batch: PagedBatch) -> None:
        """The next step. Before the first `forward`, and between two."""
        ...


class ReplayableBackend(AttentionBackend, Protocol):
    """An AttentionBackend whose decode steps can be recorded."""

    def fixed_decode(self, num_requests: int, max_pages: int) -> FixedDecode:
        """For steps of `num_requests`, none with more than `max_pages` pages."""
        ...
