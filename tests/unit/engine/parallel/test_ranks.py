"""Ranks wait for each other to connect and to load. The error of a timeout names the missing ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from splitserve.core.errors import ConfigError, ModelLoadError, RanksLostError, WorkerUnavailableError
from splitserve.core.parallel import ParallelRank
from splitserve.engine.parallel.ranks import Ranks, open_ranks

DEADLINE = 60.0


def ranks_of(rank: ParallelRank, store: dist.Store) -> Ranks:
    return Ranks(rank, torch.device("cpu"), [None] * rank.pp_size, store)


def load(ranks: Ranks, timeout: float) -> None:
    with ranks.loading(timeout):
        pass


def test_ranks_go_on_when_all_have_loaded() -> None:
    store = dist.HashStore()
    one, *others = ParallelRank(tp_size=2, pp_size=2).group()
    for other in others:
        with pytest.raises(RanksLostError):
            load(ranks_of(other, store), 0.0)
    load(ranks_of(one, store), 60.0)


def test_ranks_wait_for_each_model_that_they_load() -> None:
    store = dist.HashStore()
    ranks = [ranks_of(rank, store) for rank in ParallelRank(tp_size=2).group()]
    with pytest.raises(RanksLostError):
        load(ranks[1], 0.0)
    load(ranks[0], 60.0)
    # The draft model.
    with pytest.raises(RanksLostError, match="Rank tp 1 of 2, pp 0 of 1 had not loaded"):
        load(ranks[0], 0.01)


def test_ranks_load_all_or_none() -> None:
    store = dist.HashStore()
    one, two = (ranks_of(rank, store) for rank in ParallelRank(tp_size=2).group())
    with pytest.raises(ConfigError, match="no such file"), two.loading(60.0):
        raise ConfigError("no such file")
    with pytest.raises(
        ModelLoadError, match=r"Rank tp 1 of 2, pp 0 of 1 could not load its part.*: no such file"
    ) as told:
        load(one, 60.0)
    assert told.value.exit_code == ConfigError.exit_code
    # The next load has nothing to do with it.
    with pytest.raises(RanksLostError):
        load(two, 0.0)
    load(one, 60.0)


def test_who_has_not_loaded_in_time_is_named() -> None:
    store = dist.HashStore()
    first, _, third, _ = ParallelRank(tp_size=2, pp_size=2).group()
    with pytest.raises(RanksLostError):
        load(ranks_of(third, store), 0.0)
    says = r"^Rank tp 1 of 2, pp 0 of 2; rank tp 1 of 2, pp 1 of 2 had not loaded.*raise --load-timeout"
    with pytest.raises(RanksLostError, match=says):
        load(ranks_of(first, store), 0.01)


def test_ranks_exchange_texts_and_those_that_are_missing_are_named() -> None:
    store = dist.HashStore()
    one, two = (ranks_of(rank, store) for rank in ParallelRank(tp_size=2).group())
    other_scheduler = ranks_of(ParallelRank(tp_rank=1, tp_size=2, dp_rank=1, dp_size=2), store)
    for number in range(2):
        for ranks in (two, other_scheduler):
            with pytest.raises(RanksLostError, match="Rank tp 0 of 2, pp 0 of 1 did not answer within 0 s"):
                ranks.texts(f"{ranks.rank.dp_rank} says {number}", 0.0)
        assert one.texts(f"text {number}", DEADLINE) == [f"text {number}", f"0 says {number}"]


def test_who_has_not_come_is_named(tmp_path: Path) -> None:
    says = r"Rank 0 of 2 did not meet.*Rank tp 1 of 2, pp 0 of 1 did not come"
    with pytest.raises(WorkerUnavailableError, match=says):
        open_ranks(ParallelRank(tp_size=2), (tmp_path / "rendezvous").as_uri(), "cpu", timeout=0.1)
    assert not dist.is_initialized()
