"""Real pipes between data parallel ranks that compute their steps together, all in this process."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from splitserve.core.batch import StepPlan, StepResult
from splitserve.core.errors import EngineError, RanksLostError
from splitserve.ranks.lockstep_channel import LockstepChannel, LockstepEndpoints
from splitserve.scheduler.lockstep import LockstepEngine

DEADLINE = 60.0
NUM_RANKS = 3


class Rank:
    """One with its end of the pipes, and how often its scheduler was woken."""

    def __init__(self, endpoints: LockstepEndpoints, rank: int, timeout: float = DEADLINE) -> None:
        self.woken = threading.Semaphore(0)
        self.channel = LockstepChannel(endpoints, rank, self.woken.release, timeout)
        self.member = self.channel.member

    def step(self, num_tokens: int) -> tuple[int, ...]:
        self.member.join(num_tokens)
        return self.member.wait()


@pytest.fixture
def endpoints(tmp_path: Path) -> LockstepEndpoints:
    return LockstepEndpoints.in_folder(str(tmp_path), NUM_RANKS)


@pytest.fixture
def ranks(endpoints: LockstepEndpoints) -> Iterator[list[Rank]]:
    with ExitStack() as closing:
        # The hub starts last: messages to it wait.
        ranks = [Rank(endpoints, i) for i in reversed(range(NUM_RANKS))]
        for rank in ranks:
            closing.callback(rank.channel.close)
        yield ranks[::-1]
        for rank in ranks:
            # Messages to ranks that are gone are not waited for.
            hub = rank.channel._hub
            for socket in (rank.channel._push, *(hub._to_rank if hub is not None else ())):
                if not socket.closed:
                    socket.linger = 0


def test_all_learn_what_each_brings_step_for_step(ranks: list[Rank]) -> None:
    with ThreadPoolExecutor(NUM_RANKS) as pool:
        for step in range(20):
            brought = tuple(step * i for i in range(NUM_RANKS))
            assert list(pool.map(Rank.step, ranks, brought)) == [brought] * NUM_RANKS


def test_a_rank_without_work_is_woken_and_called(ranks: list[Rank]) -> None:
    with ThreadPoolExecutor(1) as pool:
        joined = pool.submit(ranks[1].step, 7)
        for idle in (ranks[0], ranks[2]):
            assert idle.woken.acquire(timeout=DEADLINE)
            assert idle.member.is_called
            idle.member.join(0)
        assert joined.result(DEADLINE) == (0, 7, 0)
    assert not any(rank.member.is_called for rank in ranks)


@pytest.mark.parametrize("leaving", range(NUM_RANKS))
def test_who_waits_for_a_rank_that_ends_in_order_hears_of_it(ranks: list[Rank], leaving: int) -> None:
    others = [rank for i, rank in enumerate(ranks) if i != leaving]
    with ThreadPoolExecutor(NUM_RANKS) as pool:
        waiting = [pool.submit(rank.step, 5) for rank in others]
        ranks[leaving].channel.retire()
        ranks[leaving].channel.close()
        for answer in waiting:
            with pytest.raises(RanksLostError, match="left the group in step 0: it has ended"):
                answer.result(DEADLINE)


def test_the_end_of_rank_0_ends_the_waiting_of_all_though_it_says_nothing(ranks: list[Rank]) -> None:
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(ranks[2].step, 5)
        assert ranks[0].woken.acquire(timeout=DEADLINE)
        ranks[0].channel.close()
        with pytest.raises(RanksLostError, match="data parallel rank 0 left the group"):
            waiting.result(DEADLINE)


def test_the_end_of_rank_0_does_not_wait_for_orders_to_itself(ranks: list[Rank]) -> None:
    hub = ranks[0].channel._hub
    assert hub is not None
    assert [socket.linger > 0 for socket in hub._to_rank] == [False, True, True]


def test_a_rank_that_asks_to_leave_still_computes_the_step_that_all_have_joined(ranks: list[Rank]) -> None:
    for i, rank in enumerate(ranks):
        rank.member.join(i)
    # Ours is there before it waits, and so is the end of the group.
    assert [rank.member.wait() for rank in ranks[1:]] == [(0, 1, 2)] * 2
    ranks[0].channel.retire()
    assert ranks[0].woken.acquire(timeout=DEADLINE)
    assert ranks[0].member.wait() == (0, 1, 2)
    with pytest.raises(RanksLostError, match="it has ended"):
        ranks[0].step(1)


class Failing:
    """Preparation of steps that fail, or that fails itself."""

    def __init__(self, *, fails_early: bool, error: EngineError | RanksLostError | None = None) -> None:
        self._fails_early = fails_early
        self._error = error or RanksLostError("out of memory")

    def prepare(self, plan: StepPlan):
        if self._fails_early:
            raise EngineError("no such page")

        def run(num_tokens: tuple[int, ...]) -> StepResult:
            raise self._error

        return run


def test_a_failure_before_the_others_count_on_this_rank_is_its_requests_alone(ranks: list[Rank]) -> None:
    engine = LockstepEngine(Failing(fails_early=True).prepare, ranks[0].member)
    with pytest.raises(EngineError, match="no such page"):
        engine.execute(StepPlan(()))
    with ThreadPoolExecutor(NUM_RANKS) as pool:
        assert list(pool.map(Rank.step, ranks, range(NUM_RANKS))) == [(0, 1, 2)] * NUM_RANKS


def test_a_failure_in_a_step_is_the_end_of_all_ranks(ranks: list[Rank]) -> None:
    engines = [LockstepEngine(Failing(fails_early=False).prepare, ranks[0].member)]
    with ThreadPoolExecutor(NUM_RANKS) as pool:
        failing = pool.submit(engines[0].execute, StepPlan(()))
        assert [a.result(DEADLINE) for a in [pool.submit(r.step, 0) for r in ranks[1:]]] == [(0, 0, 0)] * 2
        with pytest.raises(RanksLostError, match="out of memory"):
            failing.result(DEADLINE)
    with pytest.raises(RanksLostError, match="data parallel rank 0 left the group in step 1: out of memory"):
        ranks[2].step(1)


def test_a_failure_that_leaves_the_ranks_in_step_is_its_requests_alone(ranks: list[Rank]) -> None:
    failing = Failing(fails_early=False, error=EngineError("too many to draw"))
    engine = LockstepEngine(failing.prepare, ranks[0].member)
    with ThreadPoolExecutor(NUM_RANKS) as pool:
        failed = pool.submit(engine.execute, StepPlan(()))
        assert [a.result(DEADLINE) for a in [pool.submit(r.step, 0) for r in ranks[1:]]] == [(0, 0, 0)] * 2
        with pytest.raises(EngineError, match="too many to draw"):
            failed.result(DEADLINE)
        assert list(pool.map(Rank.step, ranks, range(NUM_RANKS))) == [(0, 1, 2)] * NUM_RANKS


def test_nobody_waits_for_ever(endpoints: LockstepEndpoints) -> None:
    with ExitStack() as closing:
        rank = Rank(endpoints, 1, timeout=0.0)
        closing.callback(rank.channel.close)
        engine = LockstepEngine(Failing(fails_early=False).prepare, rank.member)
        with pytest.raises(RanksLostError, match="not all data parallel ranks joined step 0"):
            engine.execute(StepPlan(()))
        rank.channel.close()
