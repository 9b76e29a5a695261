"""Copies of small arrays from the host to the computing device, without waiting for it.

A plain copy from the host waits until a GPU has done all work before it. From page-locked memory the copy is queued
among the kernels, and the host continues. Torch keeps that memory until the copy is done, and then reuses it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch


def to_device(array: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """Return the array as a tensor on the device. On a CPU it shares the array's memory, if that is contiguous."""
    host = torch.from_numpy(np.ascontiguousarray(array))
    if device.type != "cuda":
        return host.to(device)
    return host.pin_memory().to(device, non_blocking=True)
