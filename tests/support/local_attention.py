"""Attention over one request without a pool, for models that are called directly."""

from __future__ import annotations

import torch

from splitserve.engine.attention.base import AttentionParams


class LocalAttention:
    """StepAttention over one request's own tokens, without a pool."""

    def forward(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, params: AttentionParams
    ) -> torch.Tensor:
        q, k, v = (x.transpose(0, 1).float() for x in (query, key, value))
        out = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=params.scaling, enable_gqa=True
        )
        return out.transpose(0, 1).to(query.dtype).contiguous()
