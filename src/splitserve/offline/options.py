"""Options of an engine's workers: those of `splitserve serve` that are useful inside a program."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypedDict, TypeVar

import msgspec

from splitserve.core.config import (
    CacheConfig,
    DisaggregationConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculativeConfig,
    WorkerConfig,
)
from splitserve.core.errors import ConfigError
from splitserve.worker.checks import check_worker

S = TypeVar("S", bound=msgspec.Struct)
T = TypeVar("T")

# Option that negates `overlap_schedule` of the config.
_NORMAL_LOOP = "disable_overlap_schedule"


class EngineOptions(TypedDict, total=False):
    """Options of `splitserve serve` by name, for every worker of the engine."""

    dtype: str
    device: str
    context_length: int
    threads: int
    cpu_affinity: str
    kernels: str
    quantization: str
    attention_backend: str
    page_size: int
    max_total_tokens: int
    chunked_prefill_size: int
    max_running_requests: int
    max_queued_requests: int
    schedule_policy: str
    num_reserved_decode_tokens: int
    enable_priority: bool
    # Bytes.
    retraction_host_memory: int
    prefix_host_memory: int
    grammar_timeout: float
    speculative_algorithm: str
    speculative_num_draft_tokens: int
    speculative_ngram_max_match: int
    speculative_draft_model: str
    disable_overlap_schedule: bool
    # Ranks that share each matrix of a worker's model; stages that share its layers.
    tp_size: int
    pp_size: int
    # Schedulers per worker.
    dp_size: int


def worker_config(model: str, transfer_backend: str, options: Mapping[str, Any]) -> WorkerConfig:
    """Return the config of a worker in the null role. Raises ConfigError that names the invalid option."""
    unknown = options.keys() - EngineOptions.__annotations__.keys()
    if unknown:
        known = ", ".join(EngineOptions.__annotations__)
        raise ConfigError(f"Engine has no option {', '.join(sorted(unknown))}: it has {known}")
    _checked(options, EngineOptions)
    config = WorkerConfig(
        model=_pick(ModelConfig, {"model": model, **options}),
        cache=_pick(CacheConfig, options),
        scheduler=_pick(SchedulerConfig, {**options, "overlap_schedule": not options.get(_NORMAL_LOOP, False)}),
        speculative=_pick(SpeculativeConfig, options, prefix="speculative_"),
        disaggregation=DisaggregationConfig(transfer_backend=transfer_backend),
        parallel=_pick(ParallelConfig, options),
        dp_size=options.get("dp_size", 1),
    )
    check_worker(config)
    return config


def worker_args(options: Mapping[str, Any]) -> list[str]:
    """Return the same options for the command line of a worker."""
    flags = {f"--{name.replace('_', '-')}": value for name, value in options.items() if value is not False}
    return [flag if value is True else f"{flag}={value}" for flag, value in flags.items()]


def _pick(component: type[S], options: Mapping[str, Any], prefix: str = "") -> S:
    own = {name: options[prefix + name] for name in component.__struct_fields__ if prefix + name in options}
    return _checked(own, component)


def _checked(options: Mapping[str, Any], kind: type[T]) -> T:
    try:
        return msgspec.convert(options, kind)
    except msgspec.ValidationError as error:
        raise ConfigError(f"Engine's options: {error}") from None
