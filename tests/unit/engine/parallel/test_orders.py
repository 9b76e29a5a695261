"""A driver and its follower in one process, each with the whole model: the same orders make the same KV."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np
import pytest
import torch

from splitserve.core.batch import LAST_SAMPLED, InputLogprobSpec, RequestStep, SampleSpec, StepPlan
from splitserve.core.errors import EngineError, RanksLostError
from splitserve.core.sampling import ResolvedSampling
from splitserve.engine.attention.base import PagedBatch
from splitserve.engine.attention.torch_sdpa import TorchSdpaBackend
from splitserve.engine.loader import LoadedModel
from splitserve.engine.parallel.copies import FollowerCopies, RankCopies
from splitserve.engine.parallel.steps import (
    DraftingFollower,
    FollowerRunner,
    JointOrder,
    JointOrders,
    StepOrder,
    array,
    decode,
    encode,
    marked_as_draft,
    step_order,
)
from splitserve.engine.pool import KVPool, layout_for
from splitserve.engine.probe import LanguageHead
from splitserve.engine.runner import ModelRunner
from support.tiny_models import TinyKind

PAGE_SIZE, NUM_PAGES = 4, 32
GREEDY = ResolvedSampling(temperature=0.0, ignore_eos=True)


class World:
    def __init__(self, loaded: LoadedModel) -> None:
        layout = layout_for(loaded.layers, loaded.dtype_name, page_size=PAGE_SIZE, num_pages=NUM_PAGES)
        self.pools = [KVPool(layout, loaded.device) for _ in range(2)]
        self.table = np.random.default_rng(0).permutation(NUM_PAGES).reshape(2, -1).astype(np.int32)
        self.orders: list[bytes] = []
        self.attentions = [TorchSdpaBackend(pool) for pool in self.pools]
        self.driver = ModelRunner(loaded, self.attentions[0], PAGE_SIZE, self.table, self.orders.append)
        copies = FollowerCopies(RankCopies(self.pools[1]), lambda agrees: agrees)
        self.follower = FollowerRunner(loaded, self.attentions[1], PAGE_SIZE, copies)

    def follow(self) -> None:
        while self.orders:
            self.follower.run(self.orders.pop(0))

    def assert_same_kv(self) -> None:
        ours, theirs = self.pools
        for layer, keys in ours.keys.items():
            assert torch.equal(keys, theirs.keys[layer])
            assert torch.equal(ours.values[layer], theirs.values[layer])


@pytest.fixture
def world(tiny_model: Callable[[TinyKind], LoadedModel]) -> World:
    return World(tiny_model("llama"))


def step(row: int, token_ids: tuple[int, ...], start: int, *, draws: bool = True, scores: int = 0) -> RequestStep:
    prompt = tuple(range(start + len(token_ids)))
    sample = SampleSpec(GREEDY, len(prompt), prompt, ()) if draws else None
    scored = InputLogprobSpec(0, token_ids[1 : 1 + scores]) if scores else None
    return RequestStep(f"r{row}", row, token_ids, start, sample, scored)


def test_a_follower_computes_what_the_driver_does(world: World) -> None:
    world.driver.execute(StepPlan((step(0, (5, 6, 7, 8, 9), 0, scores=3), step(1, (11, 12), 0, draws=False))))
    # Only the driver has the last tokens.
    world.driver.execute(StepPlan((step(1, (13, 14, 15), 2), step(0, (LAST_SAMPLED,), 5))))
    world.driver.execute(StepPlan((step(0, (LAST_SAMPLED,), 6), step(1, (LAST_SAMPLED,), 5))))
    assert len(world.orders) == 3
    world.follow()
    world.assert_same_kv()


def test_orders_of_a_draft_model_are_between_those_of_the_served_one_and_counted_apart(
    world: World, tiny_model: Callable[[TinyKind], LoadedModel]
) -> None:
    draft = World(tiny_model("qwen3"))
    draft.driver = ModelRunner(
        tiny_model("qwen3"), draft.attentions[0], PAGE_SIZE, draft.table, marked_as_draft(world.orders.append)
    )
    both = DraftingFollower(world.follower, draft.follower)
    for start in range(3):
        draft.driver.execute(StepPlan((step(0, (5 + start,), start),)))
        world.driver.execute(StepPlan((step(0, (5 + start,), start),)))
    assert len(world.orders) == 6
    for order in world.orders:
        both.run(order)
    world.assert_same_kv()
    draft.assert_same_kv()
    assert all(pool.keys[0].any() for pool in (*world.pools, *draft.pools))
    with pytest.raises(EngineError, match="order 2 of the driver came where 3"):
        both.run(world.orders[-2])


def test_steps_that_are_begun_are_told_at_once_and_computed_later(world: World) -> None:
    first = world.driver.begin(StepPlan((step(0, (5, 6, 7), 0),)))
    second = world.driver.begin(StepPlan((step(1, (8, 9), 0),)))
    assert len(world.orders) == 2
    # The follower is ahead.
    world.follow()
    assert len(first().requests) == len(second().requests) == 1
    world.assert_same_kv()


def test_a_prepared_step_is_told_when_it_runs(world: World) -> None:
    run = world.driver.prepare(StepPlan((step(0, (5, 6), 0),)))
    assert not world.orders
    run()
    assert len(world.orders) == 1


def test_an_empty_plan_is_told_to_nobody(world: World) -> None:
    assert not world.driver.begin(StepPlan(()))().requests
    assert not world.orders


def test_rows_of_the_head_are_those_of_each_call(world: World) -> None:
    world.driver.execute(StepPlan((step(0, (5, 6, 7, 8), 0, scores=2), step(1, (9, 10), 0))))
    order = decode(world.orders[0])
    assert [array(rows).tolist() for rows in order.head_rows] == [[0, 1], [3, 5]]
    assert array(order.token_ids).tolist() == [5, 6, 7, 8, 9, 10]


def test_a_lost_order_and_one_that_comes_twice_are_noticed(world: World) -> None:
    for _ in range(2):
        world.driver.execute(StepPlan((step(0, (5,), 0),)))
    first, second = world.orders
    with pytest.raises(EngineError, match="order 1 of the driver came where 0"):
        world.follower.run(second)
    world.follower.run(first)
    with pytest.raises(EngineError, match="order 0 of the driver came where 1"):
        world.follower.run(first)


def test_an_order_that_contradicts_itself_is_refused(world: World) -> None:
    world.driver.execute(StepPlan((step(0, (5, 6), 0),)))
    order = decode(world.orders[0])
    for wrong in ({"pages": order.pages * 2}, {"token_ids": order.token_ids * 2}, {"starts": b""}):
        with pytest.raises(EngineError, match="order 0 of the driver"):
            msgspec.structs.replace(order, **wrong).batch(PAGE_SIZE)
    with pytest.raises(EngineError, match="cannot be read"):
        world.follower.run(b"\xc1")


def test_orders_survive_the_wire() -> None:
    plan = StepPlan((step(0, (LAST_SAMPLED,), 4), step(1, (7, 8, 9), 0)))
    batch = PagedBatch(np.array([4, 0]), np.array([1, 3]), (np.array([3, 9]), np.array([1])), PAGE_SIZE)
    order = step_order(6, plan, batch, np.array([42, 0]), [range(1), [3]])
    assert isinstance(order, StepOrder)
    found = decode(encode(order))
    assert isinstance(found, StepOrder)
    assert found == order
    again = found.batch(PAGE_SIZE)
    assert [pages.tolist() for pages in again.pages] == [[3, 9], [1]]
    assert (array(found.token_ids).tolist(), again.starts.tolist()) == ([42, 7, 8, 9], [4, 0])
    joint = JointOrder((3, 0, 17))
    assert decode(encode(joint)) == joint


def test_the_order_of_a_joint_step_waits_for_the_other_drivers() -> None:
    sent: list[bytes] = []
    orders = JointOrders(sent.append)
    orders.hold(b"step")
    assert not sent
    orders.release((4, 2))
    # The other driver alone has tokens in the next step.
    orders.release((0, 1))
    assert sent == [encode(JointOrder((4, 2))), b"step", encode(JointOrder((0, 1)))]


def test_a_rank_that_shares_no_experts_refuses_a_joint_step(world: World) -> None:
    with pytest.raises(EngineError, match="shares no experts"):
        world.follower.run(encode(JointOrder((1, 1))))


def test_a_driver_that_fails_in_the_middle_of_a_step_ends_the_worker(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(world.attentions[0], "plan", fails)
    with pytest.raises(RanksLostError, match="out of step: RuntimeError: out of memory"):
        world.driver.execute(StepPlan((step(0, (5, 6), 0),)))


def test_ranks_that_cannot_be_told_end_the_worker(tiny_model: Callable[[TinyKind], LoadedModel]) -> None:
    def fails(_: bytes) -> None:
        raise BrokenPipeError("no peer")

    world = World(tiny_model("llama"))
    driver = ModelRunner(tiny_model("llama"), world.attentions[0], PAGE_SIZE, world.table, fails)
    with pytest.raises(RanksLostError, match="could not be sent a step: BrokenPipeError: no peer"):
        driver.begin(StepPlan((step(0, (5, 6), 0),)))


def test_a_step_that_was_told_to_nobody_fails_alone(world: World) -> None:
    with pytest.raises(EngineError, match="needs 20 pages"):
        world.driver.execute(StepPlan((step(0, tuple(range(80)), 0),)))
    assert not world.orders


def test_what_fails_when_all_ranks_are_done_fails_its_step_alone(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise ValueError("bad parameters")

    monkeypatch.setattr("splitserve.engine.runner.sample_tokens", fails)
    with pytest.raises(EngineError, match="bad parameters"):
        world.driver.execute(StepPlan((step(0, (5, 6), 0),)))
    world.follow()
    monkeypatch.undo()
    world.driver.execute(StepPlan((step(0, (5, 6), 0),)))
    world.follow()
    world.assert_same_kv()


@pytest.mark.parametrize("name", ["score", "sample_tokens"])
def test_a_driver_that_fails_between_calls_of_the_model_makes_the_rest_of_them(
    world: World, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The other ranks would wait in them."""
    calls: list[list[float]] = []
    head = LanguageHead.__call__

    def counted(self: LanguageHead, hidden: torch.Tensor) -> torch.Tensor:
        calls.append(hidden.flatten().tolist())
        return head(self, hidden)

    def fails(*_: object) -> None:
        raise MemoryError("too many at once")

    monkeypatch.setattr(LanguageHead, "__call__", counted)
    monkeypatch.setattr(f"splitserve.engine.runner.{name}", fails)
    # Each row's logits in a call of its own.
    monkeypatch.setattr("splitserve.engine.runner._MAX_LOGITS", 1)
    with pytest.raises(EngineError, match=r"r0, r1\) failed: MemoryError: too many at once"):
        world.driver.execute(StepPlan((step(0, (5, 6, 7, 8), 0, scores=2), step(1, (9, 10), 0))))
    ours, calls[:] = calls[:], []
    world.follow()
    assert len(ours) == 4
    assert ours == calls
    world.assert_same_kv()


def test_a_rank_that_meets_others_in_the_body_alone_is_out_of_step_where_that_fails(
    world: World, tiny_model: Callable[[TinyKind], LoadedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = ModelRunner(tiny_model("llama"), world.attentions[0], PAGE_SIZE, world.table, meets=True)
    plan = StepPlan((step(0, (5, 6), 0),))

    def fails(*_: object) -> None:
        raise RuntimeError("no more")

    with monkeypatch.context() as patch:
        patch.setattr("splitserve.engine.runner.sample_tokens", fails)
        with pytest.raises(EngineError, match="no more"):
            runner.execute(plan)
    with monkeypatch.context() as patch:
        patch.setattr(world.attentions[0], "plan", fails)
        with pytest.raises(RanksLostError, match="out of step: RuntimeError: no more"):
            runner.execute(plan)


def test_a_driver_that_fails_in_a_call_of_the_head_ends_the_worker(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("connection closed by peer")

    monkeypatch.setattr(LanguageHead, "__call__", fails)
    with pytest.raises(RanksLostError, match="out of step: RuntimeError: connection closed by peer"):
        world.driver.execute(StepPlan((step(0, (5, 6), 0),)))
