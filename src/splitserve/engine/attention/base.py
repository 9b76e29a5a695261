"""The contract of an attention backend (paged KV in, one output row per token out), and how models reach it.

A step's attention has two parts. `AttentionBackend.plan` runs once per step and computes, from lengths and page
numbers, what every layer needs (index tensors, masks). `StepAttention.forward` runs once per layer: it writes the new
keys and values into the pool and attends over all tokens computed so far.

Token i of the flattened step belongs to exactly one request; the requests follow each other in plan order. Models,
sampling and scheduling are not known to a backend. `tests/contract/test_attention.py` runs against every backend.

Transformers' models reach a step's attention by a function in their registry and a keyword of their forward:

1. `register_attention` registers the function as `splitserve_paged`; a model loaded with that name calls it in every
   layer. A name without a mask function of its own makes the model skip attention masks: the backend ensures causality.
2. The runner passes the planned step as the keyword `step_attention`; models pass unknown keywords down to it.
3. The function removes the batch dimension (always 1), and passes layer and parameters to the step. For a layer with
   latent attention (`engine/mla.py`) it projects the queries to the latents, and the result back to heads.

There is no state between calls. `probe.py` proves at load time that a model uses the function.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from transformers import AttentionInterface

from splitserve.core.errors import EngineError
from splitserve.core.layout import KVComponent
from splitserve.engine.mla import up_projection

IntArray = npt.NDArray[np.int64]


@dataclass(slots=True)
class PagedKV:
    """The tensors of one model's layers in a pool."""

    device: torch.device
    components: tuple[KVComponent, ...]
    # By layer: [num_pages, page_size, num_kv_heads, head_dim].
    keys: dict[int, torch.Tensor] = field(default_factory=dict)
    values: dict[int, torch.Tensor] = field(default_factory=dict)
    # For layers with latent attention, instead of keys and values: keys of one head; their first elements are the
    # values.
    latents: dict[int, torch.Tensor] = field(default_factory=dict)

    def expect(self, page: int) -> None:
        """Prepare for writes to pages up to this one and, in later steps, to those after it. Does not wait."""


@dataclass(frozen=True, slots=True)
class PagedBatch:
    """Location of a step's tokens in the pool. Host memory; R requests, T tokens."""

    # Tokens computed before this step. [R]
    starts: IntArray
    # Tokens to compute, at positions [starts, starts + lengths). At least 1. [R]
    lengths: IntArray
    # Page numbers of each request, exactly those of its tokens [0, starts + lengths). R arrays. If all layers have
    # windows, pages that no new token attends to may have any content.
    pages: tuple[IntArray, ...]
    page_size: int
    # Page numbers in a separate pool of layers with windows, arranged as `pages`. -1: no new token attends to the page.
    # None: there is one pool.
    window_pages: tuple[IntArray, ...] | None = None
    # Tokens of the step with an output that is used, in rising order. The last layer may compute only these. None: all.
    output_rows: IntArray | None = None

    def is_windowed(self, window: int | None) -> bool:
        """Return whether layers with `window` have pages of their own."""
        return window is not None and self.window_pages is not None

    def pages_for(self, window: int | None) -> tuple[IntArray, ...]:
        """Return the pages of layers with `window`."""
        return self.pages if window is None or self.window_pages is None else self.window_pages

    @property
    def offsets(self) -> IntArray:
        """Index of each request's first token in the flattened step, and the end of the last one's tokens. [R + 1]"""
        return np.concatenate((np.zeros(1, np.int64), np.cumsum(self.lengths)))

    @property
    def positions(self) -> IntArray:
        """Absolute position of every token of the step. [T]"""
        return np.concatenate([np.arange(s, s + n) for s, n in zip(self.starts, self.lengths, strict=True)])


@dataclass(frozen=True, slots=True)
class AttentionParams:
    """Attention parameters of one layer."""

    # Scores are q.k times this; positive.
    scaling: float
    # A token attends to itself and the `window` - 1 tokens before it; None: to all tokens before it.
    window: int | None = None
    # Scores s become softcap x tanh(s / softcap); None: no cap.
    softcap: float | None = None
    # One KV head; its value is the first v_dim elements of its key, so that only the key is stored (`engine/mla.py`).
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
    """An implementation of attention over one pool."""

    def plan(self, batch: PagedBatch) -> StepAttention:
        """Compute what all layers of a step share. The result is valid for this step only."""
        ...


ATTENTION_NAME = "splitserve_paged"

# Keywords of an attention call without effect on this attention. Any other keyword that is set is an unknown
# kind of attention (sinks, biases, sparse indices), and ignoring it would give wrong tokens silently.
_WITHOUT_EFFECT = frozenset(
    {
        "cache_position",
        "dropout",
        "is_causal",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "position_ids",
        "return_dict",
        "use_cache",
    }
)
_SINKS = frozenset({"s_aux", "sinks"})


def register_attention() -> None:
    """Register `ATTENTION_NAME` with transformers. Idempotent."""
    AttentionInterface.register(ATTENTION_NAME, paged_attention)


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    step_attention: StepAttention | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **rest: Any,
) -> tuple[torch.Tensor, None]:
    """Compute the attention of a layer. query, key, value: [1, heads, T, dim]; returns [1, T, num_heads, v_dim].

    Raises EngineError if the layer needs attention that is not plain causal.
    """
    _refuse_unknown(module, attention_mask, rest)
    if step_attention is None:
        kind = type(module).__name__
        raise EngineError(f"{kind} gets no paged KV, because the model's class does not pass keywords to it")
    up = up_projection(module)
    params = AttentionParams(
        scaling=scaling if scaling is not None else float(query.shape[-1] ** -0.5),
        window=sliding_window,
        softcap=softcap,
        is_latent=up is not None,
    )
    layer: int = module.layer_idx  # type: ignore[assignment]
    q, k, v = (states[0].transpose(0, 1) for states in (query, key, value))
    out = step_attention.forward(layer, q if up is None else up.absorb(q), k, v, params)
    return (out if up is None else up.expand(out)).unsqueeze(0), None


def _refuse_unknown(module: torch.nn.Module, attention_mask: torch.Tensor | None, rest: dict[str, Any]) -> None:
    unknown = sorted(name for name in rest.keys() - _WITHOUT_EFFECT if rest[name] is not None)
    if unknown:
        what = "attention sinks" if _SINKS.intersection(unknown) else "other inputs of its attention"
        raise EngineError(f"{type(module).__name__} has {what} ({', '.join(unknown)}), which are not supported")
    if attention_mask is not None:
        raise EngineError(f"{type(module).__name__} has an attention mask of its own, which is not supported")
    if rest.get("is_causal") is False or not getattr(module, "is_causal", True):
        raise EngineError(f"{type(module).__name__} attends in both directions: only causal attention is computed")
