"""Expert parallelism: each rank of a tensor parallel group has some of a layer's experts, whole.

All ranks have all tokens, and choose the same experts for each. A rank computes what falls to its own and nothing for
the rest, and the sum over the ranks is the layer's output, so there is as much talk as where every expert is cut. What
is better is a question of shapes: narrow experts lose less whole, and a few tokens may all go to one rank's.
"""

from __future__ import annotations

from typing import Any

import torch

from splitserve.engine.parallel.cut import even_range
from splitserve.errors import EngineError


def deal(module: Any, rank: int, num_ranks: int) -> None:
    """Have `module`, a layer's experts in transformers' form whose weights are cut, compute this rank's alone."""
    held = own_experts(module, rank, num_ranks)

    def keep_own(_module: Any, args: tuple[Any, ...]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        if len(args) != 3:
            raise EngineError(f"{type(module).__name__} is not called with states, experts and weights")
        return use_own(held, *args)

    module.register_forward_pre_hook(keep_own)


def own_experts(module: Any, rank: int, num_ranks: int) -> range:
    """The experts of this rank, whose weights are all that `module` has from now on."""
    held = even_range(module.num_experts, rank, num_ranks)
    module.num_experts = len(held)
    # To transformers' implementations the number behind the last expert's now means: nobody's here.
    module._is_expert_parallel = True
    return held


def use_own(
    held: range, states: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A call of a layer's experts, states [T, hidden], experts and weights [T, chosen], for a rank with `held`."""
    is_own = (experts >= held.start) & (experts < held.stop)
    own = torch.where(is_own, experts - held.start, len(held))
    return states, own, weights.masked_fill(~is_own, 0.0)
