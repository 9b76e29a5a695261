"""The pipelined loop over stages that take simulated time: every stage has work, and the work is evenly divided."""

from itertools import pairwise

import pytest

from splitserve.core.batch import StepPlan
from splitserve.core.messages import GenerateRequest
from splitserve.core.sampling import ResolvedSampling
from support.fake_engine import expected_hidden_states, expected_tokens
from support.staged_engine import PipelineWorld


def a_second_a_token(plan: StepPlan) -> float:
    return float(plan.num_tokens)


def pipeline(pp_size: int, **settings) -> PipelineWorld:
    return PipelineWorld([a_second_a_token] * pp_size, **{"num_pages": 1000, "has_events": False} | settings)


def ask(world: PipelineWorld, rid: str, num_prompt_tokens: int, max_new_tokens: int, **more) -> GenerateRequest:
    params = ResolvedSampling(max_new_tokens=max_new_tokens, temperature=0.0)
    prompt = [(7 * i + sum(rid.encode())) % 512 for i in range(num_prompt_tokens)]
    message = GenerateRequest(rid=rid, prompt_ids=prompt, params=params, return_hidden_states=True, **more)
    world.submit(message)
    return message


def check_answers(world: PipelineWorld, messages: list[GenerateRequest]) -> None:
    for m in messages:
        assert world.tokens(m.rid) == expected_tokens(m.prompt_ids, m.params, m.params.max_new_tokens)
        assert world.hidden_states(m.rid) == expected_hidden_states(m.prompt_ids, world.tokens(m.rid))
    world.check_nothing_is_held()


def decodes_of(world: PipelineWorld) -> list[int]:
    """Requests of each step of decodes alone."""
    return [len(p.requests) for p in world.stages.plans if all(len(s.token_ids) == 1 for s in p.requests)]


@pytest.mark.parametrize("pp_size", [1, 2, 3, 4])
def test_every_stage_has_work_while_there_are_requests_enough(pp_size):
    world = pipeline(pp_size)
    messages = [ask(world, f"r{i}", 1, 240) for i in range(12)]
    seconds = world.run_to_the_end()
    # Each stage passes all tokens once: 12 x (1 + 239). No stage waits, but when the pipeline fills and runs empty.
    for busy in world.stages.busy:
        assert busy == 12 * 240
        assert busy / seconds > 0.98
    check_answers(world, messages)


@pytest.mark.parametrize("pp_size", [2, 3, 4])
def test_the_slowest_stage_says_how_fast_the_pipeline_is(pp_size):
    slow: list = [lambda plan: 3.0 * plan.num_tokens] + [a_second_a_token] * (pp_size - 1)
    world = PipelineWorld(slow, num_pages=1000, has_events=False)
    messages = [ask(world, f"r{i}", 1, 240) for i in range(12)]
    seconds = world.run_to_the_end()
    assert world.stages.busy[0] / seconds > 0.98
    check_answers(world, messages)


@pytest.mark.parametrize("pp_size", [2, 3, 4])
def test_decodes_are_divided_evenly_and_so_again_when_some_have_ended(pp_size):
    world = pipeline(pp_size)
    # The first half ends early: all those of one micro-batch, and some of another.
    messages = [ask(world, f"r{i}", 1, 20 if i < 12 else 60) for i in range(24)]
    world.run_to_the_end()
    sizes = decodes_of(world)
    begin, end = sizes[2 * pp_size : 10 * pp_size], sizes[-20 * pp_size : -pp_size]
    assert set(begin) == {24 // pp_size}
    assert set(end) == {12 // pp_size}
    check_answers(world, messages)


@pytest.mark.parametrize("pp_size", [1, 2, 4])
def test_one_request_alone_waits_for_nobody(pp_size):
    world = pipeline(pp_size)
    messages = [ask(world, "a", 10, 30)]
    # Ten tokens through all stages, then 29 times one.
    assert world.run_to_the_end() == pp_size * (10 + 29)
    check_answers(world, messages)


@pytest.mark.parametrize("pp_size", [1, 2, 4])
def test_a_long_prompts_chunks_are_in_all_stages_at_a_time(pp_size):
    world = pipeline(pp_size, token_budget=256)
    messages = [ask(world, "a", 16 * 256, 1)]
    assert world.run_to_the_end() == (16 + pp_size - 1) * 256
    check_answers(world, messages)


@pytest.mark.parametrize(
    ("num_tokens", "chunks"), [(100, [100]), (600, [256, 256, 88]), (4000, [1000] * 4), (40_000, [2500] * 16)]
)
def test_a_prompt_is_cut_so_that_all_stages_have_a_part_of_it(num_tokens, chunks):
    world = pipeline(4, num_pages=3000, token_budget=2500)
    messages = [ask(world, "a", num_tokens, 1)]
    world.run_to_the_end()
    assert [p.num_tokens for p in world.stages.plans] == chunks
    check_answers(world, messages)


def test_prompts_that_come_together_are_spread_over_the_micro_batches():
    world = pipeline(2, token_budget=2048)
    messages = [ask(world, f"r{i}", 300, 1) for i in range(4)]
    seconds = world.run_to_the_end()
    assert [p.num_tokens for p in world.stages.plans] == [600, 600]
    assert seconds == 3 * 600
    check_answers(world, messages)


def test_streams_go_on_beside_a_long_prompt():
    world = pipeline(2, token_budget=64)
    streams = [ask(world, f"s{i}", 1, 200) for i in range(2)]
    for _ in range(8):
        world.pipeline.turn()
        world.end_step()
    long = ask(world, "long", 64 * 40, 1)
    world.run_to_the_end()
    with_long = [p for p in world.stages.plans if any(s.rid == "long" for s in p.requests)]
    # A stream is in every second micro-batch, be there a prompt or not.
    alternating = [{s.rid for s in p.requests if s.rid != "long"} for p in with_long]
    assert all(len(rids) == 1 for rids in alternating)
    assert all(a != b for a, b in pairwise(alternating))
    check_answers(world, [*streams, long])


def test_a_deadline_ends_a_request_while_its_steps_are_in_flight():
    world = pipeline(3, token_budget=10, prefix=False)
    late, other = ask(world, "late", 200, 5, timeout=45.0), ask(world, "other", 10, 5)
    world.run_to_the_end()
    assert world.finish(late.rid).status_code == 504
    assert world.tokens(late.rid) == []
    check_answers(world, [other])
