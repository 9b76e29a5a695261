"""Process groups of one scheduler's ranks: the ranks to sum with, to receive from and to send to.

Tensor parallel ranks of a stage exchange data in collectives. Between stages each rank sends to the rank with the same
number, because all ranks of a stage hold the same hidden states. One thread makes all calls, in the same order on every
rank. On the driver `all_agree` may be called by a second thread, while no step runs. Any failure, including the loss of
a peer, raises, and after that the ranks are out of step for good.

With data parallel attention the ranks of all schedulers are one stage, because they share the experts. In it, the ranks
of each scheduler are a group of their own (`Ranks.group`).

A ring begins the sum of each part of a buffer at another rank. So with more than two ranks the last bits of a sum would
depend on its place in the buffer, and on the number of tokens. `in_order` adds in the order of the ranks instead, in
float32: each rank receives all ranks' values and adds them. For a large tensor each rank adds one part, and then all
exchange the sums.
"""

from __future__ import annotations

import datetime
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore
from torch.distributed.rendezvous import rendezvous

from splitserve.core.errors import ModelLoadError, RanksLostError, SplitserveError, WorkerUnavailableError, clause
from splitserve.core.parallel import ParallelRank

# torch 2.13 deprecates the older names; 2.11 has only these.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
# From this many bytes on, each rank adds only one part of a tensor.
_SHARED_BYTES = 1 << 20
# Seconds that a rank waits for the others to join, and later for another rank in a step.
TIMEOUT = 300.0
# Value in the store of a rank that has loaded its share. Other values are errors.
_LOADED = "loaded"


class Ranks:
    """An open group of processes. Call `close` if all are alive."""

    def __init__(
        self,
        rank: ParallelRank,
        device: torch.device,
        stages: Sequence[Any],
        store: Any,
        *,
        in_order: bool = True,
        group: Ranks | None = None,
        all_stages: Any = None,
    ) -> None:
        """`stages`: process group of each stage's ranks. `store`: key-value store shared by all ranks.

        `all_stages`: process group of all ranks of all stages. None: the default group.
        """
        self.rank = rank
        # With data parallel attention: the ranks of this rank's scheduler. Else None.
        self.group = group
        # The sum of two numbers has one order only.
        self._in_order = in_order and rank.tp_size > 2
        self.device = device
        self._all_stages = all_stages
        self._store = store
        # Number of loads of a model that this rank has begun, and of texts that it has exchanged.
        self._num_loads = self._num_texts = 0
        self._stage = stages[rank.pp_rank]
        # Sends in flight, with the tensors that they read.
        self._sends: deque[tuple[Any, torch.Tensor]] = deque()

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sum over the ranks of this stage. All get the same bits. May overwrite `values`."""
        values = values.contiguous()
        if self._in_order:
            is_large = values.numel() * values.itemsize >= _SHARED_BYTES
            return self._sum_by_parts(values) if is_large else _sum_in_order(self.gather(values[None]))
        if self.rank.tp_size > 1:
            dist.all_reduce(values, group=self._stage)
        return values

    def _sum_by_parts(self, values: torch.Tensor) -> torch.Tensor:
        size = -(-values.numel() // self.rank.tp_size)
        padded = _padded(values.view(-1), size * self.rank.tp_size)
        summed = self.gather(self.sum_share(padded))
        return summed[: values.numel()].view_as(values)

    def join(self, part: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        """Join the last dimensions of all ranks of this stage; rank i's `part` is [..., sizes[i]]."""
        padded = _padded(part, max(sizes))
        parts = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(parts, padded, group=self._stage)
        return torch.cat([p[..., :size] for p, size in zip(parts, sizes, strict=True)], dim=-1)

    def join_on_first(self, part: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        """Join the parts as `join` does, on tensor parallel rank 0 only; the others keep their part."""
        padded = _padded(part, max(sizes))
        parts = [torch.empty_like(padded) for _ in sizes] if self.rank.tp_rank == 0 else None
        dist.gather(padded, parts, group=self._stage, group_dst=0)
        if parts is None:
            return part
        return torch.cat([p[..., :size] for p, size in zip(parts, sizes, strict=True)], dim=-1)

    def gather(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the rows of all ranks of this stage, in order of ranks; each rank has equally many."""
        if self.rank.tp_size == 1:
            return rows
        found = rows.new_empty(self.rank.tp_size * len(rows), *rows.shape[1:])
        _all_gather(found, rows.contiguous(), group=self._stage)
        return found

    def sum_share(self, rows: torch.Tensor) -> torch.Tensor:
        """Return this rank's share of the rows of the sum over the ranks of this stage; all have equally many rows."""
        rows = rows.contiguous()
        if self._in_order:
            parts = torch.empty_like(rows)
            dist.all_to_all_single(parts, rows, group=self._stage)
            return _sum_in_order(parts.view(self.rank.tp_size, -1, *rows.shape[1:]))
        found = rows.new_empty(len(rows) // self.rank.tp_size, *rows.shape[1:])
        _reduce_scatter(found, rows, group=self._stage)
        return found

    def send(self, hidden: torch.Tensor) -> None:
        """Send to the next stage. Returns before the data has arrived.

        Waits if the next stage is as many steps behind as there are stages.
        """
        while len(self._sends) >= self.rank.pp_size:
            self._sends.popleft()[0].wait()
        hidden = hidden.contiguous()
        work = dist.isend(hidden, self.rank.index + self.rank.tp_size)
        self._sends.append((work, hidden))

    def receive(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Receive the output of the stage before, in order."""
        hidden = torch.empty(*shape, dtype=dtype, device=self.device)
        dist.recv(hidden, self.rank.index - self.rank.tp_size)
        return hidden

    @contextmanager
    def loading(self, timeout: float) -> Iterator[None]:
        """Load this rank's share of a model in the body, then wait up to `timeout` seconds for the other ranks.

        Not a collective: the timeout of a step must not limit how much later another rank finishes. Raises
        ModelLoadError if another rank could not load its share, and RanksLostError, which names missing ranks.
        """
        # Each load has keys of its own in the store: the served model, a draft model, later loads of both.
        what = f"loaded{self._num_loads or ''}"
        self._num_loads += 1
        deadline = time.monotonic() + timeout
        try:
            yield
        except Exception as error:
            exit_code = error.exit_code if isinstance(error, SplitserveError) else 1
            self._store.set(_word(what, self.rank), f"{exit_code} {clause(error)}")
            raise
        self._store.set(_word(what, self.rank), _LOADED)
        others = [other for other in self.rank.group() if other != self.rank]
        problem = (
            f"{{}} had not loaded the model {timeout:.0f} s after this rank began: see the log, or raise --load-timeout"
        )
        for other, found in zip(others, self._stored(what, others, deadline - time.monotonic(), problem), strict=True):
            if found != _LOADED:
                code, _, cause = found.partition(" ")
                problem = f"Rank {other.name} could not load its part of the model: {cause}"
                raise ModelLoadError(problem, exit_code=int(code))

    def texts(self, own: str, timeout: float = TIMEOUT) -> list[str]:
        """Return the texts of all ranks of all stages, by index. Waits up to `timeout` seconds for the last one.

        Not a collective: the timeout of a step must not limit how much later another rank sends its text. Raises
        RanksLostError, which names missing ranks.
        """
        # The ranks of other schedulers may use the same store.
        what = f"text{self._num_texts} of {self.rank.dp_rank}"
        self._num_texts += 1
        self._store.set(_word(what, self.rank), own)
        problem = f"Rank {self.rank.index} waited for the others in vain: {{}} did not answer within {timeout:.0f} s"
        return self._stored(what, list(self.rank.group()), timeout, problem)

    def _stored(self, what: str, ranks: Sequence[ParallelRank], seconds: float, problem: str) -> list[str]:
        """Return what these ranks set under `what` in `seconds`. RanksLostError: `problem`, with missing ones in {}."""
        words = [_word(what, rank) for rank in ranks]
        try:
            self._store.wait(words, _seconds(max(0.0, seconds)))
            return [self._store.get(word).decode() for word in words]
        except Exception as error:
            raise RanksLostError(problem.format(_missing(self._store, what, self.rank))) from error

    def least(self, number: int) -> int:
        """Return the smallest number over all ranks of all stages. Raises RanksLostError if a rank does not answer."""
        return self._reduce(number, dist.ReduceOp.MIN)

    def total(self, number: int) -> int:
        """Return the sum over all ranks of all stages. Raises RanksLostError if a rank does not answer."""
        return self._reduce(number, dist.ReduceOp.SUM)

    def all_agree(self, agrees: bool) -> bool:
        """Return whether all ranks of all stages agree. Raises RanksLostError if a rank does not answer."""
        return bool(self.least(int(agrees)))

    def _reduce(self, number: int, operation: Any) -> int:
        found = torch.tensor([number], dtype=torch.int64)
        try:
            dist.all_reduce(found, op=operation, group=self._all_stages)
        except Exception as error:
            raise RanksLostError(f"Rank {self.rank.index} waited for the others in vain: {error}") from error
        return int(found.item())

    def close(self) -> None:
        """Close the group. Idempotent. Does not wait for the others."""
        self._sends.clear()
        if dist.is_initialized():
            dist.destroy_process_group()

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()


def open_ranks(
    rank: ParallelRank,
    init_method: str,
    device: torch.device | str,
    *,
    timeout: float = TIMEOUT,
    listening: int | None = None,
    in_order: bool = True,
    num_groups: int = 0,
) -> Ranks:
    """Join the other ranks of the group at `init_method` ("file:///..." or "tcp://host:port", of this group alone).

    Once per process. `timeout`: seconds for all to join, and later for each wait of one rank for another in a step.
    `listening`: at the driver, for tcp, the descriptor of a socket that listens there; the store owns it from now on.
    `in_order`: add in the order of the ranks (module docstring). `num_groups`: with data parallel attention, the number
    of schedulers; the ranks of each follow one another. Raises WorkerUnavailableError if they do not all join.
    """
    device = torch.device(device)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    wait = _seconds(timeout)
    store: Any = None
    try:
        if device.type == "cuda":
            torch.cuda.set_device(device)
        store = _store(rank, init_method, wait, listening)
        store.set(_word("here", rank), b"")
        dist.init_process_group(backend, store=store, rank=rank.index, world_size=rank.group_size, timeout=wait)
        stages = [
            dist.new_group([stage * rank.tp_size + i for i in range(rank.tp_size)], timeout=wait)
            for stage in range(rank.pp_size)
        ]
        own = group_rank(rank, num_groups) if num_groups else None
        groups = [] if own is None else _open_groups(own, wait)
    except Exception as error:
        missing = "" if store is None else f" {_missing(store, 'here', rank)} did not come."
        raise WorkerUnavailableError(
            f"Rank {rank.index} of {rank.group_size} did not meet the others at {init_method} within {timeout:.0f} s:"
            f"{missing} {clause(error)}. Check that all ranks were started, with the same address."
        ) from error
    group = None
    if own is not None:
        together = groups[own.dp_rank]
        group = Ranks(own, device, [together], store, in_order=in_order, all_stages=together)
    return Ranks(rank, device, stages, store, in_order=in_order, group=group)


def group_rank(rank: ParallelRank, num_groups: int) -> ParallelRank:
    """Return the place of a rank of a stage in its group, which is that of one scheduler."""
    size = rank.tp_size // num_groups
    return ParallelRank(
        tp_rank=rank.tp_rank % size, tp_size=size, dp_rank=rank.tp_rank // size, dp_size=rank.tp_size // size
    )


def _open_groups(rank: ParallelRank, wait: datetime.timedelta) -> list[Any]:
    """Open the process groups of all schedulers. Every rank opens all of them, in the same order."""
    size = rank.tp_size
    return [dist.new_group([i * size + j for j in range(size)], timeout=wait) for i in range(rank.dp_size)]


def _sum_in_order(parts: torch.Tensor) -> torch.Tensor:
    """Return the sum over the first dimension, in float32 if the dtype is a smaller one."""
    total = parts[0].to(torch.promote_types(parts.dtype, torch.float32))
    for part in parts[1:]:
        total = total + part
    return total.to(parts.dtype)


def _word(what: str, rank: ParallelRank) -> str:
    return f"{what}-{rank.index}"


def _missing(store: Any, what: str, rank: ParallelRank) -> str:
    """Return the names of the ranks that have not set this key, for error texts."""
    try:
        names = [other.name for other in rank.group() if not store.check([_word(what, other)])]
    except Exception:
        # The store's owner is gone.
        names = []
    return f"Rank {'; rank '.join(names)}" if names else "Some rank"


def _seconds(seconds: float) -> datetime.timedelta:
    """Return a duration for torch: in milliseconds, and at least one, because 0 means no limit."""
    return datetime.timedelta(milliseconds=max(1, round(1000 * seconds)))


def _store(rank: ParallelRank, init_method: str, wait: datetime.timedelta, listening: int | None) -> Any:
    """Open the key-value store shared by the ranks."""
    where = urlsplit(init_method)
    if where.scheme != "tcp":
        store, _, _ = next(rendezvous(init_method, rank.index, rank.group_size, timeout=wait))
        return store
    return TCPStore(
        str(where.hostname),
        where.port or 0,
        rank.group_size,
        is_master=rank.is_driver,
        timeout=wait,
        wait_for_workers=False,
        master_listen_fd=listening,
    )


def _padded(part: torch.Tensor, size: int) -> torch.Tensor:
    """Pad the last dimension to `size`, because ranks exchange pieces of one size."""
    if part.shape[-1] == size:
        return part.contiguous()
    return torch.nn.functional.pad(part, (0, size - part.shape[-1]))
