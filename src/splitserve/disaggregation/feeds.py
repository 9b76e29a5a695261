"""Which ranks of a prefill worker hand over to which ranks of a decode worker: from their layouts and places alone.

`pairing.py` says what one decode rank takes from whom. Here all ranks of both sides come together, so that every rank
of decode finds the same by itself, and a prefill rank learns how many of them to wait for in each room:

- The decode driver hears from the prefill driver, which writes the metadata row, even where it takes no heads from it.
- A prefill rank whose heads nobody takes (others hold the same) is told of every room by the decode driver: it has an
  end of the room too, and must not wait for ever.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from splitserve.disaggregation.pairing import Pair, sources_of
from splitserve.disaggregation.wire import KVArgs


@dataclass(frozen=True, slots=True)
class Feed:
    """What one prefill rank does for one decode rank."""

    # The prefill rank, by its index among those of its worker.
    source: int
    # Heads that it writes; may be none.
    pairs: tuple[Pair, ...]
    # Decode ranks that this prefill rank writes to or is told of rooms by, in all.
    num_targets: int


def feeds_of(target: int, targets: Sequence[KVArgs], sources: Sequence[KVArgs]) -> list[Feed]:
    """Those of the decode rank `targets[target]`, in order of sources; both sequences are whole workers.

    Raises ValueError, with both shapes, where the layouts do not fit.
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
