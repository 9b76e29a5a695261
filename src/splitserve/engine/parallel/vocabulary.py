"""The vocabulary over tensor parallel ranks: each has some rows of the embedding, and the same rows of the head."""

from __future__ import annotations

from typing import Any

import torch

from splitserve.engine.parallel.cut import even_range, even_sizes
from splitserve.engine.parallel.ranks import Ranks


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


def connect_embedding(model: Any, vocab_size: int, ranks: Ranks) -> None:
    held = even_range(vocab_size, ranks.rank.tp_rank, ranks.rank.tp_size)
    model.set_input_embeddings(VocabularyShard(model.get_input_embeddings(), held, ranks))


def connect_head(model: Any, vocab_size: int, ranks: Ranks) -> None:
    """Have rank 0 return all logits, in the order of the vocabulary; the others return those of their rows."""
    sizes = even_sizes(vocab_size, ranks.rank.tp_size)
    model.get_output_embeddings().register_forward_hook(lambda _module, _args, out: ranks.join_on_first(out, sizes))
