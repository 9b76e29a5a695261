"""Grammars are compiled beside the loop: order, cache, bounds, deadlines. The clock and the pool are turned by hand."""

import pytest

from splitserve.core.clock import ManualClock
from splitserve.core.config import SchedulerConfig
from splitserve.core.errors import (
    CapacityError,
    DeadlineExceededError,
    EngineError,
    InvalidRequestError,
    SplitserveError,
)
from splitserve.core.grammar import GrammarKind, GrammarSpec
from splitserve.core.request import Request
from splitserve.core.sampling import ResolvedSampling
from splitserve.scheduler.grammar_queue import GrammarQueue
from support.fake_grammar import FakeCompiler, HeldPool, multiples

BAD = GrammarSpec(GrammarKind.EBNF, "nonsense")


class World:
    def __init__(self, *, max_waiting=10, cache_bytes=10_000, compiler=None) -> None:
        self.clock, self.pool, self.compiler = ManualClock(), HeldPool(), compiler or FakeCompiler()
        self.wakes = 0
        settings = SchedulerConfig(
            grammar_timeout=5.0, max_queued_grammars=max_waiting, grammar_cache_bytes=cache_bytes
        )
        self.queue = GrammarQueue(self.compiler, self.pool, self.clock, self._wake, settings)

    def _wake(self) -> None:
        self.wakes += 1

    def add(self, rid: str, spec: GrammarSpec) -> Request:
        request = Request(rid, [1], ResolvedSampling(grammar=spec))
        self.queue.add(request)
        return request

    def pop(self) -> tuple[list[Request], list[tuple[Request, SplitserveError]]]:
        """Return the requests that are ready, and those that failed with their errors."""
        popped = self.queue.pop()
        failed = [(request, error) for request, error in popped if error is not None]
        return [request for request, error in popped if error is None], failed

    def serve(self, rid: str, spec: GrammarSpec) -> None:
        """Let a request through from its arrival to its matcher."""
        self.add(rid, spec)
        self.pool.finish_all()
        ready, _ = self.pop()
        assert [r.rid for r in ready] == [rid]


def rids(requests) -> list[str]:
    return [r.rid for r in requests]


def test_a_request_comes_out_with_its_matcher_when_the_pool_is_done_and_not_before():
    world = World()
    request = world.add("a", multiples(3, 2))
    assert world.pop() == ([], [])
    assert len(world.queue) == 1
    world.pool.finish_all()
    assert world.wakes == 1
    assert world.pop() == ([request], [])
    assert request.grammar is not None
    assert request.grammar.accept(6)
    assert not request.grammar.accept(7)
    assert len(world.queue) == 0


def test_equal_grammars_are_compiled_once_and_each_request_has_a_matcher_of_its_own():
    world = World()
    first, second = world.add("a", multiples(3, 2)), world.add("b", multiples(3, 2))
    world.pool.finish_all()
    assert world.pop() == ([first, second], [])
    assert world.compiler.compiled == [multiples(3, 2)]
    assert first.grammar is not second.grammar


def test_requests_with_equal_grammars_share_one_text():
    world = World()
    text = multiples(3, 2).text
    specs = [GrammarSpec(multiples(3, 2).kind, "".join(list(text))) for _ in range(3)]
    first, second = (world.add(str(i), specs[i]) for i in range(2))
    world.pool.finish_all()
    world.pop()
    third = world.add("2", specs[2])
    assert first.params.grammar is second.params.grammar is third.params.grammar


def test_a_grammar_compiled_before_needs_no_thread():
    world = World()
    world.serve("a", multiples(3, 2))
    again = world.add("b", multiples(3, 2))
    assert world.pop() == ([again], [])


def test_a_strict_schema_and_a_loose_one_are_two_grammars():
    world = World()
    for strict in (True, False):
        world.add(f"{strict}", GrammarSpec(GrammarKind.JSON_SCHEMA, "3:2", strict=strict))
    world.pool.finish_all()
    assert len(world.compiler.compiled) == 2


def test_an_invalid_grammar_fails_every_request_with_it_and_no_other():
    world = World()
    world.add("a", BAD)
    good = world.add("b", multiples(2, 1))
    world.add("c", BAD)
    world.pool.finish_all()
    ready, failed = world.pop()
    assert ready == [good]
    assert rids(r for r, _ in failed) == ["a", "c"]
    for _, error in failed:
        assert isinstance(error, InvalidRequestError)
        assert (error.param, error.stage) == ("ebnf", "grammar")
    assert failed[0][1] is not failed[1][1]


def test_a_compiler_that_breaks_fails_the_request_as_our_fault():
    class Broken(FakeCompiler):
        def compile(self, spec):
            raise MemoryError("no room")

    world = World(compiler=Broken())
    world.add("a", multiples(2, 1))
    world.pool.finish_all()
    [(_, error)] = world.pop()[1]
    assert isinstance(error, EngineError)
    assert "MemoryError: no room" in error.message


def test_a_grammar_that_is_not_compiled_in_time_fails_its_request_and_is_not_begun_any_more():
    world = World()
    world.add("a", multiples(3, 2))
    world.clock.advance(4.9)
    late = world.add("b", multiples(5, 2))
    assert world.pop() == ([], [])
    world.clock.advance(0.1)
    [(request, error)] = world.pop()[1]
    assert request.rid == "a"
    assert isinstance(error, DeadlineExceededError)
    assert error.stage == "grammar"
    assert "within 5 s" in error.message
    assert "--grammar-timeout" in error.message
    world.pool.finish_all()
    assert world.compiler.compiled == [multiples(5, 2)]
    assert world.pop() == ([late], [])


def test_what_a_thread_has_begun_when_the_deadline_passes_serves_the_next_try():
    world = World()
    world.add("a", multiples(3, 2))
    world.pool.begin_all()
    world.clock.advance(5.0)
    assert rids(r for r, _ in world.pop()[1]) == ["a"]
    world.pool.finish_all()
    again = world.add("again", multiples(3, 2))
    assert world.pop() == ([again], [])
    assert len(world.compiler.compiled) == 1


def test_a_full_queue_refuses():
    world = World(max_waiting=2)
    world.add("a", multiples(3, 1))
    world.add("b", multiples(3, 1))
    with pytest.raises(CapacityError, match="retry later"):
        world.add("c", multiples(3, 1))
    assert len(world.queue) == 2


def test_a_removed_request_is_gone_and_its_grammar_is_compiled_only_if_another_wants_it():
    world = World()
    a = world.add("a", multiples(3, 1))
    world.add("b", multiples(4, 1))
    kept = world.add("c", multiples(4, 1))
    assert world.queue.remove("a") is a
    assert world.queue.remove("b") is not None
    assert world.queue.remove("a") is None
    world.pool.finish_all()
    assert world.compiler.compiled == [multiples(4, 1)]
    assert world.pop() == ([kept], [])


def test_to_look_for_a_request_that_is_not_here_costs_nothing_whatever_is_in_the_cache(monkeypatch):
    world = World()
    world.serve("a", multiples(3, 1))
    # A caller that reads its result fails.
    monkeypatch.setattr(world.queue, "_grammars", None)
    assert world.queue.remove("b") is None


def test_the_cache_keeps_the_latest_used_within_its_bound():
    world = World(cache_bytes=200)
    world.serve("a", multiples(2, 1))
    world.serve("b", multiples(3, 1))
    world.serve("a again", multiples(2, 1))
    world.serve("c", multiples(5, 1))
    assert len(world.compiler.compiled) == 3
    world.serve("a third", multiples(2, 1))
    assert len(world.compiler.compiled) == 3
    world.serve("b again", multiples(3, 1))
    assert len(world.compiler.compiled) == 4
