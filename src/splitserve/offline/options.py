"""Options of an engine's workers: those of `splitserve serve` that are useful inside a program."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from splitserve.core.config import WorkerConfig
from splitserve.core.errors import ConfigError
from splitserve.core.options import fill, flag_of, options_of, replaced
from splitserve.worker.checks import check_worker

# Configs with the options of an engine, and options in them that need several hosts or depend on the role.
_PARTS = ("model", "parallel", "dp_size", "cache", "scheduler", "speculative")
_NOT_HERE = ("load_timeout", "nnodes", "node_rank", "dist_init_addr", "shared_pool", "decode_prefix_cache")
ENGINE_OPTIONS = {
    option.name: option
    for option in options_of(WorkerConfig())
    if option.path.partition(".")[0] in _PARTS and option.name not in _NOT_HERE
}


def worker_config(model: str, transfer_backend: str, options: Mapping[str, Any]) -> WorkerConfig:
    """Return the config of a worker in the null role. Raises ConfigError that names the invalid option."""
    if unknown := options.keys() - ENGINE_OPTIONS.keys():
        raise ConfigError(f"Engine has no option {', '.join(sorted(unknown))}: it has {', '.join(ENGINE_OPTIONS)}")
    values = {name: _checked(name, value) for name, value in options.items()}
    changes = {"model.model": model, "disaggregation.transfer_backend": transfer_backend}
    config: WorkerConfig = replaced(fill(WorkerConfig(), values), changes)
    check_worker(config)
    return config


def worker_args(options: Mapping[str, Any]) -> list[str]:
    """Return the same options for the command line of a worker. A flag that is off is left out."""
    flags = {flag_of(name): value for name, value in options.items() if value is not False}
    return [flag if value is True else f"{flag}={value}" for flag, value in flags.items()]


def _checked(name: str, value: Any) -> Any:
    try:
        return msgspec.convert(value, ENGINE_OPTIONS[name].kind)
    except msgspec.ValidationError as error:
        raise ConfigError(f"Engine's option {name}: {error}") from None
