"""What one worker has in its prefix caches, as far as this router knows. Pure.

1. Its KV events keep an index for each data parallel rank (`cache_follower.py`).
2. They tell of a prompt's blocks only when these are computed. Until then what was given to the worker is expected
   there, for a bounded time. Of a block that was seen in the index, that alone speaks from then on.

A block is named by its hash, which stands for all tokens up to its end.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import takewhile

from splitserve.clock import Clock, SystemClock
from splitserve.events.index import BlockIndex

# How long a block is expected, in seconds: a prompt's time in line and in computation, and not much more, for a request
# may as well fail, and a block be evicted before anybody looked.
EXPECTED_SECONDS = 30.0
# Blocks expected at most, of each rank: 1.6 million tokens in pages of 16.
MAX_EXPECTED = 100_000


class CachedPrefixes:
    """`indexes`: by data parallel rank; whoever follows the events changes them. `block_size`: tokens."""

    def __init__(self, block_size: int, indexes: Sequence[BlockIndex], clock: Clock | None = None) -> None:
        self.block_size = block_size
        self._indexes = tuple(indexes)
        # By rank: hash -> clock time until which it is expected, the earliest first.
        self._expected: tuple[dict[int, float], ...] = tuple({} for _ in indexes)
        self._clock = clock or SystemClock()

    @property
    def num_blocks(self) -> int:
        """Blocks that the worker told of."""
        return sum(len(index) for index in self._indexes)

    @property
    def ranks(self) -> range:
        return range(len(self._indexes))

    def match(self, hashes: Sequence[int], rank: int) -> int:
        """How many of a prompt's first tokens this rank has, or will have in a moment."""
        return self.block_size * sum(1 for _ in self._held(hashes, rank))

    def longest_match(self, hashes: Sequence[int]) -> int:
        """Of all ranks."""
        return max((self.match(hashes, rank) for rank in self.ranks), default=0)

    def told_match(self, hashes: Sequence[int]) -> int:
        """How many of a prompt's first tokens it told of; of its ranks that of the one with fewest, for nobody knows
        to which a request will come that is not sent to one."""
        counts = []
        for index in self._indexes:
            counts.append(sum(1 for _ in takewhile(index.__contains__, hashes)))
        return self.block_size * min(counts, default=0)

    def expect(self, hashes: Sequence[int], rank: int) -> None:
        """A prompt with these blocks is on its way to this rank."""
        index, expected = self._indexes[rank], self._expected[rank]
        until = self._clock.now() + EXPECTED_SECONDS
        for name in hashes:
            expected.pop(name, None)
            if name not in index:
                expected[name] = until
        self._forget(expected)

    def _held(self, hashes: Sequence[int], rank: int) -> Iterator[int]:
        index, expected, now = self._indexes[rank], self._expected[rank], self._clock.now()
        for name in hashes:
            if name in index:
                expected.pop(name, None)
            elif expected.get(name, 0.0) <= now:
                return
            yield name

    def _forget(self, expected: dict[int, float]) -> None:
        now = self._clock.now()
        surplus = len(expected) - MAX_EXPECTED
        old: list[int] = []
        for name, until in expected.items():
            if until > now and len(old) >= surplus:
                break
            old.append(name)
        for name in old:
            del expected[name]
