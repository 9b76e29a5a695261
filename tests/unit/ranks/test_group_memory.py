"""Ranks of one model release their memory and get new weights: all of them, or none."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import transformers
from safetensors.torch import load_file, save_file

from splitserve.core.config import ModelConfig
from splitserve.core.errors import ConfigError, EngineError, RanksLostError
from splitserve.core.memory import MemoryTag, WeightsSource
from splitserve.engine.build import BuiltEngine
from splitserve.engine.memory import BuiltEngineMemory
from splitserve.ranks.group_memory import GroupMemory, exchange_over, outcome_of, take_step
from splitserve.ranks.group_orders import ChangeMemory, RankMemoryStep, encode_order, group_order_in
from support.rank_world import (
    RANK_SHAPE,
    RankCase,
    RankChange,
    RankOutcome,
    RankProcesses,
    RankWork,
    on_one_rank,
    save_random_model,
)

KV, WEIGHTS = MemoryTag.KV_CACHE, MemoryTag.WEIGHTS
ALL = frozenset(MemoryTag)
CONFIG = transformers.LlamaConfig(**RANK_SHAPE)
PROMPTS = tuple(tuple(np.random.default_rng(1).integers(0, 131, n).tolist()) for n in (1, 5, 17, 40))
WORK = RankWork(prompts=PROMPTS)
LOST_WEIGHT = "model.layers.0.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def processes() -> Iterator[RankProcesses]:
    with RankProcesses(4) as started:
        yield started


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Return two models with equal shapes and different weights."""
    folders = [tmp_path_factory.mktemp("model") / "m" for _ in range(2)]
    for seed, folder in enumerate(folders):
        save_random_model(CONFIG, folder, seed)
    return folders


@pytest.fixture(scope="module")
def expected(models: list[Path]) -> list[RankOutcome]:
    """Return the outcomes of one rank with either model."""
    old, new = (on_one_rank(folder, WORK) for folder in models)
    assert old.tokens != new.tokens
    return [old, new]


@pytest.fixture
def broken(models: list[Path], tmp_path: Path) -> Path:
    """Return a checkpoint without a weight that, of pipeline stages, only the first one reads: a follower."""
    folder = tmp_path / "broken"
    folder.mkdir()
    for path in models[1].iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    weights = load_file(folder / "model.safetensors")
    del weights[LOST_WEIGHT]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def run(processes: RankProcesses, case: RankCase, tmp_path: Path) -> RankOutcome:
    outcomes = processes.run(case, tmp_path / "ranks")
    assert [o.error for o in outcomes] == [""] * case.num_ranks
    return next(outcome for outcome in outcomes if outcome.tokens)


def check_equal(found: RankOutcome, expected: RankOutcome) -> None:
    assert found.tokens == expected.tokens
    for ours, theirs in zip(found.logprobs, expected.logprobs, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=2e-4)


SHAPES = pytest.mark.parametrize(("tp_size", "pp_size"), [(2, 1), (1, 2), (2, 2)])


@SHAPES
@pytest.mark.parametrize("has_draft", [False, True], ids=["alone", "draft"])
def test_all_ranks_compute_with_the_new_weights(
    processes: RankProcesses,
    models: list[Path],
    expected: list[RankOutcome],
    tmp_path: Path,
    tp_size: int,
    pp_size: int,
    has_draft: bool,
) -> None:
    case = RankCase(
        folder=str(models[0]),
        draft_folder=str(models[0]) if has_draft else None,
        tp_size=tp_size,
        pp_size=pp_size,
        work=WORK if not has_draft else RankWork(prompts=PROMPTS, num_draft_tokens=3),
        changes=(RankChange(tags=ALL), RankChange(model=str(models[1])), RankChange(tags=frozenset({WEIGHTS}))),
    )
    driver = run(processes, case, tmp_path)
    assert driver.refusals == ["", "", ""]
    check_equal(driver, expected[1])


@SHAPES
def test_weights_that_one_rank_cannot_load_change_no_rank(
    processes: RankProcesses,
    models: list[Path],
    expected: list[RankOutcome],
    broken: Path,
    tmp_path: Path,
    tp_size: int,
    pp_size: int,
) -> None:
    misfit = tmp_path / "misfit"
    other_shape = transformers.LlamaConfig(**(CONFIG.to_dict() | {"intermediate_size": 96}))
    save_random_model(other_shape, misfit)
    changes = (RankChange(model=str(broken)), RankChange(model=str(misfit)), RankChange(tags=frozenset({KV})))
    case = RankCase(folder=str(models[0]), tp_size=tp_size, pp_size=pp_size, work=WORK, changes=changes)
    driver = run(processes, case, tmp_path)
    assert LOST_WEIGHT in driver.refusals[0]
    assert ("pp 0 of 2 could not load its part of the model" in driver.refusals[0]) == (pp_size > 1)
    assert "it differs in the shape of" in driver.refusals[1]
    assert driver.refusals[2] == ""
    check_equal(driver, expected[0])


class FakeRank:
    """Memory of one rank with weights that are a name. It fails in the steps of `fails`."""

    def __init__(self) -> None:
        self.weights, self.next, self.old = "old", "", ""
        self.released: frozenset[MemoryTag] = frozenset()
        self.fails: dict[str, Exception] = {}

    @property
    def fingerprint(self) -> str:
        return self.weights

    @property
    def has_next(self) -> bool:
        return bool(self.next)

    @property
    def state(self) -> str:
        return f"{self.weights} {self.next} {sorted(self.released)}"

    def folder_of(self, source: WeightsSource) -> None: ...

    def own(self, folder: None) -> None: ...

    def load_from(self, model: str, *, is_shared_memory: bool) -> None:
        self._fail("load")
        self.next = model

    def use(self) -> None:
        self._fail("use")
        self.weights, self.next, self.old = self.next, "", self.weights

    def undo(self) -> None:
        self._fail("undo")
        if self.old:
            self.weights, self.next, self.old = self.old, self.weights, ""

    def confirm(self) -> None:
        self._fail("confirm")
        self.old = ""

    def discard(self) -> None:
        self._fail("discard")
        self.next = ""

    def release(self, tags: frozenset[MemoryTag]) -> None:
        self._fail("release")
        self.released |= tags

    def resume(self, tags: frozenset[MemoryTag]) -> None:
        self._fail("resume")
        self.released -= tags

    def _fail(self, step: str) -> None:
        if step in self.fails:
            raise self.fails[step]


class FakeGroup:
    """A driver and two followers in one thread. A follower executes an order when the outcomes are exchanged."""

    def __init__(self) -> None:
        self.ranks = [FakeRank() for _ in range(3)]
        self.orders: list[ChangeMemory] = []
        self.memory = GroupMemory(cast("BuiltEngineMemory", self.ranks[0]), self.send, self.exchange)

    def send(self, data: bytes) -> None:
        order = group_order_in(data)
        assert isinstance(order, ChangeMemory)
        self.orders.append(order)

    def exchange(self, own: str, _step: RankMemoryStep) -> list[str]:
        followers = cast("list[BuiltEngineMemory]", self.ranks[1:])
        return [own, *(outcome_of(rank, take_step(rank, self.orders[-1])) for rank in followers)]

    def check_equal(self, weights: str, released: frozenset[MemoryTag] = frozenset()) -> None:
        for rank in self.ranks:
            assert (rank.weights, rank.next, rank.released) == (weights, "", released)


@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize("error", [ConfigError("no such file"), RuntimeError("no such file")])
@pytest.mark.parametrize("step", ["load", "use"])
def test_after_a_failure_of_one_rank_all_have_the_old_weights(rank: int, error: Exception, step: str) -> None:
    group = FakeGroup()
    group.ranks[rank].fails[step] = error

    def update() -> None:
        group.memory.load(WeightsSource("new"))
        group.memory.use()

    with pytest.raises((ConfigError, EngineError), match="no such file"):
        update()
    group.memory.discard()
    group.check_equal("old")
    group.ranks[rank].fails.clear()
    update()
    group.memory.confirm()
    group.check_equal("new")


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_memory_that_one_rank_cannot_resume_stays_released_on_all(rank: int) -> None:
    group = FakeGroup()
    group.memory.release(ALL)
    group.ranks[rank].fails["resume"] = EngineError("no memory")
    with pytest.raises(EngineError, match="no memory"):
        group.memory.resume(ALL)
    group.check_equal("old", ALL)
    group.ranks[rank].fails.clear()
    group.memory.resume(ALL)
    group.check_equal("old")


def test_ranks_that_read_different_files_do_not_use_them() -> None:
    group = FakeGroup()
    group.ranks[2].load_from = lambda model, **_: setattr(group.ranks[2], "next", "newer")  # type: ignore[method-assign]
    with pytest.raises(EngineError, match="different weights after the step load: a file of the checkpoint changed"):
        group.memory.load(WeightsSource("new"))
    group.check_equal("old")


@pytest.mark.parametrize("failure", ["undo", "lost", "send"])
def test_ranks_that_cannot_go_back_end_the_worker(failure: str, monkeypatch: pytest.MonkeyPatch) -> None:
    group = FakeGroup()
    group.memory.load(WeightsSource("new"))
    fails: dict[str, Any] = {"use": EngineError("a bug")}
    if failure == "undo":
        fails["undo"] = EngineError("another bug")
    elif failure == "lost":
        fails["use"] = RanksLostError("out of step")
    else:

        def send(data: bytes) -> None:
            raise EngineError("rank 1 does not take its orders")

        monkeypatch.setattr(group.memory, "_send", send)
    group.ranks[1].fails.update(fails)
    with pytest.raises(RanksLostError):
        group.memory.use()


def test_no_order_is_sent_to_discard_nothing() -> None:
    # Requests may run, and the ranks exchange nothing but their steps.
    group = FakeGroup()
    group.memory.discard()
    assert group.orders == []


def test_orders_of_a_group_are_told_from_steps() -> None:
    order = ChangeMemory(RankMemoryStep.RELEASE, ALL)
    assert group_order_in(encode_order(order)) == order
    assert group_order_in(b"\xc1\x95") is None
    assert group_order_in(b"\x95") is None
    with pytest.raises(EngineError, match="cannot be read"):
        group_order_in(b"\xc1\xc1\x95")


def test_ranks_wait_for_loads_longer_than_for_other_steps() -> None:
    waits: dict[str, float] = {}

    def texts(own: str, timeout: float) -> list[str]:
        waits[own] = timeout
        return [own]

    engine = SimpleNamespace(ranks=SimpleNamespace(texts=texts), config=ModelConfig(load_timeout=400.0))
    exchange = exchange_over(cast("BuiltEngine", engine))
    for step in RankMemoryStep:
        exchange(step, step)
    loads = {RankMemoryStep.LOAD, RankMemoryStep.RESUME}
    # The model, and its draft.
    assert waits == {step: 800.0 if step in loads else 300.0 for step in RankMemoryStep}
