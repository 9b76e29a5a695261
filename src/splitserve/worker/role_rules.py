"""Roles that a worker can have, and their settings. Imports no torch, because the front end uses it too."""

from __future__ import annotations

import msgspec

from splitserve.core.config import DisaggregationConfig, WorkerConfig
from splitserve.core.errors import ConfigError
from splitserve.core.request import DisaggregationMode


def settings_of(config: DisaggregationConfig, mode: DisaggregationMode) -> DisaggregationConfig:
    """Return the KV transfer settings for that role."""
    # The receiver chooses the transfer dtype.
    transfer_dtype = config.transfer_dtype if mode is DisaggregationMode.DECODE else "auto"
    return msgspec.structs.replace(config, mode=mode, transfer_dtype=transfer_dtype)


def check_role(config: WorkerConfig, mode: DisaggregationMode) -> None:
    """Raise ConfigError if this worker cannot have that role."""
    if mode is not config.disaggregation.mode and config.parallel.group_size > 1:
        raise ConfigError(
            f"a worker with a model sharded over ranks (--tp-size {config.parallel.tp_size} --pp-size "
            f"{config.parallel.pp_size}) stays what it is: start another worker in the role {mode}"
        )
    if mode is not config.disaggregation.mode and config.model.dp_attention:
        raise ConfigError(
            "a worker with data parallel attention (--enable-dp-attention) cannot change its role: start "
            f"another worker in the role {mode}"
        )
    if mode is DisaggregationMode.NULL and config.cache.shared_pool is not None:
        raise ConfigError(
            "a worker in a shared pool (--shared-pool) hands its pages over: it can be prefill or decode, not null"
        )
