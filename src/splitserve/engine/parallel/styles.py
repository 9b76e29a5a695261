"""The styles of transformers' tensor parallel plans (`tp_plan`): what each one shards and what the ranks exchange.

A new style is one line in STYLES; a plan with a style that is not in STYLES is rejected. The names are those of
transformers 5.17 to 5.23. A linear layer's weight is [outputs, inputs]; experts' weights have the number of the expert
before that.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from splitserve.engine.parallel.cut import WeightShard, even_range, even_sizes
from splitserve.engine.parallel.experts import deal
from splitserve.engine.parallel.ranks import Ranks


class HeldWeight(enum.Enum):
    """The part of a module's or an expert's weight that a rank holds."""

    ALL = enum.auto()
    # Some outputs, and their bias.
    OUTPUTS = enum.auto()
    # The same outputs of two matrices that lie one behind the other (gate and up).
    PACKED_OUTPUTS = enum.auto()
    # Some inputs. Rank 0 has the bias, so that the sum includes it once.
    INPUTS = enum.auto()
    # Some experts, whole.
    EXPERTS = enum.auto()


class Before(enum.Enum):
    """Operation on a module's input."""

    NOTHING = enum.auto()
    # Each rank takes the part that belongs to its weights.
    SPLIT = enum.auto()
    # Each rank computes its own experts for all tokens (`experts.py`).
    DEAL = enum.auto()


class OutputStep(enum.Enum):
    """Operation on a module's output."""

    NOTHING = enum.auto()
    SUM = enum.auto()
    JOIN = enum.auto()


@dataclass(frozen=True, slots=True)
class Style:
    held: HeldWeight = HeldWeight.ALL
    before: Before = Before.NOTHING
    after: OutputStep = OutputStep.NOTHING


STYLES = {
    "colwise": Style(HeldWeight.OUTPUTS),
    "colwise_gather_output": Style(HeldWeight.OUTPUTS, after=OutputStep.JOIN),
    "rowwise": Style(HeldWeight.INPUTS, after=OutputStep.SUM),
    "rowwise_split_input": Style(HeldWeight.INPUTS, Before.SPLIT, OutputStep.SUM),
    "packed_colwise": Style(HeldWeight.PACKED_OUTPUTS),
    # For a module with weights that have entries of their own in the plan.
    "moe_tp_experts": Style(after=OutputStep.SUM),
    # For experts, if each rank holds some of them whole.
    "grouped_gemm": Style(HeldWeight.EXPERTS),
    "ep_dispatch_experts": Style(before=Before.DEAL, after=OutputStep.SUM),
    # The gradient is for training.
    "replicated_with_grad_allreduce": Style(),
    "replicate": Style(),
}


def cut_of(style: Style, parameter: torch.Tensor, rank: int, num_ranks: int) -> WeightShard | None:
    """Return the part of a weight or bias that this rank holds; None: all of it."""
    if style.held is HeldWeight.ALL or (style.held is HeldWeight.INPUTS and parameter.ndim == 1):
        return None
    if style.held is HeldWeight.EXPERTS:
        return WeightShard(-parameter.ndim, (even_range(parameter.shape[0], rank, num_ranks),))
    dim = -1 if style.held is HeldWeight.INPUTS or parameter.ndim == 1 else -2
    size = parameter.shape[dim]
    if style.held is not HeldWeight.PACKED_OUTPUTS:
        return WeightShard(dim, (even_range(size, rank, num_ranks),))
    half = even_range(size // 2, rank, num_ranks)
    return WeightShard(dim, (half, range(size // 2 + half.start, size // 2 + half.stop)))


def connect(module: torch.nn.Module, style: Style, sizes: tuple[int, int], ranks: Ranks) -> None:
    """Have a module with sharded weights exchange what it must. `sizes`: inputs and outputs of the whole module."""
    num_inputs, num_outputs = sizes
    tp_rank, tp_size = ranks.rank.tp_rank, ranks.rank.tp_size
    if style.before is Before.SPLIT:
        module.register_forward_pre_hook(_split(even_range(num_inputs, tp_rank, tp_size)))
    elif style.before is Before.DEAL:
        deal(module, tp_rank, tp_size)
    if style.after is OutputStep.SUM:
        module.register_forward_hook(lambda _module, _args, out: ranks.sum(out))
    elif style.after is OutputStep.JOIN:
        shares = even_sizes(num_outputs, tp_size)
        module.register_forward_hook(lambda _module, _args, out: ranks.join(out, shares))


def _split(part: range) -> Callable[[torch.nn.Module, tuple[Any, ...]], tuple[Any, ...]]:
    return lambda _module, args: (args[0][..., part.start : part.stop], *args[1:])
