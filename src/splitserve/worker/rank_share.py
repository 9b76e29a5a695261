"""Share of one rank in its machine: cores and free memory are divided, GPUs are assigned in turn."""

from __future__ import annotations

import msgspec
import torch

from splitserve.core.config import CacheConfig, ModelConfig
from splitserve.core.errors import ConfigError, OptionError
from splitserve.core.machine import num_cores, parse_cpus
from splitserve.core.parallel import place_on_node
from splitserve.worker.scheduler_link import SchedulerStart


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
        num_needed, needs = rank.dp_size, f"--enable-dp-attention with --dp-size {rank.dp_size} is for as many"
        smaller = "a smaller one"
    else:
        num_needed, smaller = group_here, "smaller ones"
        needs = f"--tp-size {rank.tp_size} and --pp-size {rank.pp_size} are for {group_here}"
    if device.startswith("cuda:") and num_needed > 1:
        raise OptionError(
            "--device",
            f"{device} is one GPU, and {needs}: give --device cuda (CUDA_VISIBLE_DEVICES says which those are)",
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
