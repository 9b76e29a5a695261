"""Limits of a device: the fastest of a few plain torch operations on large tensors."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from splitserve.tools.bench.gpu_figures import GpuThroughput


def median_seconds(device: torch.device, run: Callable[[], object], repeats: int, warm_ups: int = 3) -> float:
    """Return the median seconds of one run, including the device's work."""
    seconds = []
    for i in range(warm_ups + repeats):
        began = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if i >= warm_ups:
            seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def measure_limits(device: torch.device, *, num_bytes: int, matrix_size: int, repeats: int) -> GpuThroughput:
    """Measure the limits. `num_bytes`: size of the tensors that are read and copied, much larger than a cache."""
    source = torch.ones(num_bytes // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    copying = median_seconds(device, lambda: target.copy_(source), repeats)
    reading = median_seconds(device, lambda: source.amax(), repeats)
    left = torch.randn(matrix_size, matrix_size, dtype=torch.bfloat16, device=device)
    right = torch.randn_like(left)
    multiplying = median_seconds(device, lambda: left @ right, repeats)
    return GpuThroughput(
        memory_gb_per_s=max(2 * num_bytes / copying, num_bytes / reading) / 1e9,
        matmul_gflop_per_s=2 * matrix_size**3 / multiplying / 1e9,
        copy_gb_per_s=num_bytes / copying / 1e9,
    )
