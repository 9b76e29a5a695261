"""The overlapped loop, turn by turn: what is planned, received and released while a step is in flight.

Which order of events ever, the outcome is right: that is tests/sim's to prove.
"""

import pytest

from splitserve.core.errors import EngineError
from splitserve.core.messages import AbortRequest, GenerateRequest
from splitserve.core.sampling import ResolvedSampling
from splitserve.scheduler.loops import OverlappedLoop
from support.fake_engine import expected_tokens
from support.fake_grammar import HeldPool, multiples
from support.sim import ColocatedWorld

PROMPT = list(range(5))


class Overlapped(ColocatedWorld):
    """Steps end when the test ends them."""

    def __init__(self, **settings):
        super().__init__(**settings)
        self._engine_thread = HeldPool()
        self._overlapped = OverlappedLoop(self.scheduler, self.engine, self._engine_thread, wake=lambda: None)
        self.now = None

    def ask(self, rid="a", prompt=PROMPT, **params) -> None:
        params = ResolvedSampling(**({"max_new_tokens": 8, "temperature": 0.0} | params))
        self.submit(GenerateRequest(rid=rid, prompt_ids=list(prompt), params=params))

    def turn(self) -> bool:
        self.now = self._overlapped.turn(self.now)
        return self.now is not None

    def end_step(self) -> None:
        self._engine_thread.finish_all()

    def is_idle(self) -> bool:
        return super().is_idle() and self.now is None

    def run_to_the_end(self) -> None:
        for _ in range(200):
            self.turn()
            if self.is_idle():
                return
            self.end_step()
        raise AssertionError("still busy")


def rids_of(world: Overlapped) -> list[str]:
    """In the step in flight."""
    return [r.rid for r in world.now.batch.requests]


def sampled(count: int, prompt=PROMPT) -> list[int]:
    return expected_tokens(prompt, ResolvedSampling(temperature=0.0), count)


def test_a_step_begins_before_the_tokens_it_goes_on_from_are_known():
    world = Overlapped()
    world.ask()
    world.turn()
    first = world.now
    world.turn()
    assert world.now is first, "it has not ended"
    world.end_step()
    world.turn()
    assert world.now is not first
    assert world.now.batch.plan.requests[0].start == len(PROMPT)
    # The first result was entered while the second step runs.
    assert world.tokens("a") == sampled(1)
    world.run_to_the_end()
    assert world.tokens("a") == sampled(8)
    assert world.fake_engine.step_sizes == [len(PROMPT)] + [1] * 7, "none more than needed"


def test_who_stops_is_in_one_step_too_many_and_its_pages_are_back_when_that_has_ended():
    world = Overlapped(prefix=False)
    world.ask(stop_token_ids=(sampled(2)[-1],))
    world.turn()
    for _ in range(2):
        world.end_step()
        world.turn()
    assert world.tokens("a") == sampled(2)
    assert world.finish("a") is not None
    assert rids_of(world) == ["a"]
    assert world.cache.pages.available() < world.cache.pages.num_pages
    world.check()
    world.end_step()
    world.turn()
    assert world.tokens("a") == sampled(2)
    world.check_nothing_is_held()


def test_an_abort_is_answered_during_the_step_and_the_next_one_goes_without():
    world = Overlapped(prefix=False)
    world.ask("a")
    world.ask("b", prompt=[7])
    world.turn()
    assert rids_of(world) == ["a", "b"]
    world.submit(AbortRequest(rid="a"))
    world.turn()
    assert world.finish("a").reason == "aborted"
    # The same name again: it has nothing to do with the one in flight.
    world.ask("a2")
    world.end_step()
    world.turn()
    assert rids_of(world) == ["b", "a2"]
    world.run_to_the_end()
    assert world.tokens("a") == []
    assert world.tokens("b") == sampled(8, [7])
    assert world.tokens("a2") == sampled(8)
    world.check_nothing_is_held()


def test_who_comes_during_a_step_is_in_the_next_one():
    world = Overlapped()
    world.ask("a")
    world.turn()
    world.turn()
    world.ask("b")
    world.turn()
    world.end_step()
    world.turn()
    assert rids_of(world) == ["a", "b"]


@pytest.mark.parametrize("history", [{"frequency_penalty": 0.5}, {"grammar": multiples(3, 5)}])
def test_a_step_that_needs_the_last_token_is_planned_when_that_is_known(history):
    world = Overlapped()
    world.ask("a", **history)
    world.ask("b")
    world.turn()
    world.end_step()
    assert not world.turn()
    assert len(world.tokens("a")) == len(world.tokens("b")) == 1
    assert world.turn()
    assert {s.rid: list(s.token_ids) for s in world.now.batch.plan.requests} == {r: world.tokens(r) for r in "ab"}
    world.run_to_the_end()
    assert world.tokens("b") == sampled(8)


def test_nobody_gives_way_during_a_step():
    # Two pages of four tokens: after three more tokens one of them must go.
    world = Overlapped(num_pages=4, page_size=4, num_reserved_decode_tokens=1, prefix=False)
    for rid in ("a", "b"):
        world.ask(rid, max_new_tokens=9)
    retractions = world.running.retraction
    while not retractions.num_retracted_total:
        before = world.now
        world.turn()
        if retractions.num_retracted_total:
            assert before is None
        world.end_step()
    world.run_to_the_end()
    assert world.tokens("a") == world.tokens("b") == sampled(9)
    world.check_nothing_is_held()


def test_a_failed_step_ends_its_requests_and_the_one_planned_after_it_never_runs():
    world = Overlapped()
    world.ask("a")
    world.turn()
    world.fake_engine.fail_next(EngineError("the kernel broke"))
    world.end_step()
    world.turn()
    assert world.now is None
    assert world.finish("a").status_code == 500
    world.ask("b")
    world.run_to_the_end()
    assert world.tokens("b") == sampled(8)
    assert world.fake_engine.step_sizes[1] == len(PROMPT)
    world.check_nothing_is_held()
