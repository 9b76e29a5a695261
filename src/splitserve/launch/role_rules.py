"""What roles a worker can have, and with what settings. Light: the front end, which has no torch, asks, too."""

from __future__ import annotations

import msgspec

from splitserve.config import DisaggregationConfig, WorkerConfig
from splitserve.core.request import DisaggregationMode
from splitserve.errors import ConfigError


def settings_of(config: DisaggregationConfig, mode: DisaggregationMode) -> DisaggregationConfig:
    """The hand-over's settings for that role."""
    # How it reaches us is the receiver's to say.
    transfer_dtype = config.transfer_dtype if mode is DisaggregationMode.DECODE else "auto"
    return msgspec.structs.replace(config, mode=mode, transfer_dtype=transfer_dtype)


def check_role(config: WorkerConfig, mode: DisaggregationMode) -> None:
    """Raises ConfigError where this worker cannot have that role."""
    if mode is not config.disaggregation.mode and config.parallel.group_size > 1:
        raise ConfigError(
            f"a worker whose model is cut over ranks (--tp-size {config.parallel.tp_size} --pp-size "
            f"{config.parallel.pp_size}) stays what it is: start another worker in the role {mode}"
        )
    if mode is not config.disaggregation.mode and config.model.dp_attention:
        raise ConfigError(
            "a worker whose schedulers compute their steps together (--enable-dp-attention) stays what it is: start "
            f"another worker in the role {mode}"
        )
    if mode is DisaggregationMode.NULL and config.cache.shared_pool is not None:
        raise ConfigError(
            "a worker in a shared pool (--shared-pool) hands its pages over: it can be prefill or decode, not null"
        )
