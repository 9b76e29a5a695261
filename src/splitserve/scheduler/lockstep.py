"""Schedulers that compute their steps together: data parallel ranks of one model with layers that all of them share.

Each rank has its own requests, scheduler and KV pool, and attends to its own tokens. A layer of experts computes the
tokens of all ranks together. So all ranks must be in the same step and know the number of tokens of every other rank.

1. A rank with something to compute joins the next step, with its number of tokens (`Member.join`).
2. The `Hub` calls the others. A rank without work joins with no tokens: its scheduler plans an empty step.
3. When all have joined, the hub sends all ranks the numbers of tokens, and the step runs (`LockstepEngine`).

If no rank has work, none is called, and nothing happens. A rank that ends, or fails in a step so that it is out of
step, breaks the group: the others would wait for it in the middle of a layer.

Hub and members have no threads or sockets of their own. The channel that carries their messages
(`ranks/lockstep_channel.py`) calls them: `Hub` from one thread, `Member.receive` from any. Messages of the hub to one
rank must keep their order.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import msgspec

from splitserve.core.batch import StepPlan, StepResult
from splitserve.core.errors import EngineError, RanksLostError


class Joined(msgspec.Struct, frozen=True, tag=True):
    """Message of a rank to the hub: it takes part in step number `step`."""

    rank: int
    step: int
    num_tokens: int


class RankLeft(msgspec.Struct, frozen=True, tag=True):
    """Message of a rank to the hub: it takes part in no more steps."""

    rank: int
    reason: str


class Called(msgspec.Struct, frozen=True, tag=True):
    """Message of the hub to a rank: another rank has joined this step."""

    step: int


class Complete(msgspec.Struct, frozen=True, tag=True):
    """Message of the hub to all ranks: all have joined."""

    step: int
    # Tokens of each rank, by rank.
    num_tokens: tuple[int, ...]


class LockstepBroken(msgspec.Struct, frozen=True, tag=True):
    """Message of the hub to all ranks: there will be no more steps."""

    reason: str


Order = Called | Complete | LockstepBroken
# Messages to send, each with its rank.
Orders = list[tuple[int, Order]]


class Hub:
    """Counter of the ranks that have joined a step. It calls the others, and reports when all have joined."""

    def __init__(self, num_ranks: int) -> None:
        self._ranks = range(num_ranks)
        self._step = 0
        # Tokens of the ranks that have joined the step, by rank.
        self._joined: dict[int, int] = {}
        self._broken: LockstepBroken | None = None

    def join(self, message: Joined) -> Orders:
        if self._broken is not None:
            return [(message.rank, self._broken)]
        if message.step != self._step or message.rank in self._joined:
            return self.leave(message.rank, f"it joined step {message.step}, and the group is at step {self._step}")
        self._joined[message.rank] = message.num_tokens
        if len(self._joined) < len(self._ranks):
            # The first rank that joins has the others called, once.
            called = [rank for rank in self._ranks if rank != message.rank] if len(self._joined) == 1 else []
            return [(rank, Called(self._step)) for rank in called]
        complete = Complete(self._step, tuple(self._joined[rank] for rank in self._ranks))
        self._step += 1
        self._joined.clear()
        return [(rank, complete) for rank in self._ranks]

    def leave(self, rank: int, reason: str) -> Orders:
        """Break the group, because the rank has ended or failed in the middle of a step."""
        if self._broken is not None:
            return []
        self._broken = LockstepBroken(f"data parallel rank {rank} left the group in step {self._step}: {reason}")
        return [(other, self._broken) for other in self._ranks]


class Member:
    """A rank's end. `send` sends a message to the hub, `leave` reports that this rank is lost; neither may wait.

    `wake` ends the scheduler's wait, from any thread. `timeout`: seconds that the others have to join a step.
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
        # Guards all fields below.
        self._changed = threading.Condition()
        # The next step to join, and the last step that the hub called this rank to.
        self._step = 0
        self._called = -1
        # Whether this rank has joined and waits for the others; then the tokens of each rank.
        self._is_waiting = False
        self._complete: tuple[int, ...] | None = None
        self._broken: str | None = None

    @property
    def is_called(self) -> bool:
        """Whether the others wait for this rank to join a step."""
        with self._changed:
            return self._called == self._step and self._broken is None

    @property
    def is_broken(self) -> bool:
        with self._changed:
            return self._broken is not None

    @property
    def is_ready(self) -> bool:
        """Whether `wait` returns at once."""
        return not self._is_waiting

    def receive(self, order: Order) -> None:
        with self._changed:
            match order:
                case Called():
                    self._called = order.step
                case Complete():
                    self._complete, self._is_waiting = order.num_tokens, False
                case LockstepBroken():
                    self._broken, self._is_waiting = order.reason, False
            self._changed.notify_all()
        if not isinstance(order, Complete):
            self._wake()

    def join(self, num_tokens: int) -> None:
        """Join the next step with `num_tokens` tokens of this rank. `wait` must follow."""
        with self._changed:
            self._complete = None
            if self._broken is not None:
                return
            step, self._step = self._step, self._step + 1
            self._is_waiting = True
        self._send(Joined(self.rank, step, num_tokens))

    def wait(self) -> tuple[int, ...]:
        """Wait until all have joined, and return the tokens of each. Raises RanksLostError if the group breaks."""
        with self._changed:
            self._changed.wait_for(lambda: self.is_ready, self._timeout)
            if self._complete is not None:
                # Return it even if the group has broken since: the others compute this step and wait for this rank's
                # share.
                return self._complete
            reason = self._broken
        if reason is None:
            reason = f"not all data parallel ranks joined step {self._step - 1} within {self._timeout:g} s"
            self.leave(reason)
        raise RanksLostError(reason)

    def leave(self, reason: str) -> None:
        """Break the group."""
        with self._changed:
            self._broken, self._is_waiting = self._broken or reason, False
            self._changed.notify_all()
        self._leave(reason)


# Runs a prepared step. (tokens of each rank) Raises RanksLostError if the ranks are out of step, EngineError if only
# the requests of this rank's plan fail.
RunJointly = Callable[[tuple[int, ...]], StepResult]


class LockstepEngine:
    """Engine with steps that several ranks compute together. `prepare` prepares a step; its plan may be empty.

    A step raises RanksLostError if the group is broken: the process ends with its group.
    """

    def __init__(self, prepare: Callable[[StepPlan], RunJointly], member: Member) -> None:
        self._prepare = prepare
        self._member = member

    def execute(self, plan: StepPlan) -> StepResult:
        return self.prepare(plan)()

    def prepare(self, plan: StepPlan) -> JointStep:
        # A failure here fails this plan's requests only: no other rank waits for this one yet.
        return JointStep(self._prepare(plan), plan.num_tokens, self._member)


class JointStep:
    """A prepared step, which runs once, when all ranks have joined it."""

    def __init__(self, run: RunJointly, num_tokens: int, member: Member) -> None:
        self._run = run
        self._num_tokens = num_tokens
        self._member = member
        self._has_joined = False

    def join(self) -> None:
        """Join the step early, so that the call itself waits less."""
        if not self._has_joined:
            self._has_joined = True
            self._member.join(self._num_tokens)

    def __call__(self) -> StepResult:
        self.join()
        num_tokens = self._member.wait()
        try:
            return self._run(num_tokens)
        except RanksLostError as error:
            # The others may wait in a layer that this rank never reached.
            self._member.leave(error.message)
            raise
        except EngineError as error:
            if self._member.is_broken:
                raise RanksLostError(error.message) from error
            raise
