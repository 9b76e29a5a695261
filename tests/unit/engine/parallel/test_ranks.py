"""Ranks wait for each other to connect and to load. The error of a timeout names the missing ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from splitserve.core.errors import RanksLostError, WorkerUnavailableError
from splitserve.core.parallel import ParallelRank
from splitserve.engine.parallel.ranks import Ranks, open_ranks


def ranks_of(rank: ParallelRank, store: dist.Store) -> Ranks:
    return Ranks(rank, torch.device("cpu"), [None] * rank.pp_size, store)


def test_ranks_go_on_when_all_have_loaded() -> None:
    store = dist.HashStore()
    one, *others = ParallelRank(tp_size=2, pp_size=2).group()
    for other in others:
        with pytest.raises(RanksLostError):
            ranks_of(other, store).all_loaded(0.0)
    ranks_of(one, store).all_loaded(60.0)


def test_who_has_not_loaded_in_time_is_named() -> None:
    store = dist.HashStore()
    first, _, third, _ = ParallelRank(tp_size=2, pp_size=2).group()
    with pytest.raises(RanksLostError):
        ranks_of(third, store).all_loaded(0.0)
    says = r"^Rank tp 1 of 2, pp 0 of 2; rank tp 1 of 2, pp 1 of 2 had not loaded.*raise --load-timeout"
    with pytest.raises(RanksLostError, match=says):
        ranks_of(first, store).all_loaded(0.01)


def test_who_has_not_come_is_named(tmp_path: Path) -> None:
    says = r"Rank 0 of 2 did not meet.*Rank tp 1 of 2, pp 0 of 1 did not come"
    with pytest.raises(WorkerUnavailableError, match=says):
        open_ranks(ParallelRank(tp_size=2), (tmp_path / "rendezvous").as_uri(), "cpu", timeout=0.1)
    assert not dist.is_initialized()
