"""Prefix caches of one worker, as far as this router knows them. Pure.

1. The worker's KV events update one index for each data parallel rank (`cache_follower.py`).
2. The events report a prompt's blocks only after these are computed. Until then, blocks of prompts sent to the worker
   are expected there for a limited time. Once a block was seen in the index, only the index counts for it.

A block is identified by its hash, which covers all tokens up to its end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from splitserve.core.clock import Clock, SystemClock
from splitserve.observe.events.schema import BlockIndex

# Seconds for which a block is expected: the time a prompt waits and is computed. It is short because a request may
# fail, and a block may be evicted before it is seen.
EXPECTED_SECONDS = 30.0
# Maximum number of expected blocks per rank: 1.6 million tokens in pages of 16.
MAX_EXPECTED = 100_000


class CachedPrefixes:
    """Prefix caches of one worker. `indexes`: by data parallel rank; the follower of the events updates them.

    `block_size`: tokens. `is_certain`: whether the worker can use all blocks that it reports.
    """

    def __init__(
        self, block_size: int, indexes: Sequence[BlockIndex], clock: Clock | None = None, *, is_certain: bool = True
    ) -> None:
        self.block_size = block_size
        self._is_certain = is_certain
        self._indexes = tuple(indexes)
        # By rank: hash -> clock time until which the block is expected, earliest first.
        self._expected: tuple[dict[int, float], ...] = tuple({} for _ in indexes)
        self._clock = clock or SystemClock()

    @property
    def num_blocks(self) -> int:
        """Return the number of blocks that the worker reported."""
        return sum(len(index) for index in self._indexes)

    @property
    def ranks(self) -> range:
        return range(len(self._indexes))

    def match(self, hashes: Sequence[int], rank: int) -> int:
        """Return the number of leading prompt tokens that this rank has cached or is expected to have soon."""
        index, expected, now = self._indexes[rank], self._expected[rank], self._clock.now()
        count = 0
        for name in hashes:
            if name in index:
                expected.pop(name, None)
            elif expected.get(name, 0.0) <= now:
                break
            count += 1
        return self.block_size * count

    def longest_match(self, hashes: Sequence[int]) -> int:
        """Return the longest match over all ranks, tokens."""
        return max((self.match(hashes, rank) for rank in self.ranks), default=0)

    def reported_match(self, hashes: Sequence[int]) -> int:
        """Return the leading prompt tokens that the worker reported as cached, for the rank with the fewest.

        A request that is not sent to a fixed rank may reach any of them. 0 if the worker may be unable to use a block.
        """
        if not self._is_certain:
            return 0
        counts = (sum(1 for _ in takewhile(index.__contains__, hashes)) for index in self._indexes)
        return self.block_size * min(counts, default=0)

    def expect(self, hashes: Sequence[int], rank: int) -> None:
        """Expect the blocks of a prompt that was sent to this rank."""
        index, expected, now = self._indexes[rank], self._expected[rank], self._clock.now()
        for name in hashes:
            expected.pop(name, None)
            if name not in index:
                expected[name] = now + EXPECTED_SECONDS
        # Forget expired blocks, and the oldest ones beyond the limit.
        surplus = len(expected) - MAX_EXPECTED
        old: list[int] = []
        for name, until in expected.items():
            if until > now and len(old) >= surplus:
                break
            old.append(name)
        for name in old:
            del expected[name]


@dataclass(frozen=True, slots=True)
class PromptBlocks:
    """One prompt of a request."""

    num_tokens: int
    # Hashes of its whole blocks, by block size in tokens. Empty: no worker's blocks are known.
    hashes: Mapping[int, Sequence[int]] = field(default_factory=dict)
