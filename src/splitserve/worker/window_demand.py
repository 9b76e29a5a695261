"""Demand for pages of layers with sliding windows, from a worker's settings. It is equal on every rank of a worker."""

from __future__ import annotations

from splitserve.core.config import WorkerConfig
from splitserve.engine.pool import WindowDemand
from splitserve.scheduler.parts import step_tokens


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
    if config.speculative.draft_model is not None:
        return "--speculative-draft-model"
    return None
