"""A rank's place among those that compute a model with it, and its ways to them."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field

import psutil  # type: ignore[import-untyped]

from splitserve.core.parallel import ParallelRank
from splitserve.engine.parallel.ranks import Ranks, open_ranks
from splitserve.launch.pipe_net import PipeNet
from splitserve.launch.rank_channel import DriverChannel
from splitserve.launch.scheduler_link import SchedulerStart
from splitserve.scheduler.lockstep import Member

# Where torch.distributed's sockets listen while all ranks are on one host: they ask nobody who he is. Between hosts it
# is the interface that has the node's address.
_LOOPBACK = "lo" if sys.platform == "linux" else "lo0"
_LOOPBACK_PREFIX = "127."
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


def meet(start: SchedulerStart, init_method: str, rank: ParallelRank, device: str) -> Ranks:
    """Open the group of processes. Each rank calls this, and waits for all. Raises ConfigError.

    `init_method`: a file of this host, or an address on which the driver has inherited a socket that listens.
    """
    interface = _LOOPBACK if init_method.startswith("file:") else _interface_of(start.config.parallel.node_host)
    if interface is not None:
        for name in _INTERFACE_VARIABLES:
            os.environ.setdefault(name, interface)
    listening = start.descriptors.get(init_method) if rank.is_driver else None
    # Where there are GPUs, each rank was given one by name.
    return open_ranks(rank, init_method, "cpu" if device == "auto" else device, listening=listening)


def pipe_net(start: SchedulerStart) -> PipeNet | None:
    """For the pipes to ranks of other hosts; None: there are none."""
    if start.config.parallel.nnodes == 1:
        return None
    return PipeNet.of(start.config.disaggregation.cluster_token.secret, start.instance, start.descriptors)


def _interface_of(address: str) -> str | None:
    """The network interface that has this address; None: none is known to."""
    if address.startswith(_LOOPBACK_PREFIX):
        # All of 127.0.0.0/8 is there; one address is listed.
        return _LOOPBACK
    interfaces = psutil.net_if_addrs().items()
    return next((str(name) for name, found in interfaces if any(a.address == address for a in found)), None)
