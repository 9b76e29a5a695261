"""The words of transformers' tensor parallel plans (`tp_plan`), each as what is cut and what the ranks exchange.

A new style is one line in STYLES; what a plan says and STYLES has not is refused. The names are those of transformers
5.17 to 5.23. A linear layer's weight is [outputs, inputs]; experts' weights have their number before that.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from splitserve.engine.parallel.cut import Cut, even_range, even_sizes
from splitserve.engine.parallel.experts import deal
from splitserve.engine.parallel.ranks import Ranks


class Held(enum.Enum):
    """What a rank holds of a module's or an expert's weight."""

    ALL = enum.auto()
    # Some outputs, and their bias.
    OUTPUTS = enum.auto()
    # Of two matrices that lie one behind the other (gate and up), the same outputs of each.
    PACKED_OUTPUTS = enum.auto()
    # Some inputs. The bias is rank 0's, so that the sum has it once.
    INPUTS = enum.auto()
    # Some experts, whole.
    EXPERTS = enum.auto()


class Before(enum.Enum):
    """What is done to a module's input."""

    NOTHING = enum.auto()
    # Each rank takes the part that its weights are for.
    SPLIT = enum.auto()
    # Each rank computes its own experts for all tokens (`experts.py`).
    DEAL = enum.auto()


class After(enum.Enum):
    """What is done to its output."""

    NOTHING = enum.auto()
    SUM = enum.auto()
    JOIN = enum.auto()


@dataclass(frozen=True, slots=True)
class Style:
    held: Held = Held.ALL
    before: Before = Before.NOTHING
    after: After = After.NOTHING


STYLES = {
    "colwise": Style(Held.OUTPUTS),
    "colwise_gather_output": Style(Held.OUTPUTS, after=After.JOIN),
    "rowwise": Style(Held.INPUTS, after=After.SUM),
    "rowwise_split_input": Style(Held.INPUTS, Before.SPLIT, After.SUM),
    "packed_colwise": Style(Held.PACKED_OUTPUTS),
    # Of a module whose weights have entries of their own.
    "moe_tp_experts": Style(after=After.SUM),
    # The same of experts of which each rank has some.
    "grouped_gemm": Style(Held.EXPERTS),
    "ep_dispatch_experts": Style(before=Before.DEAL, after=After.SUM),
    # The gradient is for training.
    "replicated_with_grad_allreduce": Style(),
    "replicate": Style(),
}


def cut_of(style: Style, parameter: torch.Tensor, rank: int, num_ranks: int) -> Cut | None:
    """What this rank holds of a weight or bias; None: all of it."""
    if style.held is Held.ALL or (style.held is Held.INPUTS and parameter.ndim == 1):
        return None
    if style.held is Held.EXPERTS:
        return Cut(-parameter.ndim, (even_range(parameter.shape[0], rank, num_ranks),))
    dim = -1 if style.held is Held.INPUTS or parameter.ndim == 1 else -2
    size = parameter.shape[dim]
    if style.held is not Held.PACKED_OUTPUTS:
        return Cut(dim, (even_range(size, rank, num_ranks),))
    half = even_range(size // 2, rank, num_ranks)
    return Cut(dim, (half, range(size // 2 + half.start, size // 2 + half.stop)))


def connect(module: torch.nn.Module, style: Style, sizes: tuple[int, int], ranks: Ranks) -> None:
    """Have a module whose weights are cut exchange what it must. `sizes`: inputs and outputs of the whole module."""
    num_inputs, num_outputs = sizes
    tp_rank, tp_size = ranks.rank.tp_rank, ranks.rank.tp_size
    if style.before is Before.SPLIT:
        module.register_forward_pre_hook(_split(even_range(num_inputs, tp_rank, tp_size)))
    elif style.before is Before.DEAL:
        deal(module, tp_rank, tp_size)
    if style.after is After.SUM:
        module.register_forward_hook(lambda _module, _args, out: ranks.sum(out))
    elif style.after is After.JOIN:
        shares = even_sizes(num_outputs, tp_size)
        module.register_forward_hook(lambda _module, _args, out: ranks.join(out, shares))


def _split(part: range) -> Callable[[torch.nn.Module, tuple[Any, ...]], tuple[Any, ...]]:
    return lambda _module, args: (args[0][..., part.start : part.stop], *args[1:])
