"""Workers release their memory and replace their weights: no KV of old weights is reused, and nothing stays held."""

from __future__ import annotations

import random
from typing import Any

import pytest

from splitserve.core.errors import RanksLostError
from splitserve.core.memory import MemoryStep, MemoryTag, WeightsSource
from splitserve.core.messages import AbortRequest, GenerateRequest, MemoryRequest, RoleReply, RoleRequest, RoleStep
from splitserve.core.request import FinishType
from splitserve.core.sampling import ResolvedSampling
from support.fake_engine import expected_tokens
from support.fake_grammar import HeldPool
from support.switching import DECODE, NULL, PREFILL, SwitchingWorker, SwitchWorld

GREEDY = ResolvedSampling(max_new_tokens=8, temperature=0.0)
PROMPT = list(range(64))
ALL = frozenset(MemoryTag)


def world_of(*modes: Any, seed: int = 1, **settings: Any) -> SwitchWorld:
    return SwitchWorld(seed, list(modes), has_memory=True, **settings)


def call(world: SwitchWorld, worker: SwitchingWorker, message: MemoryRequest | RoleRequest) -> str:
    """Send an order and return the error in its reply; empty: it succeeded."""
    return reply_to(world, worker, message).error


def reply_to(world: SwitchWorld, worker: SwitchingWorker, message: MemoryRequest | RoleRequest) -> RoleReply:
    worker.submit(message)
    for _ in range(200_000):
        # The world handles the replies of workers that switch their roles.
        world.rng.choice(world.workers).turn()
        for manager in world.managers:
            manager.tick()
        world.happen_between(world.rng.randrange(4, 8))
        if worker.replies:
            (reply,), worker.replies = worker.replies, []
            assert isinstance(reply, RoleReply)
            return reply
    raise AssertionError("no reply")


def hold(world: SwitchWorld, worker: SwitchingWorker, timeout: float = 1e9) -> str:
    return call(world, worker, RoleRequest(1, RoleStep.HOLD, timeout=timeout))


def change(world: SwitchWorld, worker: SwitchingWorker, step: MemoryStep, **more: Any) -> str:
    return call(world, worker, MemoryRequest(2, step, **more))


def update(world: SwitchWorld, worker: SwitchingWorker, name: str) -> None:
    assert worker.memory is not None
    if worker.memory.closes_role:
        assert "before the scheduler is drained" in change(world, worker, MemoryStep.LOAD, source=WeightsSource(name))
        assert hold(world, worker) == ""
    assert change(world, worker, MemoryStep.LOAD, source=WeightsSource(name)) == ""
    assert hold(world, worker) == ""
    assert change(world, worker, MemoryStep.UPDATE) == ""


def run(world: SwitchWorld, rid: str, prompt: list[int] = PROMPT) -> SwitchingWorker:
    """Run a request to its end. Return the worker that answers."""
    assert world.submit(rid, prompt, GREEDY)
    world.run_until_idle()
    return world.served[rid][-1]


def check_tokens(world: SwitchWorld, rid: str, weights: int = 0, prompt: list[int] = PROMPT) -> None:
    worker = world.served[rid][-1]
    finish = worker.finish(rid)
    assert finish is not None
    assert finish.type is not FinishType.ABORT, finish
    assert worker.tokens(rid) == expected_tokens(prompt, GREEDY, 8, weights=weights)


@pytest.mark.parametrize("tags", [ALL, {MemoryTag.KV_CACHE}, {MemoryTag.WEIGHTS}])
def test_outputs_after_resume_equal_those_before(tags: frozenset[MemoryTag]) -> None:
    world = world_of(NULL)
    (worker,) = world.workers
    run(world, "before")
    assert hold(world, worker) == ""
    assert change(world, worker, MemoryStep.RELEASE, tags=frozenset(tags)) == ""
    assert worker.memory is not None
    assert worker.memory.released == tags
    assert change(world, worker, MemoryStep.RESUME, tags=ALL) == ""
    run(world, "after")
    for rid in ("before", "after"):
        check_tokens(world, rid)
    # A pool without its content has no prefixes. If only the weights were released, the prefixes are used again.
    assert worker.cached("after") == (0 if MemoryTag.KV_CACHE in tags else 48)
    world.check_nothing_is_held()


def test_a_released_worker_rejects_requests_and_resumes_part_by_part() -> None:
    world = world_of(PREFILL, DECODE)
    _prefill, decode = world.workers
    for worker in world.workers:
        assert hold(world, worker) == ""
        assert change(world, worker, MemoryStep.RELEASE, tags=ALL) == ""
    # No transport has the pool registered.
    assert world.managers == []
    decode.submit(GenerateRequest(rid="early", prompt_ids=PROMPT, params=GREEDY))
    decode.turn()
    finish = decode.finish("early")
    assert finish is not None
    assert "its memory" in str(finish.message)
    for worker in world.workers:
        assert change(world, worker, MemoryStep.RESUME, tags=frozenset({MemoryTag.WEIGHTS})) == ""
        assert worker.managers == []
        assert change(world, worker, MemoryStep.RESUME, tags=frozenset({MemoryTag.KV_CACHE})) == ""
        # A second order is a no-op.
        assert change(world, worker, MemoryStep.RESUME, tags=ALL) == ""
    run(world, "after")
    check_tokens(world, "after")
    world.check_nothing_is_held()


def test_a_change_waits_for_running_requests_and_fails_at_its_deadline() -> None:
    world = world_of(NULL)
    (worker,) = world.workers
    worker.submit(GenerateRequest(rid="long", prompt_ids=PROMPT, params=GREEDY))
    worker.turn()
    assert "still held requests" in hold(world, worker, timeout=0.0)
    assert "before the scheduler is drained" in change(world, worker, MemoryStep.RELEASE, tags=ALL)
    assert worker.finish("long") is None
    assert hold(world, worker) == ""
    assert worker.finish("long") is not None
    assert worker.tokens("long") == expected_tokens(PROMPT, GREEDY, 8)
    assert call(world, worker, RoleRequest(3, RoleStep.CANCEL)) == ""
    run(world, "after")
    check_tokens(world, "after")


def test_aborted_requests_do_not_block_a_change() -> None:
    world = world_of(PREFILL, DECODE)
    _prefill, decode = world.workers
    assert world.submit("long", PROMPT, ResolvedSampling(max_new_tokens=200, temperature=0.0))
    for _ in range(300):
        world.happen()
    for worker in world.workers:
        worker.submit(AbortRequest(rid="long"))
        assert hold(world, worker) == ""
        assert change(world, worker, MemoryStep.RELEASE, tags=ALL) == ""
    finish = decode.finish("long")
    assert finish is not None
    for worker in world.workers:
        assert change(world, worker, MemoryStep.RESUME, tags=ALL) == ""
    run(world, "after")
    check_tokens(world, "after")
    world.check_nothing_is_held()


@pytest.mark.parametrize("closes_role", [False, True])
def test_new_weights_reuse_no_kv_of_the_old_ones(closes_role: bool) -> None:
    world = world_of(NULL, prefix_host_memory=1 << 20, closes_role=closes_role)
    (worker,) = world.workers
    run(world, "old")
    update(world, worker, "7000")
    run(world, "new")
    check_tokens(world, "new", weights=7000)
    assert worker.cached("new") == 0
    assert worker.memory is not None
    assert worker.memory.is_settled
    run(world, "warm")
    assert worker.cached("warm") == 48
    check_tokens(world, "warm", weights=7000)
    world.check_nothing_is_held()


@pytest.mark.parametrize("closes_role", [False, True])
def test_a_pair_refuses_until_both_have_the_new_weights(closes_role: bool) -> None:
    world = world_of(PREFILL, DECODE, closes_role=closes_role)
    prefill, decode = world.workers
    run(world, "old")
    check_tokens(world, "old")
    update(world, prefill, "7000")
    run(world, "between")
    finish = decode.finish("between")
    assert finish is not None
    assert finish.type is FinishType.ABORT
    assert "model" in str(finish.message)
    update(world, decode, "7000")
    run(world, "new")
    check_tokens(world, "new", weights=7000)
    assert decode.cached("new") == 0
    world.check_nothing_is_held()


def test_weights_that_cannot_be_used_change_nothing() -> None:
    world = world_of(NULL, DECODE)
    worker = world.workers[1]
    assert worker.memory is not None
    assert "no model nonsense" in change(world, worker, MemoryStep.LOAD, source=WeightsSource("nonsense"))
    assert change(world, worker, MemoryStep.LOAD, source=WeightsSource("5")) == ""
    assert "before the scheduler is drained" in change(world, worker, MemoryStep.UPDATE)
    assert hold(world, worker) == ""
    worker.fails = True
    assert "no port is left" in change(world, worker, MemoryStep.UPDATE)
    assert worker.memory.fingerprint == "fake-0 draft"
    assert change(world, worker, MemoryStep.DISCARD) == ""
    assert call(world, worker, RoleRequest(3, RoleStep.CANCEL)) == ""
    assert worker.memory.is_settled
    # The old role was never closed.
    assert len(worker.managers) == 1


def test_weights_that_were_discarded_while_they_loaded_do_not_stay() -> None:
    thread = HeldPool()
    world = world_of(NULL, role_thread=thread)
    (worker,) = world.workers
    assert worker.memory is not None
    worker.submit(MemoryRequest(1, MemoryStep.LOAD, source=WeightsSource("5")))
    worker.turn()
    assert change(world, worker, MemoryStep.DISCARD) == ""
    # Nothing is released half before the load ends.
    assert "the load of a failed update is still running" in hold(world, worker)
    assert "in progress (load)" in change(world, worker, MemoryStep.LOAD, source=WeightsSource("6"))
    run(world, "meanwhile")
    check_tokens(world, "meanwhile")
    thread.finish_all()
    worker.turn()
    assert worker.memory.is_settled
    worker.replies.clear()
    # Later weights are kept.
    worker.submit(MemoryRequest(1, MemoryStep.LOAD, source=WeightsSource("7")))
    worker.turn()
    thread.finish_all()
    worker.turn()
    assert not worker.memory.is_settled
    worker.replies.clear()
    assert hold(world, worker) == ""
    assert change(world, worker, MemoryStep.RELEASE, tags=ALL) == ""
    assert worker.memory.is_settled


def test_ranks_that_load_together_discard_nothing_meanwhile() -> None:
    # Their load is an exchange of all ranks, and so is a discard.
    thread = HeldPool()
    world = world_of(NULL, role_thread=thread, closes_role=True)
    (worker,) = world.workers
    assert hold(world, worker) == ""
    worker.submit(MemoryRequest(1, MemoryStep.LOAD, source=WeightsSource("5")))
    worker.turn()
    assert "in progress (load)" in change(world, worker, MemoryStep.DISCARD)
    thread.finish_all()


def test_ranks_that_cannot_open_their_role_with_new_weights_end_the_worker() -> None:
    world = world_of(NULL, DECODE, closes_role=True)
    worker = world.workers[1]
    assert hold(world, worker) == ""
    assert change(world, worker, MemoryStep.LOAD, source=WeightsSource("5")) == ""
    worker.fails = True
    with pytest.raises(RanksLostError, match=r"could not serve with the new weights.*no port is left"):
        change(world, worker, MemoryStep.UPDATE)
    # It was closed before, so that followers never have links for two roles.
    assert worker.managers == []


def test_a_role_that_cannot_be_opened_again_can_be_resumed_later() -> None:
    world = world_of(NULL, PREFILL)
    worker = world.workers[1]
    assert hold(world, worker) == ""
    assert change(world, worker, MemoryStep.RELEASE, tags=ALL) == ""
    worker.fails = True
    assert "no port is left" in change(world, worker, MemoryStep.RESUME, tags=ALL)
    assert change(world, worker, MemoryStep.RESUME, tags=ALL) == ""
    assert worker.role.mode is PREFILL
    assert len(worker.managers) == 1


def test_an_update_resumes_released_weights() -> None:
    world = world_of(NULL)
    (worker,) = world.workers
    run(world, "old")
    assert hold(world, worker) == ""
    assert change(world, worker, MemoryStep.RELEASE, tags=ALL) == ""
    assert change(world, worker, MemoryStep.LOAD, source=WeightsSource("9")) == ""
    assert change(world, worker, MemoryStep.UPDATE) == ""
    assert change(world, worker, MemoryStep.RESUME, tags=frozenset({MemoryTag.KV_CACHE})) == ""
    run(world, "new")
    check_tokens(world, "new", weights=9)
    world.check_nothing_is_held()


@pytest.mark.parametrize("late", [False, True], ids=["normal", "overlapped"])
@pytest.mark.parametrize("seed", range(4))
def test_memory_is_released_and_updated_between_random_lives(seed: int, late: bool) -> None:
    world = world_of(PREFILL, DECODE, seed=seed, late=late, num_pages=24, num_reserved_decode_tokens=1)
    rng, weights = random.Random(seed), 0
    for number in range(30):
        prompts = {f"r{number}-{i}": PROMPT[: rng.randrange(20, 64)] for i in range(4)}
        for rid, prompt in prompts.items():
            assert world.submit(rid, prompt, GREEDY)
            for _ in range(rng.randrange(100)):
                world.happen()
        aborted = set(rng.sample(sorted(prompts), rng.randrange(3)))
        for rid in aborted:
            rng.choice(world.workers).submit(AbortRequest(rid=rid))
        if rng.random() < 0.5:
            # Both drain before either changes: requests of one need the other.
            for worker in world.workers:
                worker.submit(RoleRequest(1, RoleStep.HOLD, timeout=1e9))
            world.run_until_held()
            name = str(rng.randrange(1, 9))
            is_update = rng.random() < 0.5
            for worker in world.workers:
                if is_update:
                    assert change(world, worker, MemoryStep.LOAD, source=WeightsSource(name)) == ""
                    assert change(world, worker, MemoryStep.UPDATE) == ""
                else:
                    assert change(world, worker, MemoryStep.RELEASE, tags=ALL) == ""
                    assert change(world, worker, MemoryStep.RESUME, tags=ALL) == ""
        else:
            is_update, name = False, ""
            world.run_until_idle()
        for rid, prompt in prompts.items():
            if rid not in aborted:
                check_tokens(world, rid, weights, prompt)
        weights = int(name) if is_update else weights
    world.check_nothing_is_held()


def test_the_reply_to_an_update_names_the_model_in_use() -> None:
    world = world_of("null")
    [worker] = world.workers
    assert worker.memory is not None
    assert change(world, worker, MemoryStep.LOAD, source=WeightsSource("1")) == ""
    assert hold(world, worker) == ""
    reply = reply_to(world, worker, MemoryRequest(3, MemoryStep.UPDATE))
    # Without the draft model.
    assert (reply.model, worker.memory.fingerprint) == ("fake-1", "fake-1 draft")
