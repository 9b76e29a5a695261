"""Grammar without a library: accepts `count` tokens that are multiples of `step`, and then the end.

Its spec is the text "step:count", of any kind. `InlinePool` compiles at once, `HeldPool` when the test requests it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from typing import Any

import numpy as np

from splitserve.core.errors import InvalidRequestError, SplitserveError
from splitserve.core.grammar import GrammarKind, GrammarSpec, refused_output


def multiples(step: int, count: int) -> GrammarSpec:
    return GrammarSpec(GrammarKind.REGEX, f"{step}:{count}")


class FakeCompiler:
    def __init__(self, eos_token_ids: frozenset[int] = frozenset()) -> None:
        self._eos_token_ids = eos_token_ids
        # Specs in the order of their compilation.
        self.compiled: list[GrammarSpec] = []

    def compile(self, spec: GrammarSpec) -> FakeGrammar:
        self.compiled.append(spec)
        step, colon, count = spec.text.partition(":")
        if not (colon and step.isdigit() and count.isdigit()):
            raise InvalidRequestError(
                f"{spec.kind} cannot be compiled: {spec.text!r} is no step:count", param=spec.kind
            )
        return FakeGrammar(int(step), int(count), self._eos_token_ids)


class FakeGrammar:
    """CompiledGrammar with a size of 100 bytes."""

    num_bytes = 100

    def __init__(self, step: int, count: int, eos_token_ids: frozenset[int]) -> None:
        self._rule = (step, count, eos_token_ids)

    is_usable = True

    def matcher(self, output_ids: Sequence[int] = ()) -> FakeMatcher:
        matcher = FakeMatcher(*self._rule)
        for index, token_id in enumerate(output_ids):
            if not matcher.accept(token_id):
                matcher.failure = refused_output(token_id, index)
                break
        return matcher


class FakeMatcher:
    """GrammarMatcher with masks that are ready unless a test sets `is_slow`.

    With `is_expected`, the scheduler expects a slow mask within the step.
    """

    failure: SplitserveError | None = None
    is_slow = False
    is_expected = False

    def __init__(self, step: int, count: int, eos_token_ids: frozenset[int]) -> None:
        self._rule = (step, count, eos_token_ids)
        self._accepted: list[int] = []

    def accept(self, token_id: int) -> bool:
        if not self.is_terminated() and self._allows(token_id):
            self._accepted.append(token_id)
            return True
        return False

    def is_ready(self, *, soon: bool = False) -> bool:
        return not self.is_slow or (soon and self.is_expected)

    def fill_bitmask(self, words: memoryview, timeout: float = 0.0) -> bool:
        if self.is_slow:
            return False
        row = np.frombuffer(words, dtype=np.int32)
        bits = np.array([self._allows(token) for token in range(32 * len(row))])
        row[:] = np.packbits(bits, bitorder="little").view(np.int32)
        return True

    @property
    def num_accepted(self) -> int:
        return len(self._accepted)

    def is_terminated(self) -> bool:
        _, count, eos_token_ids = self._rule
        return len(self._accepted) >= count + bool(eos_token_ids)

    def _allows(self, token_id: int) -> bool:
        step, count, eos_token_ids = self._rule
        if len(self._accepted) >= count:
            return token_id in eos_token_ids
        return token_id % step == 0 and token_id not in eos_token_ids


class InlinePool(Executor):
    """Executor that runs everything before `submit` returns."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        run(future, fn, *args, **kwargs)
        return future


class HeldPool(Executor):
    """Executor under manual control: it runs submitted work when the test requests it."""

    def __init__(self) -> None:
        self._held: list[tuple[Future[Any], Callable[[], Any]]] = []

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self._held.append((future, lambda: fn(*args, **kwargs)))
        return future

    def begin_all(self) -> None:
        """Mark held work as running, so that it can no longer be cancelled."""
        self._held = [(f, work) for f, work in self._held if f.running() or f.set_running_or_notify_cancel()]

    def finish_all(self) -> None:
        self.begin_all()
        held, self._held = self._held, []
        for future, work in held:
            run(future, work)

    def finish_next(self) -> None:
        """Run the work that was submitted first, if any is held."""
        if self._held:
            future, work = self._held.pop(0)
            if future.running() or future.set_running_or_notify_cancel():
                run(future, work)


def run(future: Future[Any], fn: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    try:
        result = fn(*args, **kwargs)
    except Exception as error:
        future.set_exception(error)
    else:
        future.set_result(result)
