"""A request with output so far continues where that ends, at any token, in a colocated worker and in a pair."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from splitserve.core.batch import TokenLogprob
from splitserve.core.messages import GenerateRequest, TokenOutput
from splitserve.core.request import FinishType
from splitserve.core.sampling import ResolvedSampling
from support.fake_engine import HIDDEN_SIZE
from support.fake_grammar import multiples
from support.pair import PairWorld
from support.sim import ColocatedWorld, SimWorker

PROMPT = list(range(30, 50))
EOS = frozenset(range(0, 512, 9))
LIVES = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 1.0]),
        "seed": st.integers(0, 2**40),
        "max_new_tokens": st.integers(2, 24),
        "ignore_eos": st.booleans(),
        "stop_token_ids": st.sampled_from([(), tuple(range(1, 512, 20))]),
        "grammar": st.sampled_from([None, multiples(3, 7)]),
    }
)


# Tokens, logprobs, hidden states, and the end of a request.
Outcome = tuple[list[int], list[TokenLogprob], list[list[float]], Any]


def outcome(worker: SimWorker, rid: str) -> Outcome:
    outputs: list[TokenOutput] = worker.outputs[rid]
    logprobs = [logprob for output in outputs for logprob in output.logprobs]
    return worker.tokens(rid), logprobs, worker.hidden_states(rid), worker.finish(rid)


def check_every_cut(whole, continued) -> None:
    """`continued(k)`: result of the request with the first k tokens given."""
    tokens, logprobs, states, finish = whole
    assert len(states) == len(tokens)
    assert finish.type is not FinishType.ABORT
    for cut in range(len(tokens)):
        assert continued(cut) == (tokens[cut:], logprobs[cut:], states[cut:], finish), f"cut at {cut} of {len(tokens)}"


@settings(deadline=None, max_examples=25)
@given(LIVES, st.integers(0, 20))
def test_a_colocated_worker_goes_on_with_what_another_began(life: dict[str, Any], min_new: int) -> None:
    params = ResolvedSampling(**life, min_new_tokens=min(min_new, life["max_new_tokens"]))

    def run(output_ids: list[int]) -> Outcome:
        world = ColocatedWorld(eos_token_ids=EOS)
        world.submit(
            GenerateRequest(
                rid="r",
                prompt_ids=PROMPT,
                params=params,
                return_logprob=True,
                return_hidden_states=True,
                output_ids=output_ids,
            )
        )
        world.run_until_idle()
        world.check_nothing_is_held()
        return outcome(world, "r")

    whole = run([])
    check_every_cut(whole, lambda cut: run(whole[0][:cut]))


@settings(deadline=None, max_examples=8)
@given(LIVES, st.integers(0, 2**32))
def test_a_pair_goes_on_with_what_another_began(life: dict[str, Any], seed: int) -> None:
    params = ResolvedSampling(**life, min_new_tokens=1)
    settings = {"eos_token_ids": EOS, "hidden_size": HIDDEN_SIZE}
    wanted = {"return_logprob": True, "return_hidden_states": True}

    def run(output_ids: list[int]) -> Outcome:
        world = PairWorld(seed, prefill_settings=settings, decode_settings=settings)
        world.submit("r", PROMPT, params, room=5, output_ids=output_ids, **wanted)
        world.run_until_idle()
        world.check_nothing_is_held()
        # Prefill makes the first token that is new, and no more.
        assert len(world.prefill.tokens("r")) == 1
        return outcome(world.decode, "r")

    whole = run([])
    check_every_cut(whole, lambda cut: run(whole[0][:cut]))


def test_the_prompts_logprobs_are_those_of_the_prompt_alone() -> None:
    world = ColocatedWorld(prefix=True)
    for rid, given_ids in (("whole", []), ("rest", [7, 8, 9])):
        params = ResolvedSampling(max_new_tokens=6, temperature=0.0)
        world.submit(
            GenerateRequest(
                rid=rid, prompt_ids=PROMPT, params=params, return_logprob=True, logprob_start=0, output_ids=given_ids
            )
        )
    world.run_until_idle()
    assert world.input_logprobs("rest") == world.input_logprobs("whole")
    assert [t.token_id for t in world.input_logprobs("rest")] == PROMPT[1:]


def test_output_that_its_grammar_does_not_allow_is_refused() -> None:
    world = ColocatedWorld()
    params = ResolvedSampling(max_new_tokens=6, grammar=multiples(3, 4))
    world.submit(GenerateRequest(rid="r", prompt_ids=PROMPT, params=params, output_ids=[3, 4]))
    world.run_until_idle()
    finish = world.finish("r")
    assert (finish.status_code, "token 4" in finish.message) == (400, True)


def test_prompt_and_output_that_do_not_fit_are_refused_together() -> None:
    world = ColocatedWorld(num_pages=4, page_size=16)
    params = ResolvedSampling(max_new_tokens=60, ignore_eos=True)
    world.submit(GenerateRequest(rid="r", prompt_ids=PROMPT, params=params, output_ids=[1] * 44))
    world.run_until_idle()
    assert world.finish("r").status_code == 400


@pytest.mark.parametrize("retracts", [False, True])
def test_a_continued_request_may_give_way_and_come_back(retracts: bool) -> None:
    """Two requests in a pool that holds both only at first."""
    world = ColocatedWorld(num_pages=8 if retracts else 64, page_size=8, num_reserved_decode_tokens=1)
    params = ResolvedSampling(max_new_tokens=30, ignore_eos=True)

    def submit(rid: str, output_ids: list[int]) -> None:
        world.submit(GenerateRequest(rid=rid, prompt_ids=PROMPT[:10], params=params, output_ids=output_ids))

    submit("alone", [])
    world.run_until_idle()
    whole = world.tokens("alone")
    for rid in ("a", "b"):
        submit(rid, whole[:5])
    world.run_until_idle()
    assert (world.scheduler.state().num_retracted_requests_total > 0) is retracts
    assert world.tokens("a") == world.tokens("b") == whole[5:]
    world.check_nothing_is_held()
