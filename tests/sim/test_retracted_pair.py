"""Decode workers with a full pool: prefill computes KV again, or they do it themselves if it cannot."""

import pytest

from splitserve.core.sampling import ResolvedSampling
from splitserve.transfer.room import RoomLimits
from support.fake_engine import HIDDEN_SIZE, expected_hidden_states, expected_tokens
from support.pair import PairWorld

PAGE = 4
GREEDY = ResolvedSampling(max_new_tokens=24, temperature=0.0)
TIGHT = {"num_pages": 12, "page_size": PAGE, "num_reserved_decode_tokens": 1, "host_memory": 0}
# Forward passes of an answer on decode: prefill makes its first token.
DECODES = GREEDY.max_new_tokens - 1


def prompt_of(rid, length=8) -> list[int]:
    return [ord(rid) + i for i in range(length)]


def pair_world(seed=1, *, prefill=None, decode=None) -> PairWorld:
    """Two requests, "a" and "b", one of which must be retracted."""
    width = {"hidden_size": HIDDEN_SIZE}
    prefill_settings = {"num_pages": 40, "page_size": PAGE, **width} | (prefill or {})
    world = PairWorld(seed, prefill_settings=prefill_settings, decode_settings=TIGHT | width | (decode or {}))
    for room, rid in enumerate("ab"):
        world.submit(rid, prompt_of(rid), GREEDY, room=room, return_logprob=True, return_hidden_states=True)
    return world


def happen_until(world, condition) -> None:
    for _ in range(20_000):
        if condition():
            return
        world.happen()
    raise AssertionError("it did not come to pass")


def has_requested(world) -> bool:
    state = world.decode.scheduler.state()
    return state.num_retracted_requests_total > 0 and state.num_decode_transfer_queue_reqs > 0


def check_outputs(world) -> None:
    for rid in "ab":
        assert world.decode.tokens(rid) == expected_tokens(prompt_of(rid), GREEDY, GREEDY.max_new_tokens)
        logprobs = [lp.token_id for output in world.decode.outputs[rid] for lp in output.logprobs]
        assert logprobs == world.decode.tokens(rid)
        expected = expected_hidden_states(prompt_of(rid), world.decode.tokens(rid))
        assert world.decode.hidden_states(rid) == expected


def check_answers(world) -> None:
    check_outputs(world)
    world.check_nothing_is_held()


def test_without_its_prefill_worker_decode_computes_it_at_once():
    world = pair_world()
    happen_until(world, lambda: all(len(world.decode.tokens(rid)) > 0 for rid in "ab"))
    # The worker ends, and its bootstrap server with it: a lookup has no answer before its deadline.
    world.decode.manager._directory.entries.clear()
    while world.decode.manager.num_peers:
        world.decode.manager.tick()
        world.clock.advance(0.05)
    began = world.clock.now()
    while not world.decode.is_idle():
        world.decode.turn()
        world.decode.manager.tick()
        world.clock.advance(0.05)
        assert world.clock.now() - began < 30.0, "it waits for the lookup"
    assert world.decode.scheduler.state().num_retracted_requests_total > 0
    check_outputs(world)
    world.decode.check_nothing_is_held()


@pytest.mark.parametrize("seed", range(10))
def test_without_room_on_the_host_the_prefill_side_computes_it_again(seed):
    world = pair_world(seed)
    world.run_until_idle()
    check_answers(world)
    assert world.decode.scheduler.state().num_retracted_requests_total > 0
    assert sum(world.decode.fake_engine.step_sizes) == 2 * DECODES, "decode computed a prompt"
    assert sum(world.prefill.fake_engine.step_sizes) > 2 * 8


def test_with_room_on_the_host_the_prefill_side_hears_nothing_of_it():
    world = pair_world(decode={"host_memory": 1 << 20})
    world.run_until_idle()
    check_answers(world)
    assert world.decode.scheduler.state().num_retracted_requests_total > 0
    assert sum(world.decode.fake_engine.step_sizes) == 2 * DECODES
    assert sum(world.prefill.fake_engine.step_sizes) == 2 * 8


@pytest.mark.parametrize("has_priorities", [False, True])
def test_prefill_computes_a_retracted_request_again_before_new_prompts(has_priorities):
    """The prefill worker is saturated by prompts with the priority of the retracted request."""
    settings = {"page_size": PAGE, "has_priorities": has_priorities}
    decode = {"num_pages": 40, "num_reserved_decode_tokens": 1, "host_memory": 0}
    world = PairWorld(1, prefill_settings=settings | {"token_budget": 1}, decode_settings=settings | decode)
    long = ResolvedSampling(max_new_tokens=110, temperature=0.0)
    for room, rid in enumerate("ab"):
        world.submit(rid, [ord(rid)] * 16, long, room=room, priority=1)
    happen_until(world, lambda: has_requested(world))
    num_sent = len(world.decode.tokens("b"))
    count = 0

    def resumes() -> bool:
        nonlocal count
        finished = sum(world.decode.finish(f"s{i}") is not None for i in range(count))
        for i in range(count, finished + 8):
            world.submit(f"s{i}", [i] * 8, ResolvedSampling(max_new_tokens=1), room=100 + i, priority=1)
        count = finished + 8
        assert finished < 4, "new prompts are computed before it"
        return len(world.decode.tokens("b")) > num_sent

    happen_until(world, resumes)
    world.run_until_idle()
    assert world.decode.tokens("b") == expected_tokens([ord("b")] * 16, long, long.max_new_tokens)
    world.check_nothing_is_held()


def test_what_does_not_fit_the_prefill_worker_is_computed_again_on_decode():
    world = pair_world(prefill={"num_pages": 3})
    world.run_until_idle()
    check_answers(world)
    assert sum(world.decode.fake_engine.step_sizes) > 2 * DECODES
    state = world.decode.scheduler.state()
    assert state.num_retracted_recomputed_tokens_total > 0
    assert state.num_retracted_resumed_whole_total == 0


@pytest.mark.parametrize("late_fences", [False, True])
def test_a_session_that_breaks_on_the_way_back_costs_no_token(late_fences):
    world = pair_world(5)
    world.data.late_fences = late_fences
    happen_until(world, lambda: has_requested(world))
    happen_until(world, world.data.busy_sessions)
    world.data.break_session(world.data.busy_sessions()[0])
    world.run_until_idle()
    check_answers(world)
    assert sum(world.decode.fake_engine.step_sizes) > 2 * DECODES


def test_an_abort_on_the_way_back_ends_it_on_both_sides():
    world = pair_world(2)
    happen_until(world, lambda: has_requested(world))
    world.abort("b", world.decode)
    world.run_until_idle()
    assert world.decode.finish("b").status_code == 499
    assert world.decode.tokens("a") == expected_tokens(prompt_of("a"), GREEDY, 24)
    world.check_nothing_is_held()


@pytest.mark.parametrize("end", ["abort", "deadline"])
def test_a_request_whose_pages_are_still_lent_out_can_be_ended(end):
    world = PairWorld(5, prefill_settings={"num_pages": 40, "page_size": PAGE}, decode_settings=TIGHT, late_fences=True)
    for room, rid in enumerate("ab"):
        world.submit(rid, prompt_of(rid), GREEDY, room=room, timeout=30.0)
    happen_until(world, lambda: has_requested(world))
    happen_until(world, world.data.busy_sessions)
    world.data.break_session(world.data.busy_sessions()[0])
    # The manager has cut the session off; no byte of it lands from here on until the fence.
    while not world.decode.scheduler.state().pages_leased:
        world.decode.turn()
        world.decode.manager.tick()
        world.prefill.manager.tick()
        for pair in world.control.busy():
            world.control.deliver(pair)
    if end == "abort":
        world.abort("b", world.decode)
    else:
        world.clock.advance(30.0)
    world.decode.turn()
    assert world.decode.finish("b").status_code == (499 if end == "abort" else 504)
    world.run_until_idle()
    world.check_nothing_is_held()


def test_transfers_go_on_into_extra_rows_while_the_running_set_is_full():
    settings = {"max_running": 1, "pre_alloc_size": 2, "num_reserved_decode_tokens": 8}
    world = PairWorld(3, decode_settings=settings)
    for room, rid in enumerate("abcd"):
        world.submit(rid, prompt_of(rid), ResolvedSampling(max_new_tokens=400, temperature=0.0), room=room)
    happen_until(world, lambda: len(world.decode.running.prebuilt) == 2)
    state = world.decode.scheduler.state()
    # One row is free, for probes.
    assert (state.num_running_reqs, state.rows_free, state.num_decode_prealloc_queue_reqs) == (1, 1, 1)
    assert all(world.decode.tokens(r.rid) for r in world.decode.running.prebuilt), "no first token yet"
    for rid in "abcd":
        world.abort(rid, world.prefill, world.decode)
    world.run_until_idle()
    world.check_nothing_is_held()


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_decode_computes_it_at_once_if_a_room_table_is_full(side):
    world = pair_world()
    happen_until(world, lambda: all(len(world.decode.tokens(rid)) > 0 for rid in "ab"))
    context = getattr(world, side).manager._context
    context.limits = RoomLimits(max_rooms=0)
    began = world.clock.now()
    world.run_until_idle()
    assert world.decode.scheduler.state().num_retracted_requests_total > 0
    assert world.clock.now() - began < context.config.bootstrap_timeout, "it waits for a room that is never opened"
    check_answers(world)
