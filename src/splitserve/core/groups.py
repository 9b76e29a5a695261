"""The ranks of one scheduler. With data parallel attention `--tp-size` counts those of all schedulers together."""

from __future__ import annotations

import msgspec

from splitserve.core.config import WorkerConfig
from splitserve.core.parallel import ParallelConfig


def num_groups_of(config: WorkerConfig) -> int:
    """Return the number of schedulers that share `tp_size` ranks. 1: each scheduler has `tp_size` ranks."""
    return config.dp_size if config.model.dp_attention and config.parallel.tp_size > 1 else 1


def group_of(config: WorkerConfig) -> ParallelConfig:
    """Return how the ranks of one scheduler split the model. One rank each if `tp_size` is 1."""
    return msgspec.structs.replace(config.parallel, tp_size=config.parallel.tp_size // num_groups_of(config))
