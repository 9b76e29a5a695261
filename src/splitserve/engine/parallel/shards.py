"""Tensor parallel shards: the part of a tensor that one rank holds, and what the ranks exchange because of it.

The styles are those of transformers' tensor parallel plans (`tp_plan`, transformers 5.17 to 5.23). A new style is one
line in STYLES; a plan with a style that is not in STYLES is rejected. A linear layer's weight is [outputs, inputs];
experts' weights have the number of the expert before that. Of the vocabulary, each rank has some rows of the embedding,
and the same rows of the head.

With expert parallelism each rank has some of a layer's experts, whole. All ranks have all tokens, and choose the same
experts for each. A rank computes the choices that are its own experts and nothing for the rest; the sum over the ranks
is the layer's output. So there is as much communication as if every expert were sharded. Which is faster depends on
shapes: narrow experts are more efficient whole, but few tokens may all choose experts of one rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from splitserve.core.errors import EngineError
from splitserve.engine.parallel.ranks import Ranks


@dataclass(frozen=True, slots=True)
class WeightShard:
    """Shard of a tensor: the ranges `parts`, in order, of dimension `dim` (negative: from the end)."""

    dim: int
    parts: tuple[range, ...]

    def of(self, whole: Any, num_dims: int) -> torch.Tensor:
        """Return that part of a tensor, or of one in a file, with `num_dims` dimensions."""
        ahead = (slice(None),) * (num_dims + self.dim)
        pieces = [whole[(*ahead, slice(part.start, part.stop))] for part in self.parts]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=self.dim)

    def shape(self, whole: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of the part of a tensor with shape `whole`."""
        sizes = list(whole)
        sizes[self.dim] = sum(len(part) for part in self.parts)
        return tuple(sizes)

    def of_source(self, number: int, size: int) -> WeightShard:
        """Return the shard of one of several tensors of this `size` that are joined in `dim`."""
        source = range(number * size, (number + 1) * size)
        found = [range(max(p.start, source.start), min(p.stop, source.stop)) for p in self.parts]
        return WeightShard(self.dim, tuple(range(p.start - source.start, p.stop - source.start) for p in found if p))


def even_range(size: int, rank: int, num_ranks: int) -> range:
    """Return the rank's share of `size`, as even as possible."""
    return range(size * rank // num_ranks, size * (rank + 1) // num_ranks)


def even_sizes(size: int, num_ranks: int) -> list[int]:
    """Return the sizes of all ranks' shares."""
    return [len(even_range(size, rank, num_ranks)) for rank in range(num_ranks)]


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


class VocabularyShard(torch.nn.Module):
    """Replacement of a model's embedding, with only the rows `held` of its weight.

    The sum over ranks is the whole output.
    """

    def __init__(self, embedding: Any, held: range, ranks: Ranks) -> None:
        super().__init__()
        self.embedding = embedding
        # The padding index matters for training only, and is a number of the whole vocabulary.
        embedding.padding_idx = None
        embedding.num_embeddings = len(held)
        self._held = held
        self._ranks = ranks

    @property
    def weight(self) -> torch.Tensor:
        weight: torch.Tensor = self.embedding.weight
        return weight

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Return the embeddings of token ids [...], as [..., hidden_size]."""
        rows = token_ids - self._held.start
        elsewhere = (rows < 0) | (rows >= len(self._held))
        found = self.embedding(rows.masked_fill(elsewhere, 0))
        return self._ranks.sum(found.masked_fill(elsewhere.unsqueeze(-1), 0))


@dataclass(frozen=True, slots=True)
class Style:
    """What a rank holds of a module's or an expert's weight, and what happens to the module's input and output.

    `held`: all, some outputs and their bias, the same outputs of two matrices that lie one behind the other (gate and
    up), some inputs (rank 0 has the bias, so that the sum includes it once), or some experts, whole.
    """

    held: Literal["all", "outputs", "packed outputs", "inputs", "experts"] = "all"
    # Split: each rank takes the part of the input that belongs to its weights. Deal: each rank computes its own experts
    # for all tokens.
    before: Literal["", "split", "deal"] = ""
    after: Literal["", "sum", "join"] = ""


STYLES = {
    "colwise": Style("outputs"),
    "colwise_gather_output": Style("outputs", after="join"),
    "rowwise": Style("inputs", after="sum"),
    "rowwise_split_input": Style("inputs", "split", "sum"),
    "packed_colwise": Style("packed outputs"),
    # For a module with weights that have entries of their own in the plan.
    "moe_tp_experts": Style(after="sum"),
    # For experts, if each rank holds some of them whole.
    "grouped_gemm": Style("experts"),
    "ep_dispatch_experts": Style(before="deal", after="sum"),
    # The gradient is for training.
    "replicated_with_grad_allreduce": Style(),
    "replicate": Style(),
}


def cut_of(style: Style, parameter: torch.Tensor, rank: int, num_ranks: int) -> WeightShard | None:
    """Return the part of a weight or bias that this rank holds; None: all of it."""
    if style.held == "all" or (style.held == "inputs" and parameter.ndim == 1):
        return None
    if style.held == "experts":
        return WeightShard(-parameter.ndim, (even_range(parameter.shape[0], rank, num_ranks),))
    dim = -1 if style.held == "inputs" or parameter.ndim == 1 else -2
    size = parameter.shape[dim]
    if style.held != "packed outputs":
        return WeightShard(dim, (even_range(size, rank, num_ranks),))
    half = even_range(size // 2, rank, num_ranks)
    return WeightShard(dim, (half, range(size // 2 + half.start, size // 2 + half.stop)))


def connect(module: torch.nn.Module, style: Style, sizes: tuple[int, int], ranks: Ranks) -> None:
    """Have a module with sharded weights exchange what it must. `sizes`: inputs and outputs of the whole module."""
    num_inputs, num_outputs = sizes
    tp_rank, tp_size = ranks.rank.tp_rank, ranks.rank.tp_size
    if style.before == "split":
        part = even_range(num_inputs, tp_rank, tp_size)
        module.register_forward_pre_hook(lambda _module, args: (args[0][..., part.start : part.stop], *args[1:]))
    elif style.before == "deal":
        deal(module, tp_rank, tp_size)
    if style.after == "sum":
        module.register_forward_hook(lambda _module, _args, out: ranks.sum(out))
    elif style.after == "join":
        shares = even_sizes(num_outputs, tp_size)
        module.register_forward_hook(lambda _module, _args, out: ranks.join(out, shares))
