"""Draft tokens in a decode's step: they save steps, change no output, and take only what is left over."""

import random

import pytest

from splitserve.core.errors import EngineError
from splitserve.core.messages import GenerateRequest
from splitserve.core.request import FinishType
from splitserve.core.sampling import ResolvedSampling
from support.fake_engine import expected_tokens
from support.fake_grammar import multiples
from support.guesser import RandomProposer
from support.sim import ColocatedWorld


class Wrong:
    """Proposer with draft tokens that are never accepted."""

    def propose(self, steps, rooms):
        return [[600] * room for room in rooms]


class Broken:
    def propose(self, steps, rooms):
        raise EngineError("out of ideas")


def right(accuracy: float = 1.0) -> RandomProposer:
    return RandomProposer(random.Random(4), accuracy, moody=False)


def ask(rid="a", *, tokens=21, prompt=(1, 2, 3), **more) -> GenerateRequest:
    fields = {"return_logprob": more.pop("return_logprob", False)}
    params = ResolvedSampling(max_new_tokens=tokens, temperature=1.0, seed=5, **more)
    return GenerateRequest(rid=rid, prompt_ids=list(prompt), params=params, **fields)


def run(*asked: GenerateRequest, **settings) -> ColocatedWorld:
    world = ColocatedWorld(**settings)
    for request in asked:
        world.submit(request)
    world.run_until_idle()
    world.check_nothing_is_held()
    return world


def test_right_guesses_spare_a_step_each():
    request = ask()
    world = run(request, proposer=right())
    assert world.tokens("a") == expected_tokens(request.prompt_ids, request.params, 21)
    # The prompt's step gives one token, four steps five each.
    assert world.fake_engine.step_sizes == [3, 5, 5, 5, 5]


@pytest.mark.parametrize("proposer", [Wrong(), Broken(), right(0.5), right(0.9)])
def test_whatever_is_guessed_the_answer_and_its_logprobs_are_the_same(proposer):
    request = ask(tokens=40, return_logprob=True)
    world = run(request, proposer=proposer, page_size=2)
    expected = expected_tokens(request.prompt_ids, request.params, 40)
    assert world.tokens("a") == expected
    assert [lp.token_id for output in world.outputs["a"] for lp in output.logprobs] == expected
    assert world.finish("a").type is FinishType.LENGTH


def test_what_comes_after_a_stop_token_is_dropped_although_it_was_accepted():
    request = ask(tokens=40)
    expected = expected_tokens(request.prompt_ids, request.params, 40)
    stop = expected[13]
    assert expected.index(stop) == 13
    world = run(ask(tokens=40, stop_token_ids=(stop,), return_logprob=True), proposer=right(), num_draft_tokens=8)
    assert world.tokens("a") == expected[:14]
    assert (world.finish("a").type, world.finish("a").matched) == (FinishType.STOP, stop)
    assert sum(len(output.logprobs) for output in world.outputs["a"]) == 14


def test_the_pages_of_a_stopped_request_are_remembered_for_tokens_of_its_answer_alone():
    request = ask(tokens=40)
    expected = expected_tokens(request.prompt_ids, request.params, 40)
    settings = {"proposer": right(), "num_draft_tokens": 8, "page_size": 1}
    world = run(ask(tokens=40, stop_token_ids=(expected[13],)), **settings)
    follow_up = ask("b", prompt=[*request.prompt_ids, *expected[:14], 77], tokens=5)
    world.submit(follow_up)
    world.run_until_idle()
    assert world.tokens("b") == expected_tokens(follow_up.prompt_ids, follow_up.params, 5)
    assert world.cached("b") in (16, 17)


def test_a_request_gets_no_guesses_beyond_its_last_token():
    world = run(ask(tokens=4), proposer=right(), num_draft_tokens=30)
    assert world.fake_engine.step_sizes == [3, 3]


def test_guesses_take_what_the_budget_leaves():
    asked = [ask(f"r{i}", tokens=20, prompt=[i] * 9) for i in range(6)]
    world = run(*asked, proposer=right(), token_budget=10)
    assert world.largest_step() == 10
    for request in asked:
        assert world.tokens(request.rid) == expected_tokens(request.prompt_ids, request.params, 20)


@pytest.mark.parametrize("seed", range(20))
def test_nobody_is_retracted_or_kept_waiting_for_a_guess(seed):
    """With rejected draft tokens everything happens when it would without them, also in the smallest pool."""
    rng = random.Random(seed)
    asked = [
        ask(f"r{i}", tokens=rng.randrange(1, 30), prompt=[i] * rng.randrange(1, 20)) for i in range(rng.randrange(2, 9))
    ]
    settings = {"page_size": rng.choice([1, 2, 4]), "num_reserved_decode_tokens": rng.choice([1, 4]), "prefix": False}
    settings |= {"num_pages": -(-rng.choice([50, 70, 100]) // settings["page_size"]), "token_budget": 64}
    speculating = run(*asked, proposer=Wrong(), num_draft_tokens=7, **settings)
    plain = run(*asked, **settings)
    with_drafts, without = speculating.scheduler.state(), plain.scheduler.state()
    assert with_drafts.num_retracted_requests_total == without.num_retracted_requests_total
    assert with_drafts.num_steps_total == without.num_steps_total
    assert {rid: len(outputs) for rid, outputs in speculating.outputs.items()} == {
        rid: len(outputs) for rid, outputs in plain.outputs.items()
    }


def test_pages_taken_for_guesses_are_given_back_before_the_next_plan():
    world = ColocatedWorld(page_size=1, num_pages=64, proposer=Wrong(), num_draft_tokens=7)
    world.submit(ask(tokens=30))
    for _ in range(5):
        world.turn()
    (request,) = world.running.running
    # The pages of its tokens, and those of the step just done.
    assert len(request.pages) == request.num_tokens - 1 + 7
    world.running.speculation.release_unused()
    assert len(request.pages) == request.num_tokens
    world.check()


def test_a_request_with_a_grammar_gets_no_guesses():
    proposer = right()
    world = run(ask(tokens=12, grammar=multiples(4, 6)), proposer=proposer)
    assert len(world.tokens("a")) == 6
    assert max(world.fake_engine.step_sizes[1:]) == 1


def test_steps_guesses_and_what_came_true_are_counted():
    world = run(ask(tokens=21), ask("b", tokens=11, prompt=(4, 5)), proposer=right())
    state = world.scheduler.state()
    assert state.spec_decode_num_drafts_total == 4 + 2
    assert state.spec_decode_num_draft_tokens_total == state.spec_decode_num_accepted_tokens_total == 16 + 8
    stats = world.outputs["b"][-1].speculation
    assert (stats.num_verify_steps, stats.num_proposed_tokens, stats.num_accepted_tokens) == (2, 8, 8)
    wrong = run(ask(tokens=3), proposer=Wrong()).outputs["a"][-1].speculation
    assert (wrong.num_proposed_tokens, wrong.num_accepted_tokens) == (1, 0)


def test_without_speculation_nothing_is_said_of_it():
    assert run(ask()).outputs["a"][-1].speculation is None
