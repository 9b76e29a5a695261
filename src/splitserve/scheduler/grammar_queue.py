"""Queue of requests that wait for their compiled grammar, before they enter a role: no page, row or room is held.

1. `add` finds the grammar in the cache, or submits it to a pool of threads. Equal grammars are compiled once.
2. A thread that finishes wakes the scheduler. The next `pop` starts a matcher for each request. `pop` returns requests
   with their first mask ready, so the last chunk of a prompt never waits for a mask.
3. `pop` returns a request with an error if its grammar is invalid or not compiled by the deadline. A compilation in
   progress goes on and enters the cache, so that a retry of the request may succeed.

It depends neither on the library behind the compiler nor on roles.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import dataclass

from splitserve.core.clock import Clock
from splitserve.core.config import SchedulerConfig
from splitserve.core.errors import CapacityError, DeadlineExceededError, EngineError, SplitserveError
from splitserve.core.grammar import CompiledGrammar, GrammarCompiler, GrammarSpec
from splitserve.core.request import Request

STAGE = "grammar"


@dataclass(frozen=True, slots=True)
class _Waiter:
    request: Request
    spec: GrammarSpec
    deadline: float


class GrammarQueue:
    """Requests that wait for their grammar. The pool's threads call `wake`, the scheduler's thread the rest."""

    def __init__(
        self,
        compiler: GrammarCompiler,
        pool: Executor,
        clock: Clock,
        wake: Callable[[], None],
        settings: SchedulerConfig,
    ) -> None:
        self._compiler = compiler
        self._pool = pool
        self._clock = clock
        self._wake = wake
        self._settings = settings
        # rid -> a request, in order of arrival.
        self._waiting: dict[str, _Waiter] = {}
        # Compiled or in progress, least recently used first. A failure is removed with the last request that waits for
        # it.
        self._grammars: OrderedDict[GrammarSpec, Future[CompiledGrammar]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, request: Request) -> None:
        """Take a request with `params.grammar` set. Raises CapacityError."""
        spec = request.params.grammar
        assert spec is not None
        if len(self._waiting) >= self._settings.max_queued_grammars:
            raise CapacityError(
                f"{len(self._waiting)} requests wait for their grammars to be compiled: retry later", stage=STAGE
            )
        now = self._clock.now()
        request.timeline.enter(STAGE, now)
        known = self._grammars.get(spec)
        if known is None or (_is_compiled(known) and not known.result().is_usable):
            future = self._pool.submit(self._compiler.compile, spec)
            self._grammars[spec] = future
            future.add_done_callback(lambda _: self._wake())
        self._grammars.move_to_end(spec)
        self._waiting[request.rid] = _Waiter(request, spec, now + self._settings.grammar_timeout)

    def pop(self) -> tuple[list[Request], list[tuple[Request, SplitserveError]]]:
        """Return (requests with a ready matcher; failed requests and why), each in order of arrival."""
        if not self._waiting:
            return [], []
        ready: list[Request] = []
        failed: list[tuple[Request, SplitserveError]] = []
        now = self._clock.now()
        for waiter in list(self._waiting.values()):
            future = self._grammars[waiter.spec]
            if now < waiter.deadline and not _is_decided(waiter.request, future):
                continue
            del self._waiting[waiter.request.rid]
            error = self._outcome(waiter, future)
            if error is None:
                ready.append(waiter.request)
            else:
                failed.append((waiter.request, error))
        self._tidy()
        return ready, failed

    def remove(self, rid: str) -> Request | None:
        """Remove a request and return it. None: it is not queued."""
        waiter = self._waiting.pop(rid, None)
        if waiter is None:
            return None
        self._tidy()
        return waiter.request

    def _outcome(self, waiter: _Waiter, future: Future[CompiledGrammar]) -> SplitserveError | None:
        """Return why the request cannot continue. None: its matcher is ready."""
        if not _is_decided(waiter.request, future):
            return DeadlineExceededError(
                f"its {waiter.spec.kind} was not compiled within {self._settings.grammar_timeout:g} s: send it again "
                "later, make it smaller (long maxLength and repetitions cost most), or raise --grammar-timeout",
                stage=STAGE,
            )
        matcher = waiter.request.grammar
        error = future.exception() if matcher is None else matcher.failure
        if error is None:
            return None
        if isinstance(error, SplitserveError):
            # A copy: one exception may answer many requests.
            return type(error)(error.message, param=error.param, stage=STAGE)
        return EngineError(f"its grammar could not be compiled: {type(error).__name__}: {error}", stage=STAGE)

    def _tidy(self) -> None:
        """Drop grammars that no request waits for: failures, jobs not begun, and compiled ones beyond the bound."""
        wanted = {waiter.spec for waiter in self._waiting.values()}
        idle = [(spec, future) for spec, future in self._grammars.items() if spec not in wanted]
        kept = sum(f.result().num_bytes for f in self._grammars.values() if _is_compiled(f))
        for spec, future in idle:
            if _is_compiled(future):
                if kept <= self._settings.grammar_cache_bytes:
                    continue
                kept -= future.result().num_bytes
            elif not (future.done() or future.cancel()):
                continue
            del self._grammars[spec]


def _is_decided(request: Request, future: Future[CompiledGrammar]) -> bool:
    """Return whether the request's matcher is ready or has failed. Starts the matcher if the grammar is compiled."""
    if not future.done():
        return False
    if request.grammar is None:
        if future.exception() is not None:
            return True
        # The matcher starts after the output that came with the request.
        request.grammar = future.result().matcher(request.output_ids)
    return request.grammar.is_ready() or request.grammar.failure is not None


def _is_compiled(future: Future[CompiledGrammar]) -> bool:
    return future.done() and not future.cancelled() and future.exception() is None
