"""A rank's position in the group that computes a model, and its connections to the other ranks."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec
import psutil  # type: ignore[import-untyped]
import torch

from splitserve.core.config import CacheConfig, ModelConfig, WorkerConfig
from splitserve.core.errors import ConfigError, OptionError
from splitserve.core.machine import num_cores, parse_cpus
from splitserve.core.parallel import ParallelRank, place_on_node
from splitserve.engine.parallel.ranks import Ranks, open_ranks
from splitserve.engine.pool import WindowDemand
from splitserve.ranks.rank_channel import DriverChannel, PipeNet
from splitserve.ranks.scheduler_start import SchedulerStart
from splitserve.scheduler.lockstep import Member
from splitserve.scheduler.parts import step_tokens

# Interface of torch.distributed's listeners while all ranks are on one host, as these listeners do not authenticate.
# Between hosts it is the interface with the node's address.
_LOOPBACK = "lo" if sys.platform == "linux" else "lo0"
_LOOPBACK_PREFIX = "127."
_INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


@dataclass(frozen=True, slots=True)
class RankPlace:
    rank: ParallelRank = field(default_factory=ParallelRank)
    # Random number, equal for all ranks of this start of the worker.
    instance: int = 0
    # Collects one message of each rank, by `ParallelRank.index`, in exchange for this rank's. None: no group.
    exchange: Callable[[bytes], list[bytes]] | None = None
    # Ends this rank's process, from any thread, when the ranks disagree about their rooms.
    # The default does nothing: the rank has no group.
    end: Callable[[str], None] = lambda why: None

    # On drivers: channel to its followers. None: there are none.
    channel: DriverChannel | None = None
    # Membership among data parallel ranks that compute their steps together. None: it steps independently.
    member: Member | None = None


def meet(start: SchedulerStart, device: str) -> Ranks | None:
    """Open the process group. Each rank calls this, and waits for all. None: this rank computes alone.

    Raises ConfigError.
    """
    if start.lockstep is not None:
        # For the model the ranks of all schedulers are one stage. For the KV transfer each scheduler has its own.
        one = start.rank
        all_ranks = ParallelRank(tp_rank=one.dp_rank * one.tp_size + one.tp_rank, tp_size=one.dp_size * one.tp_size)
        return _meet_at(start, start.lockstep.init_method, all_ranks, device, num_groups=one.dp_size)
    if start.endpoints is None:
        return None
    return _meet_at(start, start.endpoints.init_method, start.rank, device)


def _meet_at(start: SchedulerStart, init_method: str, rank: ParallelRank, device: str, num_groups: int = 0) -> Ranks:
    """Open the process group at a file of this host, or at the address of a listener that the driver has inherited."""
    interface = _LOOPBACK if init_method.startswith("file:") else _interface_of(start.config.parallel.node_host)
    if interface is not None:
        for name in _INTERFACE_VARIABLES:
            os.environ.setdefault(name, interface)
    listening = start.descriptors.get(init_method) if rank.is_driver else None
    # If there are GPUs, `device` already names the GPU of this rank.
    device = "cpu" if device == "auto" else device
    # On CPUs a sum in order takes no longer than another one. On GPUs it moves more data.
    in_order = start.config.model.deterministic or torch.device(device).type == "cpu"
    return open_ranks(rank, init_method, device, listening=listening, in_order=in_order, num_groups=num_groups)


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


def share_of_rank(start: SchedulerStart) -> tuple[ModelConfig, CacheConfig]:
    """Return the configs with this rank's share. Raises ConfigError if a sharded model has more ranks than GPUs."""
    config, rank = start.config, start.rank
    model = msgspec.structs.replace(config.model, model=start.model_folder)
    if rank.dp_size * rank.group_size == 1:
        return model, config.cache
    num_nodes = config.parallel.nnodes
    # Ranks of this host.
    group_here = rank.group_size // num_nodes
    num_ranks = rank.dp_size * group_here
    cores = len(parse_cpus(model.cpu_affinity)) if model.cpu_affinity else num_cores()
    device, num_sharers = model.device, num_ranks
    if model.dp_attention:
        needs = f"--enable-dp-attention with --tp-size {config.parallel.tp_size} and --dp-size {rank.dp_size} is for "
        num_needed, needs, smaller = num_ranks, f"{needs}{num_ranks}", "smaller ones"
    else:
        num_needed, smaller = group_here, "smaller ones"
        needs = f"--tp-size {rank.tp_size} and --pp-size {rank.pp_size} are for {group_here}"
    if device.startswith("cuda:") and num_needed > 1:
        raise OptionError(
            "--device",
            f"{device} is one GPU, and {needs}: give --device cuda (CUDA_VISIBLE_DEVICES selects the GPUs)",
        )
    if device in ("auto", "cuda") and torch.cuda.is_available():
        num_gpus = torch.cuda.device_count()
        if num_needed > num_gpus:
            raise ConfigError(f"{needs} GPUs, and this machine has {num_gpus}: choose {smaller}, or --device cpu")
        place = place_on_node(rank, num_nodes)
        device, num_sharers = f"cuda:{place % num_gpus}", -(-num_ranks // num_gpus)
    return (
        msgspec.structs.replace(model, threads=model.threads or max(1, cores // num_ranks), device=device),
        msgspec.structs.replace(config.cache, num_sharers=num_sharers),
    )


def window_demand(config: WorkerConfig) -> WindowDemand:
    scheduler = config.scheduler
    return WindowDemand(
        full_tokens_ratio=config.cache.swa_full_tokens_ratio,
        step_tokens=step_tokens(config),
        max_requests=scheduler.max_running_requests + scheduler.num_preallocated_rows,
        obstacle=_obstacle(config),
    )


def _obstacle(config: WorkerConfig) -> str | None:
    """Return an option that requires one pool for all layers. None: there is none."""
    if config.cache.shared_pool is not None:
        return "--shared-pool"
    if config.cache.prefix_host_memory:
        return "--prefix-host-memory"
    if config.speculative.has_draft_layers:
        return "--speculative-algorithm"
    return None
