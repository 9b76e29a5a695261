"""The bridge from transformers' models to this attention: a function in their registry, a keyword of their forward.

1. `register()` registers the function as `splitserve_paged`; a model loaded with that name calls it in every layer. A
   name without a mask function of its own makes the model skip attention masks: the backend ensures causality.
2. The runner passes the planned step as the keyword `step_attention`; models pass unknown keywords down to it.
3. The function removes the batch dimension (always 1), and passes layer and parameters to the step. For a layer with
   latent attention (`engine/mla.py`) it projects the queries to the latents, and the result back to heads.

There is no state between calls. `probe.py` proves at load time that a model uses the function.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface

from splitserve.core.errors import EngineError
from splitserve.engine.attention.base import AttentionParams, StepAttention
from splitserve.engine.mla import up_projection

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


def register() -> None:
    """Register `ATTENTION_NAME` with transformers. Idempotent."""
    AttentionInterface.register(ATTENTION_NAME, paged_attention)


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    step_attention: StepAttention,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **rest: Any,
) -> tuple[torch.Tensor, None]:
    """Compute the attention of a layer. query, key, value: [1, heads, T, dim]; returns [1, T, num_heads, v_dim].

    Raises EngineError if the layer needs attention that is not plain causal.
    """
    _refuse_unknown(module, attention_mask, rest)
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
        raise EngineError(
            f"{type(module).__name__} asks for attention with {', '.join(unknown)}, which is not computed"
        )
    if attention_mask is not None:
        raise EngineError(f"{type(module).__name__} brings an attention mask of its own, which is not computed")
    if rest.get("is_causal") is False or not getattr(module, "is_causal", True):
        raise EngineError(f"{type(module).__name__} attends in both directions: only causal attention is computed")
