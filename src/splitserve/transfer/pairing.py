"""Assignment of prefill ranks, heads and layers to the decode rank they are sent to. Derived from layouts alone.

1. `check_compatible` compares two pools that are to exchange KV.
2. `sources_of` assigns every head of every component of the target to exactly one source, or raises ValueError.
3. The resulting pairs are plain data. A source passes them to `plan` (`reshard.py`) for each chunk of a room.

Runs once per pairing. Independent of pages, tokens and addresses.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from splitserve.core.layout import KVComponent, KVLayout
from splitserve.transfer.convert import is_convertible


@dataclass(frozen=True, slots=True)
class HeadPair:
    """Heads that one component of a source sends to one component of a target."""

    # Index of the component in the source's layout, and in the target's.
    src: int
    dst: int
    # Global numbers [first_head, first_head + num_heads).
    first_head: int
    num_heads: int

    def is_in(self, src: KVLayout, dst: KVLayout) -> bool:
        """Return whether both layouts have these components, of the same layer and with all of these heads."""
        if not (0 <= self.src < len(src.components) and 0 <= self.dst < len(dst.components) and self.num_heads > 0):
            return False
        a, b = src.components[self.src], dst.components[self.dst]
        stop = self.first_head + self.num_heads
        return (a.name, a.layer) == (b.name, b.layer) and all(
            c.heads.start <= self.first_head and stop <= c.heads.stop for c in (a, b)
        )


def check_compatible(src: KVLayout, dst: KVLayout) -> str | None:
    """Return why layers in both layouts cannot be copied, with the values of `src` and `dst`. None: they can."""
    sources = {(c.name, c.layer): c for c in src.components}
    for b in dst.components:
        a = sources.get((b.name, b.layer), b)
        for what, ours, theirs in (
            ("KV heads in all", a.total_heads, b.total_heads),
            ("head size", a.head_dim, b.head_dim),
            ("sliding window", a.window, b.window),
        ):
            if ours != theirs:
                return f"{what} of layer {b.layer} ({b.name}) {ours} against {theirs}"
        if not is_convertible(a.dtype, b.dtype):
            return f"dtype of layer {b.layer} ({b.name}) {a.dtype} against {b.dtype}, which it cannot be converted to"
    return None


def sources_of(
    dst: KVLayout, sources: Sequence[KVLayout], *, tp_rank: int = 0, tp_size: int = 1
) -> dict[int, tuple[HeadPair, ...]]:
    """Return the heads that each of `sources` sends to a target rank, by index of the source.

    Heads that several sources hold (more ranks than KV heads, MLA) are divided evenly among the targets that need
    them; this target is `tp_rank` of `tp_size`. If there are more sources than targets, they are divided by layer.
    Raises ValueError if layouts differ or no source holds part of the target.
    """
    for i, source in enumerate(sources):
        if difference := check_compatible(source, dst):
            raise ValueError(f"layout of source {i}: {difference}")
    holders: dict[tuple[str, int, int], list[tuple[int, int]]] = defaultdict(list)
    for i, source in enumerate(sources):
        for j, c in enumerate(source.components):
            for head in c.heads:
                holders[c.name, c.layer, head].append((i, j))
    feeds: dict[int, list[HeadPair]] = defaultdict(list)
    for j, component in enumerate(dst.components):
        for i, pair in _shares(component, j, holders, tp_rank, tp_size):
            feeds[i].append(pair)
    return {i: tuple(feeds[i]) for i in sorted(feeds)}


def _shares(
    target: KVComponent,
    index: int,
    holders: dict[tuple[str, int, int], list[tuple[int, int]]],
    tp_rank: int,
    tp_size: int,
) -> list[tuple[int, HeadPair]]:
    """Return the sources of one target component, in order of heads."""
    # Number of target ranks that hold these heads, and the position of this rank among them.
    replicas = max(1, tp_size * target.num_heads // target.total_heads)
    replica = tp_rank % replicas
    shares: list[tuple[int, HeadPair]] = []
    for head in target.heads:
        found = holders.get((target.name, target.layer, head))
        if not found:
            held = sorted(h for name, layer, h in holders if (name, layer) == (target.name, target.layer))
            raise ValueError(
                f"head {head} of layer {target.layer} ({target.name}) is held by no source: they hold {held or 'none'}"
            )
        first, stop = (len(found) * r // replicas for r in (replica, replica + 1))
        mine = found[first : max(stop, first + 1)]
        source, component = mine[target.layer % len(mine)]
        last = shares[-1] if shares else None
        if last and (last[0], last[1].src) == (source, component):
            shares[-1] = (source, HeadPair(component, index, last[1].first_head, last[1].num_heads + 1))
        else:
            shares.append((source, HeadPair(component, index, head, 1)))
    return shares


def overlap(src: KVLayout, dst: KVLayout) -> tuple[HeadPair, ...]:
    """Return all heads of `dst` that `src` holds. Raises ValueError if the layouts differ."""
    if difference := check_compatible(src, dst):
        raise ValueError(f"layouts differ: {difference}")
    sources = {(c.name, c.layer): (i, c) for i, c in enumerate(src.components)}
    pairs = []
    for j, b in enumerate(dst.components):
        if found := sources.get((b.name, b.layer)):
            i, a = found
            first, stop = max(a.heads.start, b.heads.start), min(a.heads.stop, b.heads.stop)
            if first < stop:
                pairs.append(HeadPair(i, j, first, stop - first))
    return tuple(pairs)
