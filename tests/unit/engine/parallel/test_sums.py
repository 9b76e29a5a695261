"""Sums over ranks: bits that do not depend on the number of rows. Ranks are threads with a process group each."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist

from splitserve.core.parallel import ParallelRank
from splitserve.engine.parallel.ranks import Ranks

SIZE = 96
TIMEOUT = datetime.timedelta(seconds=60)


def on_ranks(num_ranks: int, call: Callable[[Ranks, int], torch.Tensor]) -> list[torch.Tensor]:
    """Return the result of `call` on each rank."""
    store = dist.HashStore()

    def run(index: int) -> torch.Tensor:
        group = dist.ProcessGroup(store, index, num_ranks)
        gloo = dist.ProcessGroup.BackendType.GLOO
        group._set_default_backend(gloo)
        backend = dist.ProcessGroupGloo(store, index, num_ranks, TIMEOUT)
        group._register_backend(torch.device("cpu"), gloo, backend)
        rank = ParallelRank(tp_rank=index, tp_size=num_ranks)
        result = call(Ranks(rank, torch.device("cpu"), [group], store), index)
        # No rank closes its connections while another rank still waits for it.
        group.barrier().wait()
        return result

    with ThreadPoolExecutor(num_ranks) as pool:
        return list(pool.map(run, range(num_ranks)))


def part(index: int, num_rows: int, dtype: torch.dtype) -> torch.Tensor:
    """Return a rank's rows. Numbers of several magnitudes, so that the order of a sum changes its last bits."""
    generator = torch.Generator().manual_seed(index)
    rows = torch.randn(6000, SIZE, generator=generator) * torch.exp(torch.randn(6000, SIZE, generator=generator))
    return rows[:num_rows].to(dtype)


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_sum_does_not_depend_on_the_number_of_rows(num_ranks: int, dtype: torch.dtype) -> None:
    # With the largest number each rank adds a part.
    sums = {
        n: on_ranks(num_ranks, lambda ranks, index, n=n: ranks.sum(part(index, n, dtype))) for n in (1, 3, 64, 6000)
    }
    for found in sums.values():
        for values in found:
            assert torch.equal(values, sums[6000][0][: len(values)])
    exact = sum(part(index, 64, dtype).double() for index in range(num_ranks))
    torch.testing.assert_close(sums[64][0].double(), exact, rtol=0.01, atol=0.1)


@pytest.mark.parametrize("num_ranks", [3, 4])
def test_shares_of_a_sum_have_the_bits_of_the_sum(num_ranks: int) -> None:
    num_rows = 12
    whole = on_ranks(num_ranks, lambda ranks, index: ranks.sum(part(index, num_rows, torch.bfloat16)))[0]
    shares = on_ranks(num_ranks, lambda ranks, index: ranks.sum_share(part(index, num_rows, torch.bfloat16)))
    assert torch.equal(torch.cat(shares), whole)
