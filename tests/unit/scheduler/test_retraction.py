"""A null worker with a full pool: which request is retracted, what happens to its KV, which resumes first."""

import pytest

from splitserve.cache.kv_cache import InvariantViolation
from splitserve.core.messages import AbortRequest, GenerateRequest
from splitserve.core.sampling import ResolvedSampling
from support.fake_engine import expected_tokens
from support.sim import ColocatedWorld

PAGE = 4
GREEDY = ResolvedSampling(max_new_tokens=24, temperature=0.0)


def dry_world(**settings) -> ColocatedWorld:
    """Twelve pages: one request of 8 + 24 tokens fits, two do not."""
    defaults = {"num_pages": 12, "page_size": PAGE, "num_reserved_decode_tokens": 1, "prefix": False}
    return ColocatedWorld(**(defaults | settings))


def ask(rid, number_of_prompt_tokens=8, **more) -> GenerateRequest:
    prompt = [ord(rid[0]) + i for i in range(number_of_prompt_tokens)]
    return GenerateRequest(rid=rid, prompt_ids=prompt, params=GREEDY, **more)


def turn_until_retracted(world) -> list[str]:
    for _ in range(200):
        world.turn()
        if line := [r.rid for r in world.running.retraction.requests()]:
            return line
    raise AssertionError("no request was retracted")


def tokens_computed(world) -> int:
    return sum(world.fake_engine.step_sizes)


def test_the_one_with_the_least_work_gives_way_and_both_outputs_are_right():
    world = dry_world()
    world.submit(ask("long", 12))
    world.submit(ask("a", 8))
    world.submit(ask("b", 4))
    assert turn_until_retracted(world) == ["b"]
    world.run_until_idle()
    for rid, length in (("long", 12), ("a", 8), ("b", 4)):
        assert world.tokens(rid) == expected_tokens(ask(rid, length).prompt_ids, GREEDY, 24)
    world.check_nothing_is_held()


def test_the_oldest_never_gives_way_however_little_it_has_done():
    world = dry_world()
    world.submit(ask("old", 1))
    world.submit(ask("young", 20))
    assert turn_until_retracted(world) == ["young"]


def test_the_least_important_gives_way_before_the_one_with_the_least_work():
    world = dry_world(has_priorities=True)
    world.submit(ask("old", 12))
    world.submit(ask("dear", 4, priority=1))
    world.submit(ask("cheap", 8))
    assert turn_until_retracted(world) == ["cheap"]


def test_what_was_copied_is_not_computed_again():
    computed = {}
    for host_memory in (1 << 20, 0):
        world = dry_world(host_memory=host_memory)
        world.submit(ask("a"))
        world.submit(ask("b"))
        turn_until_retracted(world)
        world.run_until_idle()
        assert world.tokens("b") == expected_tokens(ask("b").prompt_ids, GREEDY, 24)
        computed[host_memory] = tokens_computed(world)
        state = world.scheduler.state()
        recomputed = state.num_retracted_recomputed_tokens_total
        # Each token but the last of an answer, once.
        assert computed[host_memory] == 2 * (8 + 24 - 1) + recomputed
        if host_memory:
            assert recomputed == 0
            assert state.num_retracted_resumed_whole_total == state.num_retracted_requests_total
        else:
            assert recomputed > 0
            assert state.num_retracted_resumed_whole_total == 0


def test_the_limit_of_host_memory_is_logged(caplog):
    caplog.set_level("INFO")
    dry_world(host_memory=10 * 8 * PAGE)
    assert "host memory for retracted requests was set limit=320 B tokens=40" in caplog.text


def test_copies_stay_within_the_bound_and_are_forgotten_on_resume():
    page_bytes = 8 * PAGE
    world = dry_world(host_memory=4 * page_bytes)
    world.submit(ask("a"))
    world.submit(ask("b"))
    turn_until_retracted(world)
    state = world.scheduler.state()
    assert (state.num_retracted_reqs, state.num_retracted_requests_total) == (1, 1)
    assert 0 <= state.retraction_host_bytes <= 4 * page_bytes
    world.run_until_idle()
    assert world.scheduler.state().retraction_host_bytes == 0


def test_a_prefix_cache_that_kept_the_pages_spares_the_work():
    world = dry_world(num_pages=14, host_memory=0, prefix=True)
    world.submit(ask("a"))
    world.submit(ask("b"))
    turn_until_retracted(world)
    world.run_until_idle()
    assert world.tokens("b") == expected_tokens(ask("b").prompt_ids, GREEDY, 24)
    assert world.cached("b") == 0, "cached tokens are those of the first admission"
    world.check_nothing_is_held()


def test_nobody_new_runs_while_somebody_waits_to_come_back():
    world = dry_world()
    world.submit(ask("a"))
    world.submit(ask("b"))
    turn_until_retracted(world)
    world.submit(ask("c", 1))
    while world.scheduler.state().num_retracted_reqs:
        world.turn()
        assert world.tokens("c") == [] or world.scheduler.state().num_retracted_reqs == 0
    world.run_until_idle()
    assert len(world.tokens("c")) == 24


def test_an_abort_of_a_retracted_request_forgets_its_copy():
    world = dry_world()
    world.submit(ask("a"))
    world.submit(ask("b"))
    turn_until_retracted(world)
    assert world.scheduler.state().retraction_host_bytes > 0
    world.submit(AbortRequest(rid="b"))
    world.turn()
    assert "stage 'retracted'" in world.finish("b").message
    assert world.scheduler.state().retraction_host_bytes == 0
    world.run_until_idle()
    world.check_nothing_is_held()


def test_logprobs_come_once_though_the_prompt_is_computed_twice():
    world = dry_world(host_memory=0, token_budget=3)
    world.submit(ask("a", return_logprob=True, logprob_start=0))
    world.submit(ask("b", return_logprob=True, logprob_start=2))
    turn_until_retracted(world)
    world.run_until_idle()
    for rid, start in (("a", 1), ("b", 2)):
        assert [lp.token_id for lp in world.input_logprobs(rid)] == ask(rid).prompt_ids[start:]
        logprobs = [lp.token_id for output in world.outputs[rid] for lp in output.logprobs]
        assert logprobs == world.tokens(rid)


def test_a_prompt_retracted_half_way_goes_on_where_it_was():
    world = dry_world(num_pages=8, token_budget=3)
    world.submit(ask("a", 4))
    for _ in range(5):
        world.turn()
    world.submit(ask("slow", 18, return_logprob=True, logprob_start=0))
    assert turn_until_retracted(world) == ["slow"]
    world.run_until_idle()
    assert [lp.token_id for lp in world.input_logprobs("slow")] == ask("slow", 18).prompt_ids[1:]
    assert world.tokens("slow") == expected_tokens(ask("slow", 18).prompt_ids, GREEDY, 14)


def test_a_reserve_of_the_longest_answer_leaves_nobody_to_give_way():
    world = dry_world(num_reserved_decode_tokens=24)
    for rid in "abc":
        world.submit(ask(rid))
    world.run_until_idle()
    assert world.scheduler.state().num_retracted_requests_total == 0
    assert world.largest_step() == 8


def test_a_host_that_is_out_of_memory_costs_work_and_nothing_else():
    world = dry_world()

    def refuse(pages):
        raise MemoryError("none left")

    world.fake_engine.save = refuse
    world.submit(ask("a"))
    world.submit(ask("b"))
    turn_until_retracted(world)
    assert world.scheduler.state().retraction_host_bytes == 0
    world.run_until_idle()
    assert world.tokens("b") == expected_tokens(ask("b").prompt_ids, GREEDY, 24)
    world.check_nothing_is_held()


def test_a_copy_that_nobody_accounts_for_is_caught():
    world = dry_world()
    world.submit(ask("a"))
    world.submit(ask("b"))
    turn_until_retracted(world)
    world.running.retraction.memory.num_bytes -= 1
    with pytest.raises(InvariantViolation, match="bytes of copies"):
        world.check()
