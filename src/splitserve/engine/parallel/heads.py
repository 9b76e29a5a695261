"""Attention heads over tensor parallel ranks.

Each rank has the same number of query heads, and the KV heads that those read. With fewer KV heads than ranks, several
ranks hold the same one.
"""

from __future__ import annotations

from dataclasses import dataclass

from splitserve.engine.parallel.refusal import cannot_cut


@dataclass(frozen=True, slots=True)
class Heads:
    """Numbers of heads of one attention layer, on all ranks together."""

    num_query: int
    num_kv: int

    def fits(self, tp_size: int) -> bool:
        shares = self.num_kv % tp_size == 0 or tp_size % self.num_kv == 0
        return self.num_query % tp_size == 0 and shares

    def query(self, rank: int, tp_size: int) -> range:
        """Return the query heads of one rank."""
        share = self.num_query // tp_size
        return range(rank * share, (rank + 1) * share)

    def kv(self, rank: int, tp_size: int) -> range:
        """Return the KV heads of one rank: those that its query heads read."""
        group = self.num_query // self.num_kv
        query = self.query(rank, tp_size)
        return range(query.start // group, (query.stop - 1) // group + 1)

    def check(self, tp_size: int, name: str) -> None:
        """Raise ConfigError, with the model and the sizes that would fit, if heads cannot be divided."""
        if self.fits(tp_size):
            return
        fitting = [n for n in range(1, self.num_query + 1) if self.fits(n)]
        raise cannot_cut(
            name,
            f"its attention has {self.num_query} query heads and {self.num_kv} KV heads, and each of {tp_size} ranks "
            "needs as many of both as any other, or one KV head that several ranks hold",
            f"Tensor parallel sizes that would do: {', '.join(map(str, fitting))}",
        )
