"""Workers change their roles at random moments of random lives: every token is right, nothing is lost, nothing kept."""

from __future__ import annotations

import random

import pytest

from splitserve.core.errors import EngineError
from splitserve.core.messages import AbortRequest, GenerateRequest, RoleReply, RoleRequest, RoleStep
from splitserve.core.request import DisaggregationMode, FinishType
from splitserve.core.sampling import ResolvedSampling
from support.fake_engine import expected_tokens
from support.switching import DECODE, NULL, PREFILL, SwitchingWorker, SwitchWorld

GREEDY = ResolvedSampling(max_new_tokens=8, temperature=0.0)


def check_tokens(world: SwitchWorld, rid: str, prompt: list[int], params: ResolvedSampling) -> None:
    worker = world.served[rid][-1]
    finish = worker.finish(rid)
    assert finish is not None
    assert finish.type is not FinishType.ABORT, (rid, finish)
    assert worker.tokens(rid) == expected_tokens(prompt, params, params.max_new_tokens), rid


def can_leave(world: SwitchWorld, worker: SwitchingWorker) -> bool:
    """Return whether another worker could serve meanwhile."""
    rest = [w.mode for w in world.workers if w is not worker and w.takes_requests and w.goal is None]
    return NULL in rest or (PREFILL in rest and DECODE in rest)


@pytest.mark.parametrize("late", [False, True], ids=["normal", "overlapped"])
@pytest.mark.parametrize("seed", range(6))
def test_no_request_notices_that_roles_change(seed: int, late: bool) -> None:
    # With a small pool decode workers request KV again from prefill workers, which may have changed their role.
    tight = seed % 2 == 0
    memory = {"num_pages": 12, "num_reserved_decode_tokens": 1, "host_memory": 0} if tight else {}
    world = SwitchWorld(seed, [PREFILL, PREFILL, DECODE, DECODE, NULL], late=late, **memory)
    rng = random.Random(seed)
    requests: dict[str, tuple[list[int], ResolvedSampling]] = {}
    aborted: set[str] = set()
    # Some prompts begin alike, so that what one role has cached another one finds.
    heads = [list(range(k, k + 48)) for k in (0, 200, 400)]
    for number in range(60):
        rid = f"r{number}"
        prompt = rng.choice(heads) + [rng.randrange(512) for _ in range(rng.randrange(1, 40))]
        seeded = ResolvedSampling(max_new_tokens=rng.randrange(1, 100 if tight else 40), temperature=1.0, seed=number)
        if world.submit(rid, prompt, seeded):
            requests[rid] = prompt, seeded
        if rng.random() < 0.1:
            aborted.add(rid)
            for worker in world.served.get(rid, ()):
                worker.submit(AbortRequest(rid=rid))
        worker = rng.choice(world.workers)
        if worker.goal is None and can_leave(world, worker):
            worker.fails = rng.random() < 0.1
            world.begin_switch(worker, rng.choice([PREFILL, DECODE, NULL]))
        for _ in range(rng.randrange(200 if tight else 400)):
            world.happen()
    world.run_until_idle()
    world.check_nothing_is_held()
    assert sum(w.num_switches for w in world.workers) > 3
    assert len(requests) > 50
    for rid, (prompt, params) in requests.items():
        if rid not in aborted:
            check_tokens(world, rid, prompt, params)


def switch(world: SwitchWorld, worker: SwitchingWorker, goal: DisaggregationMode) -> None:
    world.begin_switch(worker, goal)
    for _ in range(200_000):
        world.happen()
        if worker.goal is None:
            break
    # It may be given up by the world's whim.
    if worker.mode is not goal:
        switch(world, worker, goal)


def test_what_a_role_has_cached_the_next_one_finds() -> None:
    world = SwitchWorld(1, [PREFILL, DECODE])
    decode = world.workers[1]
    prompt = list(range(64))
    assert world.submit("cold", prompt, GREEDY)
    world.run_until_idle()
    switch(world, decode, NULL)
    assert world.submit("warm", prompt, GREEDY)
    world.run_until_idle()
    assert world.served["warm"] == [decode]
    assert decode.cached("warm") == 48
    check_tokens(world, "warm", prompt, GREEDY)
    world.check_nothing_is_held()


def order(worker: SwitchingWorker, step: RoleStep, **more: object) -> None:
    worker.submit(RoleRequest(call_id=1, step=step, **more))  # type: ignore[arg-type]


def answer(worker: SwitchingWorker) -> RoleReply | None:
    worker.turn()
    replies, worker.replies = worker.replies, []
    assert len(replies) < 2
    (reply,) = replies or (None,)
    assert reply is None or isinstance(reply, RoleReply)
    return reply


def colocated(prompt: list[int], params: ResolvedSampling = GREEDY) -> GenerateRequest:
    return GenerateRequest(rid=f"r{prompt[0]}", prompt_ids=prompt, params=params)


def test_a_draining_worker_takes_nothing_and_goes_on_where_the_deadline_comes_first() -> None:
    world = SwitchWorld(0, [NULL])
    (worker,) = world.workers
    worker.submit(colocated([1, 2, 3], ResolvedSampling(max_new_tokens=50, temperature=0.0)))
    order(worker, RoleStep.DRAIN, timeout=1.0)
    reply = answer(worker)
    assert reply is not None
    assert "no role has been prepared" in reply.error
    order(worker, RoleStep.PREPARE, mode=DECODE)
    assert answer(worker) == RoleReply(call_id=1)
    order(worker, RoleStep.PREPARE, mode=PREFILL)
    reply = answer(worker)
    assert reply is not None
    assert "another switch" in reply.error
    order(worker, RoleStep.DRAIN, timeout=1.0)
    assert answer(worker) is None
    order(worker, RoleStep.COMMIT)
    reply = answer(worker)
    assert reply is not None
    assert "drained" in reply.error
    worker.submit(colocated([7, 8]))
    assert answer(worker) is None
    finish = worker.finish("r7")
    assert finish is not None
    assert finish.status_code == 503
    world.clock.advance(1.5)
    reply = answer(worker)
    assert reply is not None
    assert reply.status_code == 504
    # Its old role takes requests again; the one that ran has noticed nothing.
    worker.submit(colocated([9, 8]))
    while not worker.is_idle():
        worker.turn()
    assert worker.tokens("r9") == expected_tokens([9, 8], GREEDY, 8)
    assert len(worker.tokens("r1")) == 50
    order(worker, RoleStep.CANCEL)
    assert answer(worker) == RoleReply(call_id=1)
    assert world.managers == []
    world.check_nothing_is_held()


def test_a_role_that_cannot_be_installed_leaves_the_old_one_in_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    world = SwitchWorld(0, [NULL])
    (worker,) = world.workers
    order(worker, RoleStep.PREPARE, mode=PREFILL)
    assert answer(worker) == RoleReply(call_id=1)
    order(worker, RoleStep.DRAIN, timeout=1.0)
    assert answer(worker) == RoleReply(call_id=1)

    def fail(*_: object) -> None:
        raise EngineError("no memory for its graphs")

    monkeypatch.setattr("splitserve.scheduler.parts.SchedulerParts.install", fail)
    order(worker, RoleStep.COMMIT)
    reply = answer(worker)
    assert reply is not None
    assert reply.error == "no memory for its graphs"
    order(worker, RoleStep.CANCEL)
    assert answer(worker) == RoleReply(call_id=1)
    worker.submit(colocated([1, 2, 3]))
    while not worker.is_idle():
        worker.turn()
    assert worker.tokens("r1") == expected_tokens([1, 2, 3], GREEDY, 8)
    world.check_nothing_is_held()


def test_a_drained_prefill_worker_lets_decode_workers_wait_until_it_has_changed_or_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = SwitchWorld(0, [PREFILL])
    (worker,) = world.workers
    asked = 0

    def take_requested() -> list[object]:
        nonlocal asked
        asked += 1
        return []

    monkeypatch.setattr(worker.managers[0], "take_requested_prompts", take_requested)
    order(worker, RoleStep.PREPARE, mode=NULL)
    assert answer(worker) == RoleReply(call_id=1)
    order(worker, RoleStep.DRAIN, timeout=1.0)
    assert answer(worker) == RoleReply(call_id=1)
    before = asked
    worker.turn()
    assert asked == before > 0
    order(worker, RoleStep.CANCEL)
    assert answer(worker) == RoleReply(call_id=1)
    assert asked == before + 1
