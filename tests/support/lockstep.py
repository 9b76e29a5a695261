"""Null workers that compute their steps together in one thread, in an order chosen by a seed. The network is lists.

Each has the overlapped loop. Its engine records the tokens of each rank in each step, so that tests can check that all
ranks took part in the same steps.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from functools import partial
from typing import Any

from splitserve.core.batch import StepPlan, StepResult
from splitserve.core.errors import EngineError, RanksLostError
from splitserve.scheduler.lockstep import Hub, Joined, JointStep, LockstepEngine, Member, Order, Orders
from splitserve.scheduler.loops import OverlappedLoop, StepInFlight
from support.fake_engine import FakeEngine
from support.fake_grammar import run
from support.sim import ColocatedWorld


class _Share:
    """Preparation of joint steps of the fake engine that records their arguments."""

    def __init__(self, engine: RecordingEngine) -> None:
        self._engine = engine

    def prepare(self, plan: StepPlan) -> Callable[[tuple[int, ...]], StepResult]:
        compute = FakeEngine.prepare(self._engine, plan)

        def step(num_tokens: tuple[int, ...]) -> StepResult:
            self._engine.joint_steps.append(num_tokens)
            assert num_tokens[self._engine.rank] == plan.num_tokens
            return compute()

        return step


class RecordingEngine(FakeEngine):
    def __init__(self, *args: Any, member: Member) -> None:
        super().__init__(*args)
        self.rank = member.rank
        # Tokens of each rank, for every step.
        self.joint_steps: list[tuple[int, ...]] = []
        self._lockstep = LockstepEngine(_Share(self).prepare, member)

    def prepare(self, plan: StepPlan) -> Callable[[], StepResult]:
        return self._lockstep.prepare(plan)


class JointStepThread(Executor):
    """Engine thread under manual control: a step joins those of the other ranks and runs when all have joined."""

    def __init__(self, member: Member) -> None:
        self._member = member
        # The step, and the work that the loop submitted, which runs it.
        self._step: tuple[Future[Any], JointStep, Callable[[], Any]] | None = None

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        step = args[-1]
        assert isinstance(step, JointStep)
        assert self._step is None
        future: Future[Any] = Future()
        self._step = future, step, partial(fn, *args, **kwargs)
        return future

    def go_on(self) -> None:
        if self._step is None:
            return
        future, step, work = self._step
        step.join()
        if self._member.is_ready:
            self._step = None
            run(future, lambda: _outlive_group(work))


def _outlive_group(step: Callable[[], Any]) -> Any:
    """Run a step of a worker that continues after its group has broken, unlike the process of a real one."""
    try:
        return step()
    except RanksLostError as error:
        raise EngineError(error.message) from error


class LockstepWorker(ColocatedWorld):
    def __init__(self, member: Member, **settings: Any) -> None:
        super().__init__(make_engine=partial(RecordingEngine, member=member), group=member, **settings)
        self.member = member
        self.thread = JointStepThread(member)
        self._overlapped = OverlappedLoop(self.scheduler, self.engine, self.thread, wake=lambda: None)
        self.in_flight: StepInFlight | None = None

    @property
    def joint_steps(self) -> list[tuple[int, ...]]:
        assert isinstance(self.engine, RecordingEngine)
        return self.engine.joint_steps

    def turn(self) -> bool:
        self.in_flight = self._overlapped.turn(self.in_flight)
        return self.in_flight is not None

    def is_idle(self) -> bool:
        return super().is_idle() and self.in_flight is None


class LockstepWorld:
    """Lockstep group of `num_ranks` workers, with the hub between them."""

    def __init__(self, seed: int, num_ranks: int, **settings: Any) -> None:
        self.rng = random.Random(seed)
        self.hub = Hub(num_ranks)
        # Messages in flight: to the hub in any order of ranks, to each rank in order.
        self._to_hub: deque[Callable[[], Orders]] = deque()
        self._to_rank: list[deque[Order]] = [deque() for _ in range(num_ranks)]
        self.num_messages = 0
        self.workers = [LockstepWorker(self._member(rank), **settings) for rank in range(num_ranks)]

    def happen(self) -> None:
        """Run one random event."""
        worker = self.rng.choice(self.workers)
        match self.rng.randrange(4):
            case 0:
                worker.turn()
            case 1:
                worker.thread.go_on()
            case 2 if self._to_hub:
                self.post(self._to_hub.popleft()())
            case 3 if orders := self._to_rank[worker.member.rank]:
                worker.member.receive(orders.popleft())

    def post(self, orders: Orders) -> None:
        for rank, order in orders:
            self.num_messages += 1
            self._to_rank[rank].append(order)

    def is_idle(self) -> bool:
        return all(worker.is_idle() for worker in self.workers)

    def run_until_idle(self, max_events: int = 200_000) -> None:
        for _ in range(max_events):
            self.happen()
            if self.is_idle():
                return
        raise AssertionError("still busy: something hangs")

    def _member(self, rank: int) -> Member:
        def send(message: Joined) -> None:
            self.num_messages += 1
            self._to_hub.append(partial(self.hub.join, message))

        def leave(reason: str) -> None:
            self._to_hub.append(partial(self.hub.leave, rank, reason))

        return Member(rank, send, leave, lambda: None, timeout=60.0)
