"""Release of memory and updates of weights on all ranks of one scheduler: all take a step, or none has an effect.

1. The driver sends the step to its followers. Every rank takes it, with its own `BuiltEngineMemory`.
2. All ranks exchange their outcomes: an error, or the state of their memory, which must be equal on all.
3. After a failure the driver orders all ranks back, and raises the error of the first rank that failed. If the ranks
   cannot go back together, it raises RanksLostError, and the worker ends.

A load is a collective (`Ranks.loading`), so it begins when no step runs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection

from splitserve.core.errors import EngineError, RanksLostError, SplitserveError, clause
from splitserve.core.memory import MemoryTag, WeightsSource
from splitserve.engine.build import BuiltEngine
from splitserve.engine.memory import BuiltEngineMemory
from splitserve.engine.parallel.ranks import TIMEOUT
from splitserve.ranks.group_orders import ChangeMemory, RankMemoryStep, encode_order

logger = logging.getLogger(__name__)

# Exchanges this rank's text for those of all ranks, after this step of all. Raises RanksLostError.
ExchangeTexts = Callable[[str, RankMemoryStep], list[str]]
# First character of an outcome that is an error.
_ERROR = "!"
# Steps in which ranks may load models. A rank that fails early waits for the others.
_LOADS = (RankMemoryStep.LOAD, RankMemoryStep.RESUME)


class GroupMemory:
    """EngineMemory of a driver and its followers. `own`: of the driver. `send_order`: to every follower."""

    closes_role = True

    def __init__(self, own: BuiltEngineMemory, send_order: Callable[[bytes], None], exchange: ExchangeTexts) -> None:
        self._own = own
        self._send = send_order
        self._exchange = exchange

    @property
    def released(self) -> frozenset[MemoryTag]:
        return self._own.released

    @property
    def fingerprint(self) -> str:
        return self._own.fingerprint

    def load(self, source: WeightsSource) -> None:
        # One copy of weights in shared memory is enough for all ranks.
        folder = self._own.folder_of(source)
        model = source.name if folder is None else str(folder.path)
        try:
            self._all(ChangeMemory(RankMemoryStep.LOAD, model=model, is_shared_memory=folder is not None))
        except BaseException as error:
            if folder is not None:
                folder.close()
            self._go_back(error, ChangeMemory(RankMemoryStep.DISCARD))
            raise
        self._own.own(folder)

    def use(self) -> None:
        try:
            self._all(ChangeMemory(RankMemoryStep.USE))
        except BaseException as error:
            self._go_back(error, ChangeMemory(RankMemoryStep.UNDO))
            raise

    def undo(self) -> None:
        self._certainly(ChangeMemory(RankMemoryStep.UNDO))

    def confirm(self) -> None:
        self._certainly(ChangeMemory(RankMemoryStep.CONFIRM))

    def discard(self) -> None:
        # While requests run, no weights are loaded, and no order may be sent.
        if self._own.has_next:
            self._certainly(ChangeMemory(RankMemoryStep.DISCARD))

    def release(self, tags: Collection[MemoryTag]) -> None:
        self._all(ChangeMemory(RankMemoryStep.RELEASE, frozenset(tags)))

    def resume(self, tags: Collection[MemoryTag]) -> None:
        resumed = self.released & frozenset(tags)
        try:
            self._all(ChangeMemory(RankMemoryStep.RESUME, resumed))
        except BaseException as error:
            self._go_back(error, ChangeMemory(RankMemoryStep.RELEASE, resumed))
            raise

    def _all(self, order: ChangeMemory) -> None:
        """Take a step on all ranks. Raises the error of the first rank that failed."""
        try:
            self._send(encode_order(order))
        except Exception as error:
            raise RanksLostError(
                f"An order about memory could not be sent to the other ranks of this worker: {clause(error)}. "
                "Restart the worker."
            ) from error
        failure = take_step(self._own, order)
        outcomes = self._exchange(outcome_of(self._own, failure), order.step)
        if failure is not None:
            raise failure
        for index, outcome in enumerate(outcomes):
            if outcome.startswith(_ERROR):
                raise EngineError(f"rank {index} of this worker could not {order.step} memory: {outcome[1:]}")
        if len(set(outcomes)) > 1:
            raise EngineError(
                f"the ranks of this worker have different weights after the step {order.step}: a file of the "
                "checkpoint changed meanwhile. Write each checkpoint to a folder of its own."
            )

    def _go_back(self, error: BaseException, order: ChangeMemory) -> None:
        if isinstance(error, SplitserveError) and not isinstance(error, RanksLostError):
            self._certainly(order)

    def _certainly(self, order: ChangeMemory) -> None:
        """Take a step that must not fail. Raises RanksLostError."""
        try:
            self._all(order)
        except RanksLostError:
            raise
        except SplitserveError as error:
            raise RanksLostError(
                f"the ranks of this worker do not have the same weights any more: {error.message}"
            ) from error


def exchange_over(engine: BuiltEngine) -> ExchangeTexts:
    """Return the exchange of the ranks of an engine. It waits for loads, which may take longer than a step."""
    ranks = engine.ranks
    assert ranks is not None
    # The model, and its draft.
    loads = max(TIMEOUT, 2.0 * engine.config.load_timeout)
    return lambda own, step: ranks.texts(own, loads if step in _LOADS else TIMEOUT)


def take_step(memory: BuiltEngineMemory, order: ChangeMemory) -> SplitserveError | None:
    """Take a step on one rank. Return the error if it failed. Raises RanksLostError."""
    try:
        match order.step:
            case RankMemoryStep.LOAD:
                memory.load_from(order.model, is_shared_memory=order.is_shared_memory)
            case RankMemoryStep.RELEASE:
                memory.release(order.tags)
            case RankMemoryStep.RESUME:
                memory.resume(order.tags)
            case _:
                getattr(memory, order.step)()
    except RanksLostError:
        raise
    except SplitserveError as error:
        return error
    except Exception as error:
        logger.exception("this rank failed in the step %s of a change of memory", order.step)
        return EngineError(f"{type(error).__name__}: {clause(error)}")
    return None


def outcome_of(memory: BuiltEngineMemory, failure: SplitserveError | None) -> str:
    """Return what a rank reports to the others after a step."""
    return memory.state if failure is None else f"{_ERROR}{failure.message}"
