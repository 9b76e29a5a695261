"""What a worker's settings say of the pool of layers with sliding windows. Every rank of a worker finds the same."""

from __future__ import annotations

from splitserve.config import WorkerConfig
from splitserve.engine.window_pool import WindowDemand


def window_demand(config: WorkerConfig) -> WindowDemand:
    scheduler = config.scheduler
    # A chunk's pages are given back when its step has ended; the next one is planned before that.
    num_steps = max(2, config.parallel.pp_size) if scheduler.overlap_schedule else 1
    return WindowDemand(
        full_tokens_ratio=config.cache.swa_full_tokens_ratio,
        step_tokens=num_steps * scheduler.chunked_prefill_size,
        max_requests=scheduler.max_running_requests + scheduler.num_preallocated_rows,
        obstacle=_obstacle(config),
    )


def _obstacle(config: WorkerConfig) -> str | None:
    """An option beside which all layers have one pool."""
    if config.cache.shared_pool is not None:
        return "--shared-pool"
    if config.cache.prefix_host_memory:
        return "--prefix-host-memory"
    if config.speculative.draft_model is not None:
        return "--speculative-draft-model"
    return None
