"""The scheduler in the null role, on the fake engine: output is right, nothing leaks, everything ends."""

import random

import pytest
from msgspec.structs import replace

from splitserve.core.errors import EngineError
from splitserve.core.messages import (
    AbortRequest,
    FlushCacheReply,
    FlushCacheRequest,
    GenerateRequest,
    StateReply,
    StateRequest,
)
from splitserve.core.request import FinishType
from splitserve.core.sampling import ResolvedSampling
from support.fake_engine import expected_tokens
from support.sim import ColocatedWorld


def request(rid, prompt, max_new_tokens=8, **more) -> GenerateRequest:
    params = ResolvedSampling(max_new_tokens=max_new_tokens, temperature=0.0, **more)
    return GenerateRequest(rid=rid, prompt_ids=list(prompt), params=params)


def test_one_request_gets_the_engines_tokens():
    world = ColocatedWorld()
    world.submit(request("a", range(1, 40)))
    world.run_until_idle()
    assert world.tokens("a") == expected_tokens(range(1, 40), ResolvedSampling(temperature=0.0), 8)
    assert world.finish("a").type is FinishType.LENGTH
    world.check_nothing_is_held()


def test_outputs_repeat_the_submission_of_their_request():
    world = ColocatedWorld()
    for submission in (4, 5):
        world.submit(replace(request("a", range(submission), max_new_tokens=2), submission=submission))
        world.run_until_idle()
        assert {output.submission for output in world.outputs.pop("a")} == {submission}


def test_a_cached_prefix_changes_nothing_but_the_work_done():
    world = ColocatedWorld()
    for rid in ("cold", "warm"):
        world.submit(request(rid, range(100)))
        world.run_until_idle()
    assert world.tokens("cold") == world.tokens("warm")
    assert (world.cached("cold"), world.cached("warm")) == (0, 96)


def test_a_long_prompt_is_computed_in_chunks_within_the_budget():
    world = ColocatedWorld(token_budget=16)
    world.submit(request("a", range(100)))
    world.run_until_idle()
    assert world.largest_step() == 16
    assert world.tokens("a") == expected_tokens(range(100), ResolvedSampling(temperature=0.0), 8)


def test_decodes_go_on_while_a_long_prompt_is_computed():
    world = ColocatedWorld(token_budget=16)
    world.submit(request("stream", range(4), max_new_tokens=40))
    world.turn()
    world.submit(request("long", range(200), max_new_tokens=1))
    before = len(world.tokens("stream"))
    for _ in range(5):
        world.turn()
    assert len(world.tokens("stream")) == before + 5


def test_stop_ids_and_eos_end_a_request_unless_too_early():
    prompt = list(range(30))
    tokens = expected_tokens(prompt, ResolvedSampling(temperature=0.0), 8)
    world = ColocatedWorld(eos_token_ids=frozenset({tokens[5]}))
    world.submit(request("stop", prompt, stop_token_ids=(tokens[2],)))
    world.submit(request("min", prompt, stop_token_ids=(tokens[2],), min_new_tokens=4))
    world.submit(request("ignore", prompt, ignore_eos=True))
    world.run_until_idle()
    assert world.tokens("stop") == tokens[:3]
    assert world.finish("stop").matched == tokens[2]
    assert world.tokens("min") == tokens[:6]
    assert world.finish("min").matched == tokens[5]
    assert world.tokens("ignore") == tokens


def test_a_prompt_over_the_limit_is_refused_and_the_worker_serves_on():
    world = ColocatedWorld(num_pages=8, page_size=4)
    world.submit(request("long", range(32)))
    world.submit(request("empty", []))
    world.submit(request("ok", range(5), max_new_tokens=1000))
    world.run_until_idle()
    assert world.finish("long").reason == "prompt_too_long"
    assert "32 tokens" in world.finish("long").message
    assert world.finish("empty").status_code == 400
    assert len(world.tokens("ok")) == 32 - 5


def test_a_full_waiting_line_refuses_with_503():
    world = ColocatedWorld(max_running=1, max_queued=2)
    for i in range(4):
        world.submit(request(f"r{i}", range(5)))
    world.run_until_idle()
    assert [world.finish(f"r{i}").status_code for i in range(4)] == [None, None, 503, 503]


def test_an_engine_failure_ends_its_requests_alone():
    world = ColocatedWorld()
    world.submit(request("a", range(9)))
    world.fake_engine.fail_next(EngineError("the kernel broke"))
    world.turn()
    assert world.finish("a").status_code == 500
    assert "the kernel broke" in world.finish("a").message
    world.submit(request("b", range(9)))
    world.run_until_idle()
    assert len(world.tokens("b")) == 8
    world.check_nothing_is_held()


def test_a_request_that_fails_in_a_step_ends_alone():
    world = ColocatedWorld()
    for rid in ("bad", "good"):
        world.submit(request(rid, range(30)))
    world.turn()
    world.fake_engine.fail_request("bad", "the logits are not numbers")
    world.run_until_idle()
    assert world.finish("bad").reason == "engine_error"
    assert "the logits are not numbers" in world.finish("bad").message
    assert world.tokens("good") == expected_tokens(range(30), ResolvedSampling(temperature=0.0), 8)
    world.check_nothing_is_held()


def test_calls_are_answered_with_what_is_held():
    world = ColocatedWorld()
    world.submit(request("a", range(64)))
    world.run_until_idle()
    world.submit(StateRequest(call_id=1))
    world.submit(FlushCacheRequest(call_id=2))
    world.turn()
    state = next(m for m in world.replies if isinstance(m, StateReply)).state
    assert state.pages_free + state.pages_cached == state.pages_total
    assert (state.num_running_reqs, state.num_finished_reqs_total, state.num_invariant_violations_total) == (0, 1, 0)
    flushed = next(m for m in world.replies if isinstance(m, FlushCacheReply))
    assert flushed.num_pages_freed == state.pages_cached > 0


def test_input_logprobs_cover_the_prompt_from_the_start_asked_for():
    world = ColocatedWorld(token_budget=8, page_size=4)
    prompt = list(range(50, 80))
    world.submit(request("warm-up", prompt))
    world.run_until_idle()
    params = ResolvedSampling(max_new_tokens=2, temperature=0.0)
    ask = GenerateRequest(rid="a", prompt_ids=prompt, params=params, return_logprob=True, logprob_start=11)
    world.submit(ask)
    world.run_until_idle()
    assert [lp.token_id for lp in world.input_logprobs("a")] == prompt[11:]
    assert world.cached("a") == 8


@pytest.mark.parametrize("seed", range(30))
def test_random_lives_end_once_with_the_right_tokens_and_leave_nothing(seed):
    rng = random.Random(seed)
    world = ColocatedWorld(
        num_pages=rng.choice([12, 40, 400]),
        page_size=rng.choice([1, 4, 16]),
        token_budget=rng.choice([1, 8, 64, 2048]),
        max_running=rng.choice([1, 3, 64]),
        prefix=rng.random() < 0.7,
    )
    asked, aborted = {}, set()
    for i in range(40):
        prompt = [rng.randrange(3) for _ in range(rng.randrange(1, world.longest - 1))]
        ask = request(f"r{i}", prompt, rng.randrange(1, 30), seed=rng.randrange(9))
        asked[ask.rid] = ask
        world.submit(ask)
        for _ in range(rng.randrange(4)):
            world.turn()
        if rng.random() < 0.33:
            victim = rng.choice(list(asked))
            aborted.add(victim)
            world.submit(AbortRequest(rid=victim, quiet=rng.random() < 0.3))
        world.check()
    world.run_until_idle()
    for rid, ask in asked.items():
        got, finish = world.tokens(rid), world.finish(rid)
        count = min(ask.params.max_new_tokens, world.longest - len(ask.prompt_ids))
        assert got == expected_tokens(ask.prompt_ids, ask.params, count)[: len(got)]
        if finish is None or finish.type is FinishType.ABORT:
            assert rid in aborted
        else:
            assert len(got) == count
    world.check_nothing_is_held()
