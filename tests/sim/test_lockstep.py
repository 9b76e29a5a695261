"""Data parallel ranks that step together: all in the same steps, none left out, none busy without need."""

import random
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from splitserve.core.batch import StepPlan, StepResult
from splitserve.core.errors import EngineError, RanksLostError
from splitserve.core.messages import AbortRequest, GenerateRequest
from splitserve.core.sampling import ResolvedSampling
from splitserve.scheduler.lockstep import Called, Complete, Hub, Joined, LockstepBroken, LockstepEngine, Member
from support.fake_engine import expected_tokens
from support.lockstep import LockstepWorker, LockstepWorld


def ask(worker: LockstepWorker, rid: str, num_prompt_tokens: int = 3, **params) -> GenerateRequest:
    prompt = [(7 * i + sum(rid.encode())) % 512 for i in range(num_prompt_tokens)]
    params = ResolvedSampling(**({"max_new_tokens": 8, "temperature": 0.0} | params))
    message = GenerateRequest(rid=rid, prompt_ids=prompt, params=params)
    worker.submit(message)
    return message


def check_answer(worker: LockstepWorker, m: GenerateRequest) -> None:
    assert worker.tokens(m.rid) == expected_tokens(m.prompt_ids, m.params, m.params.max_new_tokens)


def check_joint_steps(world: LockstepWorld) -> list[tuple[int, ...]]:
    """Return the steps. All ranks were in the same ones, and in each some rank had tokens."""
    joint_steps = world.workers[0].joint_steps
    assert all(worker.joint_steps == joint_steps for worker in world.workers)
    assert all(any(step) for step in joint_steps)
    return joint_steps


def finish(world: LockstepWorld, asked: list[tuple[LockstepWorker, GenerateRequest]]) -> None:
    """Run until all is done, then check steps and answers, and that nothing is held."""
    world.run_until_idle()
    check_joint_steps(world)
    for worker, message in asked:
        check_answer(worker, message)
    for worker in world.workers:
        worker.check_nothing_is_held()


@pytest.mark.parametrize("seed", range(30))
def test_ranks_are_in_the_same_steps_and_every_answer_is_right(seed):
    rng = random.Random(seed)
    world = LockstepWorld(seed, rng.randrange(1, 5), num_pages=200, page_size=4, token_budget=rng.choice([3, 64]))
    asked = []
    for i in range(rng.randrange(1, 12)):
        worker = rng.choice(world.workers)
        asked.append((worker, ask(worker, f"r{i}", rng.randrange(1, 40), max_new_tokens=rng.randrange(1, 20))))
        for _ in range(rng.choice([0, 0, 50, 500])):
            world.happen()
        if rng.random() < 0.2:
            victim, message = asked.pop(rng.randrange(len(asked)))
            victim.submit(AbortRequest(rid=message.rid))
    finish(world, asked)


def test_a_rank_retracts_on_its_own_and_stays_in_the_same_steps():
    num_resumed = 0
    for seed in range(6):
        # A pool for the longest request, and little beside it.
        world = LockstepWorld(seed, 3, num_pages=16, page_size=4, num_reserved_decode_tokens=1, prefix=False)
        workers = [world.workers[0]] * 5 + [world.workers[1]]
        asked = [(worker, ask(worker, f"r{i}", 1 + 5 * i, max_new_tokens=20)) for i, worker in enumerate(workers)]
        finish(world, asked)
        states = [worker.scheduler.state() for worker in world.workers]
        assert [state.num_retracted_recomputed_tokens_total for state in states] == [0, 0, 0]
        assert [state.num_retracted_requests_total for state in states[1:]] == [0, 0]
        num_resumed += states[0].num_retracted_resumed_whole_total
    assert num_resumed >= 6


def test_idle_ranks_take_part_with_nothing_and_those_with_work_are_in_every_step():
    world = LockstepWorld(1, 3, num_pages=50)
    a, b = ask(world.workers[0], "a", 5, max_new_tokens=20), ask(world.workers[2], "b", 2, max_new_tokens=20)
    world.run_until_idle()
    joint_steps = check_joint_steps(world)
    assert all(step[1] == 0 for step in joint_steps)
    # Once both run, no step is without one of them.
    both = [i for i, step in enumerate(joint_steps) if step[0] and step[2]]
    assert len(both) >= 19
    assert both == list(range(both[0], both[-1] + 1))
    check_answer(world.workers[0], a)
    check_answer(world.workers[2], b)


def test_nothing_is_sent_and_nothing_computed_while_all_are_idle():
    world = LockstepWorld(1, 3, num_pages=50)
    ask(world.workers[1], "a")
    world.run_until_idle()
    for _ in range(1000):
        world.happen()
    sent, steps = world.num_messages, len(world.workers[0].joint_steps)
    for _ in range(1000):
        world.happen()
    assert (world.num_messages, len(world.workers[0].joint_steps)) == (sent, steps)


def test_a_rank_that_ends_fails_all_that_wait_for_it():
    world = LockstepWorld(1, 3, num_pages=50)
    for i, worker in enumerate(world.workers):
        ask(worker, f"r{i}", max_new_tokens=40)
    for _ in range(300):
        world.happen()
    lost = world.workers.pop()
    world.post(world.hub.leave(2, "its process ended by signal 9"))
    world.run_until_idle()
    for i, worker in enumerate(world.workers):
        assert worker.finish(f"r{i}").status_code == 500
        assert "rank 2 left the group" in worker.finish(f"r{i}").message
        worker.check_nothing_is_held()
    assert lost.finish("r2") is None


def test_a_rank_whose_part_of_a_step_fails_breaks_the_group():
    world = LockstepWorld(1, 2, num_pages=50)
    ask(world.workers[0], "a", max_new_tokens=40)
    ask(world.workers[1], "b", max_new_tokens=40)
    for _ in range(200):
        world.happen()
    world.workers[0].fake_engine.fail_next(RanksLostError("out of memory"))
    world.run_until_idle()
    assert "out of memory" in world.workers[0].finish("a").message
    assert "rank 0 left the group" in world.workers[1].finish("b").message


def test_a_rank_that_fails_by_itself_in_step_with_the_others_fails_its_own_requests_alone():
    world = LockstepWorld(1, 2, num_pages=50)
    ask(world.workers[0], "a", max_new_tokens=40)
    ask(world.workers[1], "b", max_new_tokens=40)
    for _ in range(200):
        world.happen()
    world.workers[0].fake_engine.fail_next(EngineError("too many to sample"))
    world.run_until_idle()
    assert "too many to sample" in world.workers[0].finish("a").message
    assert len(world.workers[1].tokens("b")) == 40
    ask(world.workers[0], "c", max_new_tokens=5)
    world.run_until_idle()
    assert len(world.workers[0].tokens("c")) == 5


def test_the_hub_refuses_a_rank_that_is_out_of_step():
    hub = Hub(2)
    assert hub.join(Joined(0, 0, 5)) == [(1, Called(0))]
    assert hub.join(Joined(1, 0, 0)) == [(rank, Complete(0, (5, 0))) for rank in range(2)]
    orders = hub.join(Joined(1, 7, 1))
    assert [rank for rank, _ in orders] == [0, 1]
    assert all(isinstance(order, LockstepBroken) and "joined step 7" in order.reason for _, order in orders)
    assert hub.join(Joined(0, 1, 1)) == [(0, orders[0][1])]
    assert hub.leave(0, "again") == []


class Adding:
    """Preparation of joint steps without a model."""

    def prepare(self, plan: StepPlan):
        return lambda num_tokens: StepResult((sum(num_tokens),))


def test_a_step_waits_in_its_thread_until_all_have_joined():
    hub, lock = Hub(3), threading.Lock()
    members: list[Member] = []

    def post(orders) -> None:
        for rank, order in orders:
            members[rank].receive(order)

    def send(message: Joined) -> None:
        with lock:
            orders = hub.join(message)
        post(orders)

    members += [Member(rank, send, lambda reason: None, lambda: None, timeout=60.0) for rank in range(3)]
    engines = [LockstepEngine(Adding().prepare, member) for member in members]
    with ThreadPoolExecutor(3) as pool:
        for _ in range(20):
            assert all(result.requests == (0,) for result in pool.map(lambda e: e.execute(StepPlan(())), engines))


def test_nobody_waits_for_ever_for_a_rank_that_does_not_join():
    left = []
    member = Member(0, lambda message: None, left.append, lambda: None, timeout=0.0)
    with pytest.raises(RanksLostError, match="joined step 0 within 0 s"):
        LockstepEngine(Adding().prepare, member).execute(StepPlan(()))
    assert len(left) == 1
