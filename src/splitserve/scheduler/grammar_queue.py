"""Queue of requests that wait for their compiled grammar, before they enter a role: no page, row or room is held.

1. `add` finds the grammar in the cache, or submits it to a pool of threads. Equal grammars are compiled once. Requests
   with equal grammars share one text: it may have megabytes, and comparing two copies takes as long as reading them.
2. A thread that finishes wakes the scheduler. The next `pop` starts a matcher for each request. `pop` returns requests
   with their first mask ready, so the last chunk of a prompt never waits for a mask.
3. `pop` returns a request with an error if its grammar is invalid or not compiled by the deadline. A compilation in
   progress goes on and enters the cache, so that a retry of the request may succeed.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Executor, Future

from splitserve.core.clock import Clock
from splitserve.core.config import SchedulerConfig
from splitserve.core.errors import CapacityError, DeadlineExceededError, EngineError, SplitserveError
from splitserve.core.grammar import CompiledGrammar, GrammarCompiler, GrammarSpec
from splitserve.core.request import Request

STAGE = "grammar"


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
        # Requests by rid, in order of arrival, with the clock times of their deadlines.
        self._waiting: dict[str, tuple[Request, float]] = {}
        # Compiled or in progress, least recently used first. A failure is removed with the last request that waits for
        # it.
        self._grammars: OrderedDict[GrammarSpec, Future[CompiledGrammar]] = OrderedDict()
        # Equal spec -> the shared one. The keys are those of `_grammars`.
        self._specs: dict[GrammarSpec, GrammarSpec] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def requests(self) -> list[Request]:
        return [request for request, _ in self._waiting.values()]

    def add(self, request: Request) -> None:
        """Take a request with `params.grammar` set. Raises CapacityError."""
        spec = _spec_of(request)
        if len(self._waiting) >= self._settings.max_queued_grammars:
            raise CapacityError(
                f"{len(self._waiting)} requests wait for their grammars to be compiled: retry later", stage=STAGE
            )
        spec = self._specs.setdefault(spec, spec)
        request.params = dataclasses.replace(request.params, grammar=spec)
        now = self._clock.now()
        request.timeline.enter(STAGE, now)
        known = self._grammars.get(spec)
        if known is None or (_is_compiled(known) and not known.result().is_usable):
            future = self._pool.submit(self._compiler.compile, spec)
            self._grammars[spec] = future
            future.add_done_callback(lambda _: self._wake())
        self._grammars.move_to_end(spec)
        self._waiting[request.rid] = request, now + self._settings.grammar_timeout

    def pop(self) -> list[tuple[Request, SplitserveError | None]]:
        """Return requests with a ready matcher (None) and failed requests (why they failed), in order of arrival."""
        popped: list[tuple[Request, SplitserveError | None]] = []
        if not self._waiting:
            return popped
        now = self._clock.now()
        for request, deadline in list(self._waiting.values()):
            future = self._grammars[_spec_of(request)]
            is_decided = _is_decided(request, future)
            if is_decided or now >= deadline:
                del self._waiting[request.rid]
                popped.append((request, self._failure(request, future) if is_decided else self._overdue(request)))
        if popped:
            self._tidy()
        return popped

    def remove(self, rid: str) -> Request | None:
        """Remove a request and return it. None: it is not queued."""
        if rid not in self._waiting:
            return None
        request, _ = self._waiting.pop(rid)
        self._tidy()
        return request

    def _overdue(self, request: Request) -> SplitserveError:
        return DeadlineExceededError(
            f"its {_spec_of(request).kind} was not compiled within {self._settings.grammar_timeout:g} s: send it again "
            "later, make it smaller (long maxLength and repetitions cost most), or raise --grammar-timeout",
            stage=STAGE,
        )

    def _failure(self, request: Request, future: Future[CompiledGrammar]) -> SplitserveError | None:
        """Return why the request cannot continue. None: its matcher is ready."""
        error = future.exception() if request.grammar is None else request.grammar.failure
        if error is None:
            return None
        if isinstance(error, SplitserveError):
            # A copy: one exception may answer many requests.
            return type(error)(error.message, param=error.param, stage=STAGE)
        return EngineError(f"its grammar could not be compiled: {type(error).__name__}: {error}", stage=STAGE)

    def _tidy(self) -> None:
        """Drop grammars that no request waits for: failures, jobs not begun, and compiled ones beyond the bound."""
        wanted = {_spec_of(request) for request, _ in self._waiting.values()}
        idle = [(spec, future) for spec, future in self._grammars.items() if spec not in wanted]
        kept = sum(f.result().num_bytes for f in self._grammars.values() if _is_compiled(f))
        for spec, future in idle:
            if _is_compiled(future):
                if kept <= self._settings.grammar_cache_bytes:
                    continue
                kept -= future.result().num_bytes
            elif not (future.done() or future.cancel()):
                continue
            del self._grammars[spec], self._specs[spec]


def _spec_of(request: Request) -> GrammarSpec:
    assert request.params.grammar is not None
    return request.params.grammar


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
