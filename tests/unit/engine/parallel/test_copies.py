"""Copies of pages on a driver and its followers: every rank has its part or none has, whatever each rank does."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from splitserve.core.errors import EngineError, RanksLostError
from splitserve.engine.parallel.copies import FollowerCopies, GroupCopies, RankCopies, RestorePages
from splitserve.engine.pool import KVPool, PageBytes, PagesCopy, layout_for
from splitserve.engine.probe import LayerShape
from support.late_followers import LateFollowers

CPU = torch.device("cpu")
NUM_PAGES, PAGE_SIZE = 12, 2
# Shards of three sizes: one with both kinds of layers, one stage without windows, one with windows alone.
SHAPES = (
    [LayerShape(0, 2, 4, 4, None), LayerShape(1, 1, 4, 4, 6)],
    [LayerShape(2, 1, 4, 4, None)],
    [LayerShape(3, 1, 4, 4, 6)],
)


class FailingPool(KVPool):
    """Pool of one rank, which fails to copy on demand."""

    failure: Exception | None = None

    def copy_out(self, pages, window_pages) -> PagesCopy:
        if self.failure is not None:
            raise self.failure
        return super().copy_out(pages, window_pages)

    def tensors(self) -> list[torch.Tensor]:
        return [*self.keys.values(), *self.values.values()]


class GroupWorld:
    """A driver and two followers in one thread. Followers execute their orders late, at the latest in a vote."""

    def __init__(self, seed: int, num_window_pages: int = 0) -> None:
        self.rng = random.Random(seed)
        layouts = [layout_for(s, "float32", page_size=PAGE_SIZE, num_pages=NUM_PAGES) for s in SHAPES]
        self.pools = [FailingPool(replace(layout, num_window_pages=num_window_pages), CPU) for layout in layouts]
        if num_window_pages:
            self.pools[0].window_table = np.full(NUM_PAGES, -1, np.int32)
        torch.manual_seed(seed)
        for pool in self.pools:
            for tensor in pool.tensors():
                tensor.copy_(torch.randn(tensor.shape))
        self.followers = LateFollowers(self.pools[1:])
        page_bytes = [pool.page_bytes for pool in self.pools]
        self.group = GroupCopies(
            self.pools[0],
            self.followers.send,
            self.followers.vote,
            PageBytes(sum(b.full for b in page_bytes), sum(b.windowed for b in page_bytes)),
        )

    def num_parts(self) -> list[int]:
        """Return the number of copies that each follower has a part of."""
        return [len(parts) for parts in self.followers.parts]

    def contents(self, page: int) -> list[torch.Tensor]:
        """Return what each rank's full layers hold in this page."""
        return [t[page].clone() for pool in self.pools for t in pool.tensors() if len(t) == NUM_PAGES]


def make_window_pages(world: GroupWorld, *pages: int) -> None:
    """Let these pages have window pages, numbered in this order."""
    table = world.pools[0].window_table
    assert table is not None
    table[:] = -1
    table[list(pages)] = range(len(pages))


def test_each_rank_copies_its_own_part_and_writes_it_back_to_other_pages():
    world = GroupWorld(1)
    before = {page: world.contents(page) for page in range(NUM_PAGES)}
    copy = world.group.save([4, 1, 7])
    assert world.num_parts() == [1, 1]
    world.group.restore(copy, 1, [0, 9])
    world.group.drop(copy)
    # A follower is behind, and the driver does not wait for it.
    assert all(world.followers.queues)
    world.followers.follow_all()
    for page, source in ((0, 1), (9, 7)):
        for now, then in zip(world.contents(page), before[source], strict=True):
            assert torch.equal(now, then)
    assert world.num_parts() == [0, 0]


def test_a_copy_counts_the_bytes_of_all_ranks_with_their_window_pages():
    world = GroupWorld(1)
    assert world.group.bytes_per_page == sum(pool.bytes_per_page for pool in world.pools)
    assert world.group.bytes_of([3, 5]) == 2 * world.group.bytes_per_page
    world = GroupWorld(1, num_window_pages=3)
    make_window_pages(world, 5)
    windowed = sum(pool.layout.bytes_per_window_page for pool in world.pools)
    assert world.group.bytes_of([3, 5]) == 2 * world.group.bytes_per_page - windowed


def test_window_pages_of_followers_are_those_of_the_drivers_table():
    world = GroupWorld(1, num_window_pages=3)
    make_window_pages(world, 6, 2)
    saved = [t[:2].clone() for pool in world.pools for t in pool.tensors() if len(t) == 3]
    copy = world.group.save([2, 6])
    make_window_pages(world, 8, 9)
    # Page 2 was window page 1, and becomes page 8 with window page 0.
    world.group.restore(copy, 0, [8, 9])
    world.followers.follow_all()
    now = [t[:2] for pool in world.pools for t in pool.tensors() if len(t) == 3]
    for tensor, old in zip(now, saved, strict=True):
        assert torch.equal(tensor, old[[1, 0]])


@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize("failure", [MemoryError("full"), RuntimeError("a bug")])
def test_if_one_rank_cannot_copy_no_rank_keeps_its_part(rank: int, failure: Exception):
    world = GroupWorld(1)
    kept = world.group.save([0])
    world.pools[rank].failure = failure
    with pytest.raises(MemoryError, match="a rank of this worker could not copy its part"):
        world.group.save([1, 2])
    assert world.num_parts() == [1, 1]
    world.pools[rank].failure = None
    # Later copies have numbers of their own.
    assert world.group.save([3]) != kept
    world.group.drop(kept)
    world.followers.follow_all()
    assert world.num_parts() == [1, 1]


@pytest.mark.parametrize("seed", range(60))
def test_in_any_order_of_events_all_ranks_have_the_same_copies(seed: int):
    world = GroupWorld(seed)
    held: dict[int, list[list[torch.Tensor]]] = {}
    for _ in range(80):
        match world.rng.choice(["save", "save", "restore", "drop", "compute", "follow", "follow", "follow"]):
            case "save":
                failing = world.rng.choice([None, None, None, *world.pools])
                if failing is not None:
                    failing.failure = MemoryError("full")
                pages = world.rng.sample(range(NUM_PAGES), world.rng.randrange(1, 5))
                try:
                    copy = world.group.save(pages)
                except MemoryError:
                    assert failing is not None
                else:
                    assert failing is None
                    # All ranks have executed everything up to the copy.
                    held[copy] = [world.contents(page) for page in pages]
                if failing is not None:
                    failing.failure = None
                assert world.num_parts() == [len(held), len(held)]
            case "restore" if held:
                copy = world.rng.choice(list(held))
                first = world.rng.randrange(len(held[copy]))
                pages = world.rng.sample(range(NUM_PAGES), len(held[copy]) - first)
                world.group.restore(copy, first, pages)
                world.followers.follow_all()
                for page, saved in zip(pages, held[copy][first:], strict=True):
                    assert all(map(torch.equal, world.contents(page), saved))
            case "drop" if held:
                copy = world.rng.choice(list(held))
                del held[copy]
                world.group.drop(copy)
            case "compute":
                world.followers.follow_all()
                page = world.rng.randrange(NUM_PAGES)
                for pool in world.pools:
                    for tensor in pool.tensors():
                        tensor[page] += 1.0
            case "follow":
                world.followers.follow(world.rng.randrange(2))
    for copy in list(held):
        world.group.drop(copy)
    world.followers.follow_all()
    assert world.num_parts() == [0, 0]


def never(_: bool) -> bool:
    raise AssertionError("there is nothing to vote about")


def test_a_copy_that_a_rank_lacks_ends_it():
    copies = FollowerCopies(RankCopies(GroupWorld(1).pools[1]), never)
    with pytest.raises(EngineError, match="restore copy 3 of KV, which it does not have"):
        copies.run(RestorePages(3, 0, np.array([1]).tobytes(), np.array([-1]).tobytes()))


def test_a_rank_that_reads_no_orders_ends_the_worker():
    def full(_: bytes) -> None:
        raise EngineError("rank 1 does not take its orders")

    pool = GroupWorld(1).pools[0]
    group = GroupCopies(pool, full, never, pool.page_bytes)
    with pytest.raises(RanksLostError, match=r"copies of KV could not be sent.*: EngineError: rank 1 does not take"):
        group.save([1])
