"""Figures that a worker logs when it is ready: model, kernels, limits and memory."""

from __future__ import annotations

from collections.abc import Iterable

import psutil  # type: ignore[import-untyped]

from splitserve.core.config import WorkerConfig
from splitserve.core.messages import SchedulerReady


def startup_figures(config: WorkerConfig, info: SchedulerReady, pool_bytes: int, memory: int) -> str:
    """Return the figures as NAME=VALUE. `info`: of all schedulers. `memory`: bytes that the worker's processes use."""
    figures = {
        "model": config.server.served_model_name or config.model.model,
        "dtype": info.dtype,
        "quantization": config.model.quantization,
        "device": info.device,
        "kernels": info.kernels or "torch",
        "context_length": info.max_total_tokens_per_request,
        "kv_pool_tokens": info.pages_total * info.page_size,
        "kv_pool": _gib(pool_bytes),
        "memory": _gib(memory),
        "threads": info.threads,
        "transfer_backend": config.disaggregation.transfer_backend,
    }
    return " ".join(f"{name}={value}" for name, value in figures.items() if value is not None)


def memory_bytes(pids: Iterable[int]) -> int:
    """Return the resident bytes of processes. One that has ended counts as 0."""
    total = 0
    for pid in pids:
        try:
            total += psutil.Process(pid).memory_info().rss
        except psutil.NoSuchProcess:
            continue
    return total


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 30):.2f}GiB"
