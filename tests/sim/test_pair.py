"""Prefill and decode together, in every order the seeds come up with: right tokens, one end each, nothing kept."""

import random

import pytest
from msgspec.structs import replace

from splitserve.core.config import DisaggregationConfig
from splitserve.core.errors import EngineError
from splitserve.core.messages import AbortRequest
from splitserve.core.request import FinishType
from splitserve.core.sampling import ResolvedSampling
from splitserve.transfer.metadata import MetadataBuffers
from support.fake_engine import HIDDEN_SIZE, expected_hidden_states, expected_tokens
from support.pair import PairWorld

GREEDY = ResolvedSampling(max_new_tokens=8, temperature=0.0)


@pytest.mark.parametrize("seed", range(10))
def test_a_handed_over_request_continues_as_if_it_had_never_moved(seed):
    world = PairWorld(seed, prefill_settings={"token_budget": 24})
    prompt = list(range(100))
    world.submit("a", prompt, GREEDY, room=1)
    world.run_until_idle()
    assert world.decode.tokens("a") == expected_tokens(prompt, GREEDY, 8)
    assert world.prefill.tokens("a") == world.decode.tokens("a")[:1]
    assert world.decode.fake_engine.step_sizes == [1] * 7, "decode ran a forward pass for the prompt"
    assert max(world.prefill.fake_engine.step_sizes) == 24
    world.check_nothing_is_held()


def test_whole_pages_travel_before_the_prompt_is_finished():
    world = PairWorld(0, prefill_settings={"token_budget": 32})
    world.submit("a", list(range(160)), GREEDY, room=1)
    while not world.data.busy_sessions():
        world.happen()
    assert world.prefill.tokens("a") == []
    assert len(world.prefill.fake_engine.step_sizes) < 5


def test_cached_tokens_and_the_first_logprob_travel_with_the_metadata():
    world = PairWorld(3)
    prompt = list(range(64))
    for rid, room in (("cold", 1), ("warm", 2)):
        world.submit(rid, prompt, GREEDY, room=room, return_logprob=True)
        world.run_until_idle()
    assert (world.decode.cached("cold"), world.decode.cached("warm")) == (0, 48)
    logprobs = [lp for output in world.decode.outputs["warm"] for lp in output.logprobs]
    assert [lp.token_id for lp in logprobs] == world.decode.tokens("warm")


def test_a_request_without_the_hidden_state_that_decode_needs_fails_alone():
    world = PairWorld(3, prefill_settings={"hidden_size": HIDDEN_SIZE}, decode_settings={"hidden_size": HIDDEN_SIZE})
    world.submit("a", [1, 2, 3], GREEDY, room=1, return_hidden_states=True)
    # As if its prefill worker got another request.
    world.prefill.inbox.messages = [replace(m, return_hidden_states=False) for m in world.prefill.inbox.messages]
    world.submit("b", [1, 2, 3], GREEDY, room=2, return_hidden_states=True)
    world.run_until_idle()
    assert world.decode.finish("a").type is FinishType.ABORT
    assert "no hidden state of the prompt" in world.decode.finish("a").message
    assert world.decode.hidden_states("b") == expected_hidden_states([1, 2, 3], world.decode.tokens("b"))
    assert world.prefill.hidden_states("b") == []
    world.check_nothing_is_held()


def kv_bytes(world: PairWorld, rid: str) -> int:
    """Of the request's pages that were written, without its metadata row."""
    (stats,) = [output.transfer for output in world.prefill.outputs[rid] if output.transfer is not None]
    return stats.num_bytes - MetadataBuffers(1).row_bytes


def test_a_conversation_moves_only_the_pages_of_its_new_tokens():
    world = PairWorld(8, prefill_settings={"num_pages": 512}, decode_settings={"num_pages": 512})
    page_size, page_bytes = 16, world.decode.engine.bytes_per_page
    talks = {f"talk {i}": [100 + i] * (20 + i) for i in range(8)}
    for turn in range(10):
        computed = dict.fromkeys(talks, 0) if turn == 0 else {name: len(tokens) - 1 for name, tokens in talks.items()}
        for number, (name, tokens) in enumerate(talks.items()):
            # The user's next message.
            tokens += [turn, number, 7, 7, 7] * (1 + number)
            world.submit(f"{name}, {turn}", list(tokens), GREEDY, room=1 + turn * len(talks) + number)
        world.run_until_idle()
        for name, tokens in talks.items():
            rid = f"{name}, {turn}"
            # Decode has the KV of all tokens of the turn before but the last one it drew, and keeps whole pages.
            held = computed[name] // page_size
            assert kv_bytes(world, rid) == (len(tokens) - held * page_size) * page_bytes // page_size
            assert world.decode.tokens(rid) == expected_tokens(tokens, GREEDY, 8)
            tokens += world.decode.tokens(rid)
    world.check_nothing_is_held()


def test_without_a_prefix_cache_on_decode_whole_prompts_move():
    world = PairWorld(8, decode_settings={"prefix": False})
    for room in (1, 2):
        world.submit(f"r{room}", list(range(64)), GREEDY, room=room)
        world.run_until_idle()
    assert kv_bytes(world, "r1") == kv_bytes(world, "r2") == 4 * world.decode.engine.bytes_per_page


def test_a_request_of_one_token_ends_with_the_hand_over():
    world = PairWorld(1)
    world.submit("a", [1, 2, 3], ResolvedSampling(max_new_tokens=1, temperature=0.0), room=1)
    world.run_until_idle()
    assert world.decode.finish("a").type is FinishType.LENGTH
    assert world.decode.fake_engine.step_sizes == []


def test_a_prompt_decode_cannot_hold_is_refused_on_both_sides():
    world = PairWorld(2, decode_settings={"num_pages": 4})
    world.submit("a", list(range(100)), GREEDY, room=1)
    world.run_until_idle()
    assert world.decode.finish("a").status_code == 400
    assert world.prefill.finish("a").type is FinishType.ABORT
    world.check_nothing_is_held()


def test_a_room_used_twice_is_a_conflict_and_the_first_goes_on():
    world = PairWorld(4)
    world.submit("a", list(range(50)), GREEDY, room=1)
    world.submit("b", list(range(50)), GREEDY, room=1)
    world.run_until_idle()
    assert world.decode.finish("b").status_code == world.prefill.finish("b").status_code == 409
    assert world.decode.tokens("a") == expected_tokens(range(50), GREEDY, 8)
    world.check_nothing_is_held()


def test_a_prompt_given_up_after_its_hand_over_is_remembered_all_the_same():
    world = PairWorld(7)
    prompt = list(range(64))
    world.submit("cold", prompt, GREEDY, room=1)
    while not world.prefill.scheduler.state().num_prefill_inflight_queue_reqs:
        world.happen()
    # Decode has its answer, and its router leaves, before the prefill scheduler polls the finished transfer.
    while world.decode.finish("cold") is None:
        world.decode.turn()
        world.prefill.manager.tick()
        world.decode.manager.tick()
        for pair in world.control.busy():
            world.control.deliver(pair)
        for session in world.data.busy_sessions():
            world.data.run_one(session)
    world.prefill.submit(AbortRequest(rid="cold", quiet=True))
    world.run_until_idle()
    world.submit("warm", prompt, GREEDY, room=2)
    world.run_until_idle()
    assert world.decode.cached("warm") == 48
    world.check_nothing_is_held()


def test_tokens_in_transfer_are_pre_allocated_and_those_that_wait_for_pages_are_not():
    world = PairWorld(3, decode_settings={"num_pages": 4})
    for room in (1, 2):
        world.submit(str(room), list(range(50)), GREEDY, room=room)
    while (state := world.decode.scheduler.state()).num_decode_transfer_queue_reqs == 0:
        assert state.num_tokens_pre_allocated == 0
        world.happen()
    assert state.num_decode_prealloc_queue_reqs == 1
    assert state.num_tokens_pre_allocated == 50
    world.run_until_idle()
    assert world.decode.scheduler.state().num_tokens_pre_allocated == 0


def test_an_engine_failure_on_prefill_reaches_the_client_of_decode():
    world = PairWorld(5)
    world.prefill.fake_engine.fail_next(EngineError("the kernel broke"))
    world.submit("a", list(range(50)), GREEDY, room=1)
    world.run_until_idle()
    assert "the kernel broke" in world.decode.finish("a").message
    assert world.decode.finish("a").status_code == 500
    world.check_nothing_is_held()


def test_a_prompt_that_fails_alone_in_its_step_fails_alone_on_both_sides():
    world = PairWorld(4)
    for room, rid in enumerate(("bad", "good"), start=1):
        world.submit(rid, list(range(40)), GREEDY, room=room)
    world.prefill.fake_engine.fail_request("bad", "the logits are not numbers")
    world.run_until_idle()
    for side in (world.prefill, world.decode):
        assert "the logits are not numbers" in side.finish("bad").message
    assert world.decode.tokens("good") == expected_tokens(range(40), GREEDY, 8)
    world.check_nothing_is_held()


@pytest.mark.parametrize("seed", range(10))
def test_a_request_with_the_id_of_one_with_leased_pages_is_served(seed):
    world = PairWorld(seed)
    world.submit("a", list(range(100)), GREEDY, room=1)
    while not world.data.busy_sessions():
        world.happen()
    for worker in (world.prefill, world.decode):
        worker.submit(AbortRequest(rid="a", quiet=True))
        worker.turn()
        assert worker.scheduler.state().pages_leased == 7
    prompt = list(range(50, 170))
    world.submit("a", prompt, GREEDY, room=2)
    world.run_until_idle()
    assert world.decode.tokens("a") == expected_tokens(prompt, GREEDY, 8)
    world.check_nothing_is_held()


def test_a_half_that_never_comes_ends_the_other_by_its_deadline():
    world = PairWorld(6, config=DisaggregationConfig(bootstrap_timeout=30.0))
    world.submit("a", list(range(50)), GREEDY, room=1)
    world.decode.inbox.messages.clear()
    for _ in range(20):
        for _ in range(100):
            world.happen()
        world.clock.advance(2.0)
    world.run_until_idle()
    finish = world.prefill.finish("a")
    assert (finish.type, finish.status_code, finish.reason) == (FinishType.ABORT, 504, "deadline_exceeded")
    world.check_nothing_is_held()


def random_lives(seed: int) -> None:
    rng = random.Random(seed)
    page_size = rng.choice([1, 4, 16])
    world = PairWorld(
        seed,
        prefill_settings={
            "num_pages": rng.choice([24, 100]),
            "page_size": page_size,
            "token_budget": rng.choice([3, 16, 256]),
            "max_running": rng.choice([1, 8]),
            "hidden_size": HIDDEN_SIZE,
        },
        decode_settings={
            "num_pages": rng.choice([24, 100]),
            "page_size": page_size,
            "max_running": rng.choice([2, 8]),
            "hidden_size": HIDDEN_SIZE,
        },
        num_slots=rng.choice([1, 3, 16]),
    )
    longest = min(world.prefill.longest, world.decode.longest)
    asked: dict[str, tuple[list[int], ResolvedSampling]] = {}
    aborted: set[str] = set()
    for i in range(12):
        prompt = [rng.randrange(3) for _ in range(rng.randrange(1, longest))]
        params = ResolvedSampling(max_new_tokens=rng.randrange(1, 12), temperature=rng.choice([0.0, 1.0]), seed=i)
        world.submit(f"r{i}", prompt, params, room=i, return_hidden_states=True)
        asked[f"r{i}"] = prompt, params
        for _ in range(rng.randrange(60)):
            world.happen()
        if rng.random() < 0.4:
            victim = rng.choice(list(asked))
            aborted.add(victim)
            world.abort(victim, *rng.sample([world.prefill, world.decode], rng.randrange(1, 3)))
        world.prefill.check()
        world.decode.check()
    world.run_until_idle()
    for rid, (prompt, params) in asked.items():
        finish, got = world.decode.finish(rid), world.decode.tokens(rid)
        assert finish is not None
        assert world.prefill.finish(rid) is not None
        room = world.decode.longest - len(prompt)
        expected = expected_tokens(prompt, params, min(params.max_new_tokens, room))
        assert got == expected[: len(got)]
        assert world.decode.hidden_states(rid) == expected_hidden_states(prompt, got)
        if finish.type is FinishType.ABORT:
            assert rid in aborted
        else:
            assert got == expected
    world.check_nothing_is_held()


@pytest.mark.parametrize("seed", range(40))
def test_random_lives_in_random_order_end_right(seed):
    random_lives(seed)
