"""Followers of one driver in its thread: they execute its orders late, in an order chosen by a seed.

`RankedEngine` is a fake engine with followers. Each computes every step from its own pool, so a follower with wrong KV
samples other tokens than the driver.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from splitserve.core.batch import StepPlan, StepResult
from splitserve.engine.parallel.copies import (
    CopyPages,
    DropCopy,
    FollowerCopies,
    GroupCopies,
    RankCopies,
    RankPool,
    RestorePages,
)
from splitserve.engine.pool import PageBytes
from splitserve.scheduler.speculation import Proposer
from support.fake_engine import FakeCopy, FakeEngine

# An order about copies, or a step to run.
LateOrder = bytes | Callable[[], object]
_DECODER = msgspec.msgpack.Decoder(CopyPages | RestorePages | DropCopy)


class _VotedCopies(RankCopies):
    """Parts of a rank that has sent its vote."""

    def __init__(self, parts: RankCopies, vote: bool) -> None:
        self._parts = parts._parts
        self._was = vote

    def copy(self, order: CopyPages) -> bool:
        return self._was


class LateFollowers:
    """Queues of orders, one per follower. A vote executes all orders before it."""

    def __init__(self, pools: Sequence[RankPool]) -> None:
        self.parts = [RankCopies(pool) for pool in pools]
        self.queues: list[deque[LateOrder]] = [deque() for _ in pools]
        # Copies that were made on all ranks, and those that some rank refused.
        self.num_made = self.num_refused = 0

    def send(self, order: bytes) -> None:
        for queue in self.queues:
            queue.append(order)

    def vote(self, agrees: bool) -> bool:
        """Execute all orders up to the last one, which is a copy. Return whether all ranks made it."""
        orders, votes = [], []
        for rank, queue in enumerate(self.queues):
            while len(queue) > 1:
                self.follow(rank)
            last = queue.popleft()
            assert isinstance(last, bytes)
            order = _DECODER.decode(last)
            assert isinstance(order, CopyPages)
            orders.append(order)
            votes.append(self.parts[rank].copy(order))
        all_agree = agrees and all(votes)
        for parts, order, vote in zip(self.parts, orders, votes, strict=True):
            FollowerCopies(_VotedCopies(parts, vote), lambda _: all_agree).run(order)
        self.num_made += all_agree
        self.num_refused += not all_agree
        assert len({len(parts) for parts in self.parts}) == 1, "some ranks have a copy and some do not"
        return all_agree

    def follow(self, rank: int) -> bool:
        """Execute the follower's next order. Return False if there is none."""
        if not self.queues[rank]:
            return False
        order = self.queues[rank].popleft()
        if isinstance(order, bytes):
            FollowerCopies(self.parts[rank], _no_vote).run(_DECODER.decode(order))
        else:
            order()
        return True

    def follow_some(self, rng: random.Random) -> None:
        """Let each follower execute a random number of its orders."""
        for rank, queue in enumerate(self.queues):
            for _ in range(rng.randrange(len(queue) + 1)):
                self.follow(rank)

    def follow_all(self) -> None:
        for rank in range(len(self.queues)):
            while self.follow(rank):
                pass


def _no_vote(_: bool) -> bool:
    raise AssertionError("a copy was ordered, and the driver does not vote")


class _FlakyPool:
    """Pool of one rank that sometimes fails to allocate host memory."""

    def __init__(self, engine: FakeEngine, rng: random.Random, failures: float) -> None:
        self._engine = engine
        self._rng = rng
        self._failures = failures

    def window_pages(self, pages: Sequence[int]) -> npt.NDArray[np.int64]:
        return self._engine.window_pages(pages)

    def copy_out(self, pages: npt.NDArray[np.int64], window_pages: npt.NDArray[np.int64]) -> FakeCopy:
        if self._rng.random() < self._failures:
            raise MemoryError("no host memory")
        return self._engine.copy_out(pages, window_pages)

    def copy_in(
        self, copy: FakeCopy, first: int, pages: npt.NDArray[np.int64], window_pages: npt.NDArray[np.int64]
    ) -> None:
        self._engine.copy_in(copy, first, pages, window_pages)


class RankedEngine(FakeEngine):
    """Fake engine of a driver with two followers. `failures`: probability that a rank finds no memory for a copy."""

    def __init__(
        self, num_pages: int, page_size: int, *, rng: random.Random, failures: float = 0.0, **more: Any
    ) -> None:
        super().__init__(num_pages, page_size, **more)
        self._rng = rng
        self._others = [FakeEngine(num_pages, page_size, **more) for _ in range(2)]
        pools = [_FlakyPool(engine, rng, failures) for engine in (self, *self._others)]
        self.followers = LateFollowers(pools[1:])
        own = self.page_bytes
        total = PageBytes(3 * own.full, 3 * own.windowed)
        self._group = GroupCopies(pools[0], self.followers.send, self.followers.vote, total)

    def start(self, page_table: npt.NDArray[np.int32], window_table: npt.NDArray[np.int32] | None) -> Proposer | None:
        for engine in self._others:
            engine.start(page_table, window_table)
        return super().start(page_table, window_table)

    @property
    def bytes_per_page(self) -> int:
        return self._group.bytes_per_page

    def bytes_of(self, pages: Sequence[int]) -> int:
        return self._group.bytes_of(pages)

    def save(self, pages: Sequence[int]) -> Any:
        return self._group.save(pages)

    def restore(self, copy: Any, first: int, pages: Sequence[int]) -> None:
        self._group.restore(copy, first, pages)

    def drop(self, copy: Any) -> None:
        self._group.drop(copy)

    def prepare(self, plan: StepPlan) -> Callable[[], StepResult]:
        compute = super().prepare(plan)
        shares = [engine.prepare(plan) for engine in self._others]

        def run() -> StepResult:
            result = compute()
            for queue, share in zip(self.followers.queues, shares, strict=True):
                queue.append(partial(_assert_same, share, result))
            self.followers.follow_some(self._rng)
            return result

        return run

    def check_nothing_is_copied(self) -> None:
        """Assert that no rank keeps a copy after all orders."""
        self.followers.follow_all()
        assert [len(parts) for parts in self.followers.parts] == [0, 0]


def _assert_same(share: Callable[[], StepResult], expected: StepResult) -> None:
    assert share() == expected, "a follower computed other tokens than the driver"
