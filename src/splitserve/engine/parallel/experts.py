"""Expert parallelism: each rank of a tensor parallel group has some of a layer's experts, whole.

All ranks have all tokens, and choose the same experts for each. A rank computes the choices that are its own experts
and nothing for the rest; the sum over the ranks is the layer's output. So there is as much communication as if every
expert were sharded. Which is faster depends on shapes: narrow experts are more efficient whole, but few tokens may all
choose experts of one rank.
"""

from __future__ import annotations

from typing import Any

import torch

from splitserve.core.errors import EngineError
from splitserve.engine.parallel.cut import even_range


def deal(module: Any, rank: int, num_ranks: int) -> None:
    """Have `module`, a layer's experts in transformers' form with sharded weights, compute this rank's experts only."""
    held = own_experts(module, rank, num_ranks)

    def keep_own(_module: Any, args: tuple[Any, ...]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        if len(args) != 3:
            raise EngineError(f"{type(module).__name__} is not called with states, experts and weights")
        return use_own(held, *args)

    module.register_forward_pre_hook(keep_own)


def own_experts(module: Any, rank: int, num_ranks: int) -> range:
    """Return the experts of this rank; `module` holds the weights of only these from now on."""
    held = even_range(module.num_experts, rank, num_ranks)
    module.num_experts = len(held)
    # Transformers' implementations ignore the expert number behind the last one: it means "an expert of another rank".
    module._is_expert_parallel = True
    return held


def use_own(
    held: range, states: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Restrict a call of a layer's experts to those `held`. states [T, hidden]; experts, weights [T, chosen]."""
    is_own = (experts >= held.start) & (experts < held.stop)
    own = torch.where(is_own, experts - held.start, len(held))
    return states, own, weights.masked_fill(~is_own, 0.0)
