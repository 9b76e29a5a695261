"""A rank's place among those that compute a model with it, and its ways to them."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field

from splitserve.core.parallel import ParallelRank
from splitserve.engine.parallel.ranks import Ranks, open_ranks
from splitserve.launch.rank_channel import DriverChannel
from splitserve.scheduler.lockstep import Member

# Where torch.distributed's sockets listen while all ranks are on one host: they ask nobody who he is.
_LOOPBACK = "lo" if sys.platform == "linux" else "lo0"
_INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def _nobody_to_lose(why: str) -> None:
    """Of a rank that has the model alone."""


@dataclass(frozen=True, slots=True)
class RankPlace:
    rank: ParallelRank = field(default_factory=ParallelRank)
    # Drawn for all ranks of this start of the worker.
    instance: int = 0
    # What each rank says of itself, by `ParallelRank.index`, for what this one says; None: it has the model alone.
    exchange: Callable[[bytes], list[bytes]] | None = None
    # Ends this rank's process, from any thread, where the ranks do not know the same of their rooms any more.
    end: Callable[[str], None] = _nobody_to_lose


@dataclass(frozen=True, slots=True)
class DriverPlace(RankPlace):
    # To its followers; None: there are none.
    channel: DriverChannel | None = None
    # Among data parallel ranks that compute their steps together; None: its steps are its own.
    member: Member | None = None


def meet(init_method: str, rank: ParallelRank, device: str) -> Ranks:
    """Open the group of processes. Each rank calls this, and waits for all. Raises ConfigError."""
    if init_method.startswith("file:"):
        for name in _INTERFACE_VARIABLES:
            os.environ.setdefault(name, _LOOPBACK)
    # Where there are GPUs, each rank was given one by name.
    return open_ranks(rank, init_method, "cpu" if device == "auto" else device)
