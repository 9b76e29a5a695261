"""Assignment of prefill ranks to the decode ranks they send KV to, derived from layouts and ranks of both workers.

`pairing.py` derives the sources of one decode rank. This module combines all ranks of both workers. Every decode rank
thus computes the same result by itself, and a prefill rank gets the number of ranks to wait for in each room:

- The decode driver receives from the prefill driver, which writes the metadata row, even if it takes no heads from it.
- A prefill rank may send no heads because other ranks hold the same ones. The decode driver announces every room to it:
  that rank has an end of the room too and must not wait forever.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from splitserve.transfer.pairing import HeadPair, sources_of
from splitserve.transfer.wire import KVArgs


@dataclass(frozen=True, slots=True)
class Feed:
    """Share of one prefill rank in the KV of one decode rank."""

    # Index of the prefill rank in its worker.
    source: int
    # Heads that it writes. May be empty.
    pairs: tuple[HeadPair, ...]
    # Total number of decode ranks that this prefill rank writes to or that announce rooms to it.
    num_targets: int


def feeds_of(target: int, targets: Sequence[KVArgs], sources: Sequence[KVArgs]) -> list[Feed]:
    """Return the feeds of the decode rank `targets[target]`, in order of sources. Both sequences are whole workers.

    Raises ValueError, with both shapes, if the layouts do not fit.
    """
    layouts = [source.layout for source in sources]
    try:
        parts = [sources_of(t.layout, layouts, tp_rank=t.rank.tp_rank, tp_size=t.rank.tp_size) for t in targets]
    except ValueError as error:
        raise ValueError(f"prefill of {_shape(sources)} cannot feed decode of {_shape(targets)}: {error}") from error
    driver = next(part for part, t in zip(parts, targets, strict=True) if t.rank.is_driver)
    fed = {source for part in parts for source in part}
    for i, source in enumerate(sources):
        if source.rank.is_driver or i not in fed:
            driver.setdefault(i, ())
    counts = Counter(source for part in parts for source in part)
    return [Feed(source, pairs, counts[source]) for source, pairs in sorted(parts[target].items())]


def _shape(ranks: Sequence[KVArgs]) -> str:
    rank = ranks[0].rank
    return f"tensor parallel size {rank.tp_size} x pipeline parallel size {rank.pp_size}"
