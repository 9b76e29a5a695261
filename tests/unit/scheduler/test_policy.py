"""The order in which waiting requests run, and what a deadline does to them."""

import pytest

from splitserve.core.config import SchedulePolicy
from splitserve.core.messages import GenerateRequest
from splitserve.core.request import PROBE_PRIORITY, FinishType
from splitserve.core.sampling import ResolvedSampling
from splitserve.scheduler.admission import AGEING
from support.pair import PairWorld
from support.sim import ColocatedWorld


def ask(rid, prompt, **more) -> GenerateRequest:
    return GenerateRequest(rid=rid, prompt_ids=list(prompt), params=ResolvedSampling(max_new_tokens=2), **more)


def world_of(policy, **settings) -> ColocatedWorld:
    return ColocatedWorld(policy=policy, max_running=1, num_pages=200, **settings)


def order_of_ends(world) -> list[str]:
    ended: list[str] = []
    for _ in range(500):
        world.turn()
        ended += [rid for rid in world.outputs if world.finish(rid) and rid not in ended]
        if world.is_idle():
            return ended
    raise AssertionError("still busy")


def test_first_come_is_first_served():
    world = world_of(SchedulePolicy.FCFS)
    for rid, length in (("a", 50), ("b", 9), ("c", 30)):
        world.submit(ask(rid, range(length), priority=length))
    assert order_of_ends(world) == ["a", "b", "c"]


def test_the_shortest_prompt_goes_first():
    world = world_of(SchedulePolicy.SPF)
    for rid, length in (("a", 50), ("b", 9), ("c", 30)):
        world.submit(ask(rid, range(length)))
    assert order_of_ends(world) == ["b", "c", "a"]


@pytest.mark.parametrize(("later_by", "order"), [(990 / AGEING, ["short", "long"]), (1010 / AGEING, ["long", "short"])])
def test_a_long_prompt_grows_short_with_age(later_by, order):
    world = world_of(SchedulePolicy.SPF)
    world.submit(ask("first", range(5)))
    world.submit(ask("long", range(1010)))
    world.turn()
    world.clock.advance(later_by)
    world.submit(ask("short", range(10)))
    assert order_of_ends(world)[1:] == order


def test_the_longest_cached_prefix_goes_first():
    world = world_of(SchedulePolicy.LPM)
    world.submit(ask("warm-up", range(64)))
    world.run_until_idle()
    world.submit(ask("cold", range(100, 164)))
    world.submit(ask("half", [*range(32), *range(200, 232)]))
    world.submit(ask("warm", range(64)))
    assert order_of_ends(world)[1:] == ["warm", "half", "cold"]


@pytest.mark.parametrize(("heeds", "order"), [(True, ["c", "b", "a"]), (False, ["a", "b", "c"])])
def test_a_larger_priority_goes_first_where_it_is_heeded(heeds, order):
    world = world_of(SchedulePolicy.FCFS, has_priorities=heeds)
    for rid, priority in (("a", -1), ("b", 0), ("c", 5)):
        world.submit(ask(rid, range(20), priority=priority))
    assert order_of_ends(world) == order


@pytest.mark.parametrize("policy", SchedulePolicy)
def test_a_probe_goes_first_and_counts_in_no_limit_whatever_the_policy(policy):
    world = world_of(policy, max_queued=3)
    for rid in "abc":
        world.submit(ask(rid, range(20)))
    world.submit(ask("probe", range(30, 32), priority=PROBE_PRIORITY))
    assert order_of_ends(world)[0] == "probe"
    assert world.finish("probe").type is FinishType.LENGTH


def test_a_probe_does_not_wait_for_retracted_requests():
    # Both requests grow to 8 of the 10 pages.
    world = ColocatedWorld(num_pages=10, page_size=4, num_reserved_decode_tokens=1)
    for rid in "ab":
        world.submit(
            GenerateRequest(rid=rid, prompt_ids=[*rid.encode()] * 8, params=ResolvedSampling(max_new_tokens=24))
        )
    while not world.scheduler.state().num_retracted_reqs:
        world.turn()
    world.submit(ask("client", range(2)))
    world.submit(ask("probe", range(2), priority=PROBE_PRIORITY))
    assert order_of_ends(world)[:2] == ["probe", "a"]
    world.check_nothing_is_held()


def test_a_probe_gets_the_first_metadata_row_of_a_prefill_worker():
    world = PairWorld(1, num_slots=1)
    for room, rid in enumerate("abc"):
        world.submit(rid, list(range(60)), ResolvedSampling(max_new_tokens=1), room=room)
    while not world.prefill.scheduler.state().num_prefill_inflight_queue_reqs:
        world.happen()
    world.submit("probe", [0], ResolvedSampling(max_new_tokens=1), room=9, priority=PROBE_PRIORITY)
    while not world.decode.finish("probe"):
        world.happen()
    assert not world.decode.finish("c")
    world.run_until_idle()
    world.check_nothing_is_held()


def test_a_decode_worker_lets_the_important_in_first():
    world = PairWorld(3, decode_settings={"num_pages": 4, "has_priorities": True})
    for room, (rid, priority) in enumerate((("a", 0), ("b", 0), ("dear", 9))):
        world.submit(rid, list(range(60)), ResolvedSampling(max_new_tokens=2), room=room, priority=priority)
    while world.decode.manager.num_peers == 0 or not world.decode.scheduler.state().num_decode_transfer_queue_reqs:
        world.happen()
    world.run_until_idle()
    began = {rid: world.decode.outputs[rid][-1].stages.seconds for rid in ("a", "b", "dear")}
    assert began["dear"]["transfer"] < max(began["a"]["transfer"], began["b"]["transfer"])


@pytest.mark.parametrize("stage", ["waiting", "running"])
def test_a_deadline_ends_a_request_wherever_it_stands(stage):
    world = ColocatedWorld(max_running=1)
    if stage == "waiting":
        world.submit(GenerateRequest(rid="other", prompt_ids=[1], params=ResolvedSampling(max_new_tokens=100)))
    world.submit(GenerateRequest(rid="a", prompt_ids=[1, 2], params=ResolvedSampling(max_new_tokens=100), timeout=5.0))
    world.turn()
    world.clock.advance(4.9)
    world.turn()
    assert world.finish("a") is None
    world.clock.advance(0.2)
    world.turn()
    finish = world.finish("a")
    assert (finish.status_code, finish.reason) == (504, "deadline_exceeded")
    assert "timeout of 5 s" in finish.message
    stages = {"waiting": "waiting", "running": "decoding"}
    assert f"request a ended in stage '{stages[stage]}'" in finish.message
    world.run_until_idle()
    world.check_nothing_is_held()


def test_the_workers_default_timeout_is_for_those_who_name_none():
    world = ColocatedWorld(default_timeout=1.0)
    for rid, timeout in (("default", None), ("own", 60.0)):
        world.submit(
            GenerateRequest(rid=rid, prompt_ids=[1], params=ResolvedSampling(max_new_tokens=50), timeout=timeout)
        )
    world.turn()
    world.clock.advance(2.0)
    world.run_until_idle()
    assert world.finish("default").reason == "deadline_exceeded"
    assert len(world.tokens("own")) == 50


def test_a_deadline_in_a_hand_over_ends_both_sides():
    world = PairWorld(1)
    world.submit("a", list(range(100)), ResolvedSampling(max_new_tokens=50), room=1, timeout=2.0)
    world.prefill.inbox.messages.clear()
    for _ in range(200):
        world.happen()
    assert world.decode.finish("a") is None
    world.clock.advance(2.0)
    world.run_until_idle()
    assert world.decode.finish("a").reason == "deadline_exceeded"
    world.check_nothing_is_held()
