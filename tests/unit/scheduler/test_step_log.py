"""Records of steps: what was computed together, why other requests waited, and a bounded ring of them."""

from __future__ import annotations

from splitserve.core.batch import RequestStep, StepPlan
from splitserve.core.messages import GenerateRequest, StepsReply, StepsRequest
from splitserve.core.request import Request
from splitserve.core.sampling import ResolvedSampling
from splitserve.core.steps import MAX_RIDS, MAX_STEPS, StepRecord, WaitReason
from splitserve.scheduler.running import ScheduledBatch, StepPeriod
from splitserve.scheduler.step_log import StepLog
from support.sim import ColocatedWorld


def submit(world: ColocatedWorld, rid: str, num_prompt_tokens: int, max_new_tokens: int = 8) -> None:
    params = ResolvedSampling(max_new_tokens=max_new_tokens, temperature=0.0)
    world.submit(GenerateRequest(rid=rid, prompt_ids=list(range(num_prompt_tokens)), params=params))


def steps_of(world: ColocatedWorld, since: int | None = None, limit: int = 1000) -> list[StepRecord]:
    world.submit(StepsRequest(call_id=1, since=since, limit=limit))
    world.scheduler.receive()
    reply = world.replies[-1]
    assert isinstance(reply, StepsReply)
    assert reply.page.clock.monotonic == world.clock.now()
    return reply.page.steps


def test_a_step_has_its_kind_its_tokens_and_its_requests():
    world = ColocatedWorld(token_budget=32)
    submit(world, "a", 40)
    world.turn()
    world.turn()
    # Its first page is cached.
    submit(world, "b", 20)
    world.turn()
    first, second, third = steps_of(world)
    assert (first.number, first.kind, first.num_prompt_tokens, first.num_decodes) == (1, "prefill", 32, 0)
    assert (second.kind, second.num_prompt_tokens, second.chunk_limit) == ("prefill", 8, 32)
    assert (third.kind, third.num_prompt_tokens, third.num_decodes) == ("mixed", 4, 1)
    assert (third.num_requests, third.num_running, third.rids) == (2, 2, ["a", "b"])
    world.run_until_idle()
    last = steps_of(world)[-1]
    assert (last.kind, last.num_prompt_tokens, last.chunk_limit, last.reason) == ("decode", 0, 0, WaitReason.NONE)


def test_a_full_step_is_the_reason_of_a_wait():
    world = ColocatedWorld(token_budget=16)
    submit(world, "a", 16)
    submit(world, "b", 16)
    world.turn()
    (step,) = steps_of(world)
    assert (step.reason, step.num_waiting) == (WaitReason.BUDGET, 1)


def test_a_full_running_batch_is_the_reason_of_a_wait():
    world = ColocatedWorld(max_running=1)
    submit(world, "a", 16)
    submit(world, "b", 16)
    world.turn()
    world.turn()
    assert [step.reason for step in steps_of(world)] == [WaitReason.MAX_RUNNING] * 2
    assert world.scheduler.state().waiting_reason == "max_running"
    world.run_until_idle()
    assert world.scheduler.state().waiting_reason == ""


def test_a_full_pool_is_the_reason_of_a_wait():
    world = ColocatedWorld(num_pages=4, page_size=16)
    submit(world, "a", 40, max_new_tokens=4)
    submit(world, "b", 40, max_new_tokens=4)
    world.turn()
    (step,) = steps_of(world)
    assert (step.reason, step.rids) == (WaitReason.KV_POOL, ["a"])


def test_a_page_begins_after_a_number_or_has_the_last_steps():
    world = ColocatedWorld()
    submit(world, "a", 4, max_new_tokens=10)
    world.run_until_idle()
    assert [step.number for step in steps_of(world)] == list(range(1, 11))
    assert [step.number for step in steps_of(world, limit=3)] == [8, 9, 10]
    assert [step.number for step in steps_of(world, since=2, limit=3)] == [3, 4, 5]
    assert steps_of(world, since=10) == []
    assert steps_of(world, limit=0) == []


def test_memory_is_bounded():
    log = StepLog()
    requests = tuple(Request(f"r{i}", [1], ResolvedSampling()) for i in range(MAX_RIDS + 10))
    plan = StepPlan(tuple(RequestStep(request.rid, 0, [1], 0) for request in requests))
    for number in range(MAX_STEPS + 10):
        log.add(ScheduledBatch(plan, requests), number, StepPeriod(0.0, 1.0), 1, 0)
    page = log.page(None, MAX_STEPS * 2, 0.0)
    assert len(page.steps) == MAX_STEPS
    assert page.steps[0].number == 10
    assert (page.steps[0].num_requests, len(page.steps[0].rids)) == (MAX_RIDS + 10, MAX_RIDS)
