"""Schedulers that compute their steps together: data parallel ranks of one model with layers that all of them share.

Each rank has requests, a scheduler and a KV pool of its own, and attends to its own tokens. In a layer of experts the
tokens of all ranks come together, so all must be in the same step, each knowing how many tokens every other one brings.

1. A rank that has something to compute joins the next step, with its number of tokens (`Member.join`).
2. The `Hub` calls the others. Who has nothing to compute joins with no token: its scheduler plans an empty step.
3. When all have joined, the hub tells all who brings what, and the step runs (`LockstepEngine`). So it goes on.

Where nobody has anything to compute nobody is called, and nothing happens. A rank that ends, or whose part of a step
fails so that it is out of step, breaks the group: the others would wait for it in the middle of a layer.

Neither half has threads or sockets of its own. Whoever carries the messages between them (`launch/lockstep_channel.py`)
calls them: `Hub` from one thread, `Member.hear` from any. What the hub says to one rank must keep its order.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol

import msgspec

from splitserve.core.batch import StepPlan, StepResult
from splitserve.errors import EngineError, RanksLostError


class Joined(msgspec.Struct, frozen=True, tag=True):
    """A rank to the hub: it takes part in step number `step`."""

    rank: int
    step: int
    num_tokens: int


class Left(msgspec.Struct, frozen=True, tag=True):
    """A rank to the hub: it takes part in nothing any more."""

    rank: int
    reason: str


class Called(msgspec.Struct, frozen=True, tag=True):
    """The hub to a rank: another one has joined this step."""

    step: int


class Complete(msgspec.Struct, frozen=True, tag=True):
    """The hub to all ranks: all have joined."""

    step: int
    # By rank.
    num_tokens: tuple[int, ...]


class Broken(msgspec.Struct, frozen=True, tag=True):
    """The hub to all ranks: there will be no more steps."""

    reason: str


Order = Called | Complete | Broken
# What is to be sent to which rank.
Orders = list[tuple[int, Order]]


class Hub:
    """Where `num_ranks` ranks meet before each step."""

    def __init__(self, num_ranks: int) -> None:
        self._ranks = range(num_ranks)
        self._step = 0
        # Tokens of those that have joined it, by rank.
        self._joined: dict[int, int] = {}
        self._broken: Broken | None = None

    def join(self, message: Joined) -> Orders:
        if self._broken is not None:
            return [(message.rank, self._broken)]
        if message.step != self._step or message.rank in self._joined:
            return self.leave(message.rank, f"it joined step {message.step}, and the group is at step {self._step}")
        self._joined[message.rank] = message.num_tokens
        if len(self._joined) < len(self._ranks):
            # The others are called once, by the first.
            called = [rank for rank in self._ranks if rank != message.rank] if len(self._joined) == 1 else []
            return [(rank, Called(self._step)) for rank in called]
        complete = Complete(self._step, tuple(self._joined[rank] for rank in self._ranks))
        self._step += 1
        self._joined.clear()
        return [(rank, complete) for rank in self._ranks]

    def leave(self, rank: int, reason: str) -> Orders:
        """The rank takes part in nothing any more: it has ended, or failed in the middle of a step."""
        if self._broken is not None:
            return []
        self._broken = Broken(f"data parallel rank {rank} left the group in step {self._step}: {reason}")
        return [(other, self._broken) for other in self._ranks]


class Member:
    """A rank's end. `send` carries a message to the hub, `leave` says that this rank is lost; neither may wait.

    `wake` ends the scheduler's waiting, from any thread. `timeout`: seconds that the others have to join a step.
    """

    def __init__(
        self,
        rank: int,
        send: Callable[[Joined], None],
        leave: Callable[[str], None],
        wake: Callable[[], None],
        timeout: float,
    ) -> None:
        self.rank = rank
        self._send = send
        self._leave = leave
        self._wake = wake
        self._timeout = timeout
        # Of all below.
        self._changed = threading.Condition()
        # The next one to join, and the last one that we were called to.
        self._step = 0
        self._called = -1
        # Joined and not complete; then who brings what.
        self._is_waiting = False
        self._complete: tuple[int, ...] | None = None
        self._broken: str | None = None

    @property
    def is_called(self) -> bool:
        """The others wait for us to join a step."""
        with self._changed:
            return self._called == self._step and self._broken is None

    @property
    def is_broken(self) -> bool:
        with self._changed:
            return self._broken is not None

    @property
    def is_ready(self) -> bool:
        """`wait` would not wait."""
        return not self._is_waiting

    def hear(self, order: Order) -> None:
        with self._changed:
            match order:
                case Called():
                    self._called = order.step
                case Complete():
                    self._complete, self._is_waiting = order.num_tokens, False
                case Broken():
                    self._broken, self._is_waiting = order.reason, False
            self._changed.notify_all()
        if not isinstance(order, Complete):
            self._wake()

    def join(self, num_tokens: int) -> None:
        """Take part in the next step, with so many tokens of our own. `wait` is to follow."""
        with self._changed:
            self._complete = None
            if self._broken is not None:
                return
            step, self._step = self._step, self._step + 1
            self._is_waiting = True
        self._send(Joined(self.rank, step, num_tokens))

    def wait(self) -> tuple[int, ...]:
        """Until all have joined; the tokens of each. Raises EngineError where that will not be."""
        with self._changed:
            self._changed.wait_for(lambda: self.is_ready, self._timeout)
            if self._complete is not None:
                # Also where the group has broken since: the others compute this step, and wait for our share.
                return self._complete
            reason = self._broken
        if reason is None:
            reason = f"not all data parallel ranks joined step {self._step - 1} within {self._timeout:g} s"
            self.leave(reason)
        raise EngineError(reason)

    def retire(self, reason: str) -> None:
        """Ask to leave, from any thread. What ends first, the step that is under way or the group, the hub decides."""
        self._leave(reason)

    def leave(self, reason: str) -> None:
        """Break the group."""
        with self._changed:
            self._broken, self._is_waiting = self._broken or reason, False
            self._changed.notify_all()
        self._leave(reason)


class SharedEngine(Protocol):
    """An engine whose steps are those of several ranks."""

    def prepare(self, plan: StepPlan) -> Callable[[tuple[int, ...]], StepResult]:
        """As that of Engine. What is returned is told how many tokens each rank brings; the plan may be empty.

        It raises RanksLostError where the ranks are out of step, EngineError where only this plan's requests fail.
        """
        ...


class LockstepEngine:
    """Engine over one that is shared, for the normal and the overlapped loop."""

    def __init__(self, engine: SharedEngine, member: Member) -> None:
        self._engine = engine
        self._member = member

    @property
    def is_broken(self) -> bool:
        """There will be no more steps."""
        return self._member.is_broken

    def execute(self, plan: StepPlan) -> StepResult:
        return self.prepare(plan)()

    def prepare(self, plan: StepPlan) -> JointStep:
        return JointStep(self._engine.prepare(plan), plan.num_tokens, self._member)


class JointStep:
    """A prepared step, which runs when all ranks have joined it. Once."""

    def __init__(self, run: Callable[[tuple[int, ...]], StepResult], num_tokens: int, member: Member) -> None:
        self._run = run
        self._num_tokens = num_tokens
        self._member = member
        self._has_joined = False

    def join(self) -> None:
        """The first half of the call, for whoever does not want to wait in the other."""
        if not self._has_joined:
            self._has_joined = True
            self._member.join(self._num_tokens)

    def __call__(self) -> StepResult:
        self.join()
        num_tokens = self._member.wait()
        try:
            return self._run(num_tokens)
        except RanksLostError as error:
            # The others may be waiting in a layer that this rank never came to.
            self._member.leave(error.message)
            raise EngineError(error.message) from error


class GroupEngine:
    """Engine over a LockstepEngine, for a process that ends with its group: RanksLostError where that has broken."""

    def __init__(self, engine: LockstepEngine) -> None:
        self._engine = engine

    def execute(self, plan: StepPlan) -> StepResult:
        return self.prepare(plan)()

    def prepare(self, plan: StepPlan) -> Callable[[], StepResult]:
        # What fails here fails its requests alone: nobody counts on this rank yet.
        step = self._engine.prepare(plan)

        def run() -> StepResult:
            try:
                return step()
            except EngineError as error:
                if self._engine.is_broken:
                    raise RanksLostError(error.message) from error
                raise

        return run
