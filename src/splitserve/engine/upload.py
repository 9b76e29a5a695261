"""Small arrays of the host on their way to the device that computes: without waiting for it.

A plain copy from the host waits until a GPU has done everything before it. From page-locked memory it takes its turn
among the kernels, and the host goes on; torch keeps that memory until the copy is over, and then uses it again.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch


def to_device(array: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """The array as a tensor there. On a CPU it is the array's own memory, where that lies in one piece."""
    host = torch.from_numpy(np.ascontiguousarray(array))
    if device.type != "cuda":
        return host.to(device)
    return host.pin_memory().to(device, non_blocking=True)
