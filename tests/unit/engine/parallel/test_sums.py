"""Sums over ranks: bits that do not depend on the number of rows. Ranks are threads with a process group each."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist

from splitserve.core.parallel import ParallelRank
from splitserve.engine.parallel.dp_attention import Meeting
from splitserve.engine.parallel.ranks import Ranks, group_rank

SIZE = 96
TIMEOUT = datetime.timedelta(seconds=60)


def process_group(store: dist.Store, index: int, num_ranks: int) -> dist.ProcessGroup:
    group = dist.ProcessGroup(store, index, num_ranks)
    gloo = dist.ProcessGroup.BackendType.GLOO
    group._set_default_backend(gloo)
    group._register_backend(torch.device("cpu"), gloo, dist.ProcessGroupGloo(store, index, num_ranks, TIMEOUT))
    return group


def on_ranks(
    num_ranks: int, call: Callable[[Ranks, int], torch.Tensor], num_groups: int | None = None
) -> list[torch.Tensor]:
    """Return the result of `call` on each rank. `num_groups`: of data parallel attention; None: as many as ranks."""
    store, device = dist.HashStore(), torch.device("cpu")

    def run(index: int) -> torch.Tensor:
        all_ranks = process_group(store, index, num_ranks)
        rank = ParallelRank(tp_rank=index, tp_size=num_ranks)
        own = group_rank(rank, num_groups or num_ranks)
        prefixed = dist.PrefixStore(f"group-{own.dp_rank}", store)
        group = Ranks(own, device, [process_group(prefixed, own.tp_rank, own.tp_size)], store)
        result = call(Ranks(rank, device, [all_ranks], store, group=group), index)
        # No rank closes its connections while another rank still waits for it.
        all_ranks.barrier().wait()
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


@pytest.mark.parametrize(("num_ranks", "num_groups"), [(3, 3), (4, 4), (4, 2), (6, 2)])
def test_results_of_experts_do_not_depend_on_the_tokens_of_any_group(num_ranks: int, num_groups: int) -> None:
    """The bits of a token's sum over the ranks, in groups of any size and beside any number of other tokens."""

    def sums(sizes: list[int]) -> list[torch.Tensor]:
        def call(ranks: Ranks, index: int) -> torch.Tensor:
            assert ranks.group is not None
            meeting = Meeting(ranks, ranks.group)
            meeting.begin(sizes)
            # Each rank has a result for each token of all groups. Those of padding are not numbers.
            is_token = meeting.is_token
            rows = torch.full((len(is_token), SIZE), float("nan"), dtype=torch.bfloat16)
            for i in range(len(sizes)):
                own = rows.chunk(len(sizes))[i]
                own[: sizes[i]] = part(index, sizes[i], torch.bfloat16)
            return meeting.sum_of_own(rows, max(1, sizes[meeting.group.rank.dp_rank]))

        return on_ranks(num_ranks, call, num_groups)

    others = [5] * (num_groups - 2)
    whole = sums([64, 64, *others])[0]
    for sizes in ([1, 64, *others], [64, 1, *others], [7, 0, *others]):
        for index, found in enumerate(sums(sizes)):
            size = sizes[index * num_groups // num_ranks]
            assert torch.equal(found[:size], whole[:size])
            assert not found[size:].any()
