"""Multi-head latent attention (DeepSeek-V2, 2024): a token stores one short row, the source of all keys and values.

The row is the latent (kv_lora_rank elements) and, behind it, a key part with positions that all heads share. A head's
key is W_UK latent beside that part, its value W_UV latent. Transformers' classes compute both for every token that is
attended to (`expand_kv`). Here neither is computed:

1. `use_latents` replaces `kv_b_proj` by an UpProjection, and `expand_kv` by a function that returns the rows as they
   are: the keys of one head, with the values as their first elements. Queries, positions and norms stay transformers'.
2. The attention function (`attention/base.py`) projects each query to the rows: q (W_UK c) = (W_UK' q) c (`absorb`).
3. Attention over the rows gives each head a weighted latent, and `expand` makes that the head's output by W_UV.

A rank of a tensor parallel group has some of the heads' W_UK and W_UV and the whole row, so the number of heads comes
from the weights, not from the config.
"""

from __future__ import annotations

from typing import Any

import torch

from splitserve.core.errors import UnsupportedModelError

_CHECKED_TOKENS = 3
# Largest difference from the model's own computation, relative to its largest number: roundings to the dtype.
_TOLERANCES = {torch.float32: 1e-4, torch.float16: 0.01, torch.bfloat16: 0.05}


class UpProjection(torch.nn.Module):
    """`kv_b_proj`, sharded by heads: from a latent to each head's key (without positions) and value."""

    def __init__(self, weight: torch.Tensor, key_size: int, value_size: int) -> None:
        """`weight`: [num_heads x (key_size + value_size), rank]; its memory is shared with its other owners."""
        super().__init__()
        self.key_size = key_size
        self.value_size = value_size
        self.weight = torch.nn.Parameter(weight.detach(), requires_grad=False)

    @property
    def rank(self) -> int:
        return self.weight.shape[1]

    @property
    def by_head(self) -> torch.Tensor:
        """The weight as [num_heads, key_size + value_size, rank]."""
        return self.weight.view(-1, self.key_size + self.value_size, self.rank)

    def absorb(self, query: torch.Tensor) -> torch.Tensor:
        """Project queries to the rows: [T, num_heads, key_size + rope] becomes [T, num_heads, rank + rope]."""
        plain, rope = query[..., : self.key_size], query[..., self.key_size :]
        return torch.cat((self.to_latents(plain), rope), dim=-1)

    def to_latents(self, query: torch.Tensor) -> torch.Tensor:
        """Project queries without positions: [T, num_heads, key_size] becomes [T, num_heads, rank]."""
        return torch.bmm(query.transpose(0, 1), self.by_head[:, : self.key_size]).transpose(0, 1)

    def expand(self, mixed: torch.Tensor) -> torch.Tensor:
        """Return the heads' outputs of weighted latents: [T, num_heads, rank] becomes [T, num_heads, value_size]."""
        up = self.by_head[:, self.key_size :].transpose(1, 2)
        return torch.bmm(mixed.transpose(0, 1), up).transpose(0, 1)


def up_projection(module: torch.nn.Module) -> UpProjection | None:
    """Return the UpProjection of an attention module with latents; None if it has none."""
    found = module._modules.get("kv_b_proj")
    return found if isinstance(found, UpProjection) else None


def use_latents(model: torch.nn.Module, name: str) -> int:
    """Have every layer with latent attention store latents; return the number of such layers.

    Raises ModelLoadError, naming model `name`, if a layer's own `expand_kv` has another result than this module
    expects.
    """
    count = 0
    for path, module in model.named_modules():
        if has_latents(module):
            with torch.inference_mode():
                _replace(module, f"{name}: {path}")
            count += 1
    return count


def has_latents(module: Any) -> bool:
    """Return whether it is an attention module that computes keys and values from latents."""
    return hasattr(type(module), "expand_kv") and isinstance(getattr(module, "kv_b_proj", None), torch.nn.Module)


def _replace(module: Any, place: str) -> None:
    linear = module.kv_b_proj
    if getattr(linear, "bias", None) is not None:
        raise UnsupportedModelError(f"Model {place} has latents with a bias: not supported. Choose another model.")
    up = UpProjection(linear.weight, module.qk_nope_head_dim, module.v_head_dim)
    # A model on the meta device was compared when its weights were stored.
    if not up.weight.is_meta:
        _check(module, up, place)
    module.kv_b_proj = up
    # Set on this object, where it hides the method of the class.
    module.expand_kv = _hand_on


def _hand_on(latent: torch.Tensor, rope: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rows and their latents, in place of `expand_kv`. latent [1, 1, T, rank], rope [1, 1, T, rope_size]."""
    rows = torch.cat((latent, rope), dim=-1)
    return rows, rows[..., : latent.shape[-1]]


def _check(module: Any, up: UpProjection, place: str) -> None:
    """Compare scores and values with the model's own computation, with its weights. Raises ModelLoadError."""
    rope_size, num_heads = module.qk_rope_head_dim, len(up.by_head)
    latent, rope = _random(up, 1, 1, _CHECKED_TOKENS, up.rank), _random(up, 1, 1, _CHECKED_TOKENS, rope_size)
    query = _random(up, 1, num_heads, up.key_size + rope_size)
    keys, values = module.expand_kv(latent, rope)
    rows, latents = (states[0, 0] for states in _hand_on(latent, rope))
    pairs = (
        (torch.einsum("hd,hnd->hn", query[0], keys[0]), torch.einsum("hd,nd->hn", up.absorb(query)[0], rows)),
        (values[0].transpose(0, 1), up.expand(latents[:, None].expand(-1, num_heads, -1))),
    )
    for own, ours in pairs:
        difference, largest = float((own - ours).abs().max()), float(own.abs().max())
        if own.shape != ours.shape or not difference <= _TOLERANCES[own.dtype] * largest:
            raise UnsupportedModelError(
                f"Model {place} makes keys and values of its latents in a way that is not known here (off by "
                f"{difference:g} where the largest number is {largest:g}). Choose another model."
            )


def _random(like: UpProjection, *shape: int) -> torch.Tensor:
    """Return random numbers, the same each time."""
    numbers = torch.randn(*shape, generator=torch.Generator().manual_seed(0))
    return numbers.to(dtype=like.weight.dtype, device=like.weight.device)
