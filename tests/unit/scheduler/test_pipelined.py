"""The pipelined loop, turn by turn: what is planned, received and released while several steps are in flight.

Which order of events ever, the outcome is right: that is tests/sim's to prove.
"""

import random

import pytest

from splitserve.core.batch import StepPlan
from splitserve.core.errors import EngineError
from splitserve.core.messages import AbortRequest, GenerateRequest
from splitserve.core.sampling import ResolvedSampling
from support.fake_engine import expected_tokens
from support.fake_grammar import multiples
from support.guesser import RandomProposer
from support.staged_engine import PipelineWorld

PROMPT = list(range(5))


class Pipelined(PipelineWorld):
    """Stages that take a second a step, whatever is in it."""

    def __init__(self, pp_size=2, **settings):
        super().__init__([lambda plan: 1.0] * pp_size, **settings)

    def ask(self, rid="a", prompt=PROMPT, **params) -> None:
        params = ResolvedSampling(**({"max_new_tokens": 8, "temperature": 0.0} | params))
        self.submit(GenerateRequest(rid=rid, prompt_ids=list(prompt), params=params))

    def in_flight(self) -> list[list[str]]:
        """Who is in each step, first the one that ends first."""
        return [[s.rid for s in step.batch.plan.requests] for step in self.pipeline.in_flight]

    def end_and_turn(self) -> None:
        self.end_step()
        self.pipeline.turn()


def sampled(count: int, prompt=PROMPT) -> list[int]:
    return expected_tokens(prompt, ResolvedSampling(temperature=0.0), count)


def test_a_request_is_in_one_step_at_a_time_and_the_next_one_knows_its_token():
    world = Pipelined()
    world.ask("a")
    world.pipeline.turn()
    assert world.in_flight() == [["a"]]
    world.ask("b")
    world.pipeline.turn()
    assert world.in_flight() == [["a"], ["b"]]
    world.ask("c")
    world.end_and_turn()
    # Three requests in two micro-batches: two in the larger one.
    assert world.in_flight() == [["b"], ["a", "c"]]
    assert world.stages.plans[-1].requests[0].token_ids == sampled(1)
    world.end_and_turn()
    assert world.in_flight() == [["a", "c"], ["b"]]
    world.run_to_the_end()
    for rid in "abc":
        assert world.tokens(rid) == sampled(8)
    world.check_nothing_is_held()


def test_a_prompts_chunks_follow_each_other_and_its_pages_are_back_when_the_last_of_them_has_ended():
    world = Pipelined(3, token_budget=4, page_size=4, prefix=False)
    world.ask("a", range(40))
    world.pipeline.turn()
    assert world.in_flight() == [["a"]] * 3
    assert [p.requests[0].start for p in world.stages.plans] == [0, 4, 8]
    world.submit(AbortRequest(rid="a"))
    world.pipeline.turn()
    assert world.finish("a").reason == "aborted"
    for _ in range(3):
        # Stages still write to them.
        assert world.cache.pages.num_pages - world.cache.pages.available() == 3
        assert world.cache.rows.available_size() == len(world.cache.rows.table) - 1
        world.check()
        world.end_and_turn()
    world.check_nothing_is_held()
    assert world.tokens("a") == []


def test_a_row_is_not_given_to_others_while_a_step_of_its_request_is_switching():
    world = Pipelined(2, max_running=2, prefix=False)
    for rid in "ab":
        world.ask(rid)
    world.pipeline.turn()
    world.submit(AbortRequest(rid="a"))
    world.pipeline.turn()
    # The same name again has nothing to do with the one in flight.
    del world.outputs["a"]
    world.ask("a", [9])
    world.run_to_the_end()
    assert world.tokens("a") == sampled(8, [9])
    assert world.tokens("b") == sampled(8)
    world.check_nothing_is_held()


def test_a_failed_step_ends_its_own_requests_alone():
    world = Pipelined(2)
    world.ask("a")
    world.pipeline.turn()
    world.ask("b")
    world.pipeline.turn()
    world.stages.fail_next(EngineError("the kernel broke"))
    world.run_to_the_end()
    assert world.finish("a").status_code == 500
    assert world.tokens("b") == sampled(8)
    world.check_nothing_is_held()


def test_a_failed_chunk_ends_its_prompt_whose_later_chunks_are_for_nobody():
    world = Pipelined(3, token_budget=4, page_size=4, prefix=False)
    world.ask("a", range(40))
    world.pipeline.turn()
    world.stages.fail_next(EngineError("the kernel broke"))
    world.end_and_turn()
    assert world.finish("a").status_code == 500
    assert world.cache.pages.available() < world.cache.pages.num_pages
    world.check()
    world.ask("b")
    world.run_to_the_end()
    assert world.tokens("b") == sampled(8)
    world.check_nothing_is_held()


def test_a_step_that_cannot_begin_fails_without_being_in_flight():
    world = Pipelined()
    begin, refused = world.stages.begin, []

    def begin_or_refuse(plan: StepPlan):
        if not refused:
            refused.append(plan)
            raise EngineError("no such page")
        return begin(plan)

    world.stages.begin = begin_or_refuse
    world.ask("a")
    world.pipeline.turn()
    assert world.finish("a").status_code == 500
    assert not world.pipeline.in_flight
    world.ask("b")
    world.run_to_the_end()
    assert world.tokens("b") == sampled(8)
    world.check_nothing_is_held()


def test_nobody_gives_way_before_the_pipeline_has_run_empty():
    # Two pages of four tokens each at the beginning: after three more tokens one of them must go.
    world = Pipelined(2, num_pages=4, page_size=4, num_reserved_decode_tokens=1, prefix=False)
    for rid in "ab":
        world.ask(rid, max_new_tokens=9)
    retraction, num_in_flight = world.running.retraction, []
    retract = retraction.retract

    def watched(request, now):
        num_in_flight.append(len(world.pipeline.in_flight))
        retract(request, now)

    retraction.retract = watched
    world.run_to_the_end()
    assert num_in_flight == [0]
    assert world.tokens("a") == world.tokens("b") == sampled(9)
    world.check_nothing_is_held()


@pytest.mark.parametrize("history", [{"frequency_penalty": 0.5}, {"grammar": multiples(3, 5)}])
def test_who_needs_its_last_token_keeps_nobody_from_the_pipeline(history):
    world = Pipelined(2)
    world.ask("a", **history)
    world.pipeline.turn()
    world.ask("b")
    for _ in range(6):
        world.pipeline.turn()
        assert len(world.pipeline.in_flight) == 2
        world.end_step()
    world.run_to_the_end()
    assert world.tokens("b") == sampled(8)
    assert len(world.tokens("a")) in (5, 8)


def test_messages_are_heard_however_short_the_steps_are():
    world = Pipelined(2)
    begin, thread = world.stages.begin, world._engine_thread

    def begin_at_once(plan: StepPlan):
        # Whatever was begun before has ended by now.
        thread.finish_all()
        return begin(plan)

    world.stages.begin = begin_at_once
    for rid in "ab":
        world.ask(rid, max_new_tokens=1000)
    world.pipeline.turn()
    world.submit(AbortRequest(rid="a"))
    for _ in range(3):
        world.pipeline.turn()
    assert world.finish("a").reason == "aborted"


def test_a_micro_batch_has_draft_tokens_while_others_are_in_flight():
    right = RandomProposer(random.Random(0), 1.0, moody=False)
    world = Pipelined(2, proposer=right, num_draft_tokens=3)
    for rid in "abcd":
        world.ask(rid, max_new_tokens=9)
        world.pipeline.turn()
    assert world.in_flight() == [["a"], ["b"]]
    world.end_and_turn()
    world.end_and_turn()
    assert [len(step.batch.plan.requests[0].token_ids) for step in world.pipeline.in_flight] == [4, 4]
    world.run_to_the_end()
    for rid in "abcd":
        assert world.tokens(rid) == sampled(9)
    state = world.scheduler.state()
    # One token comes with the prompt, and four with each of two steps.
    assert state.spec_decode_num_accepted_tokens_total == state.spec_decode_num_draft_tokens_total == 4 * 6
    world.check_nothing_is_held()


def test_an_abort_in_the_middle_of_a_step_costs_no_page_of_its_draft_tokens():
    world = Pipelined(2, proposer=RandomProposer(random.Random(0), 0.5, moody=False), page_size=1, prefix=False)
    for rid in "ab":
        world.ask(rid, max_new_tokens=30)
    for _ in range(4):
        world.pipeline.turn()
        world.end_step()
    world.pipeline.turn()
    world.submit(AbortRequest(rid="a"))
    world.run_to_the_end()
    assert world.finish("a").reason == "aborted"
    assert world.tokens("b") == sampled(30)
    world.check_nothing_is_held()
