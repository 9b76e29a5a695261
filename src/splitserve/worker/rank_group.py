"""A rank's position in the group that computes a model, and its connections to the other ranks."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field

import psutil  # type: ignore[import-untyped]

from splitserve.core.parallel import ParallelRank
from splitserve.engine.parallel.ranks import Ranks, open_ranks
from splitserve.ranks.pipe_net import PipeNet
from splitserve.ranks.rank_channel import DriverChannel
from splitserve.scheduler.lockstep import Member
from splitserve.worker.scheduler_link import SchedulerStart

# Interface of torch.distributed's listeners while all ranks are on one host, as these listeners do not authenticate.
# Between hosts it is the interface with the node's address.
_LOOPBACK = "lo" if sys.platform == "linux" else "lo0"
_LOOPBACK_PREFIX = "127."
_INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def _nobody_to_lose(why: str) -> None:
    """Do nothing, for a rank without a group."""


@dataclass(frozen=True, slots=True)
class RankPlace:
    rank: ParallelRank = field(default_factory=ParallelRank)
    # Random number, equal for all ranks of this start of the worker.
    instance: int = 0
    # Collects one message of each rank, by `ParallelRank.index`, in exchange for this rank's. None: no group.
    exchange: Callable[[bytes], list[bytes]] | None = None
    # Ends this rank's process, from any thread, when the ranks disagree about their rooms.
    end: Callable[[str], None] = _nobody_to_lose


@dataclass(frozen=True, slots=True)
class DriverPlace(RankPlace):
    # Channel to its followers. None: there are none.
    channel: DriverChannel | None = None
    # Membership among data parallel ranks that compute their steps together. None: it steps independently.
    member: Member | None = None


def meet(start: SchedulerStart, init_method: str, rank: ParallelRank, device: str) -> Ranks:
    """Open the process group. Each rank calls this, and waits for all. Raises ConfigError.

    `init_method`: a file of this host, or the address of a listener that the driver has inherited.
    """
    interface = _LOOPBACK if init_method.startswith("file:") else _interface_of(start.config.parallel.node_host)
    if interface is not None:
        for name in _INTERFACE_VARIABLES:
            os.environ.setdefault(name, interface)
    listening = start.descriptors.get(init_method) if rank.is_driver else None
    # If there are GPUs, `device` already names the GPU of this rank.
    return open_ranks(rank, init_method, "cpu" if device == "auto" else device, listening=listening)


def pipe_net(start: SchedulerStart) -> PipeNet | None:
    """Return the network for pipes to ranks of other hosts. None: there are none."""
    if start.config.parallel.nnodes == 1:
        return None
    return PipeNet.of(start.config.disaggregation.cluster_token.secret, start.instance, start.descriptors)


def _interface_of(address: str) -> str | None:
    """Return the network interface that has this address. None: unknown."""
    if address.startswith(_LOOPBACK_PREFIX):
        # The interface has all of 127.0.0.0/8, but only one address is listed.
        return _LOOPBACK
    interfaces = psutil.net_if_addrs().items()
    return next((str(name) for name, found in interfaces if any(a.address == address for a in found)), None)
