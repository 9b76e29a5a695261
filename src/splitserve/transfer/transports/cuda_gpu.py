"""GPU operations of `cuda_ipc.py`, by torch, CUDA's driver and a kernel of our own."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from splitserve.core.errors import ConfigError, clause
from splitserve.core.layout import Region
from splitserve.transfer.transports.cuda_copy import copy_rows
from splitserve.transfer.transports.cuda_driver import CudaDriver, CudaError
from splitserve.transfer.transports.cuda_ipc import NAME, NEEDS_GPU, DeviceRegion
from splitserve.transfer.transports.cuda_parts import rows_of
from splitserve.transfer.transports.device import device_of

# Some attributes of torch.cuda have no types.
_cuda: Any = torch.cuda


class CudaGpu:
    """The GPU of the registered memory. Several threads may call `copy`, each on a stream of its own."""

    def __init__(self) -> None:
        if not torch.cuda.is_available():
            raise ConfigError(f"torch {torch.__version__} finds no CUDA device: choose another transfer backend")
        self._device: torch.device | None = None
        self._driver: CudaDriver | None = None

    def describe(self, region: Region) -> DeviceRegion | None:
        device = device_of(region)
        if device is None:
            return None
        if self._device is None:
            self._device, self._driver = device, CudaDriver(device.index)
        if device != self._device:
            raise ConfigError(f"memory of {device} and of {self._device} was registered with one transport")
        driver = self._opened()
        try:
            base, size = driver.allocation_of(region.address)
            return DeviceRegion(driver.export(base), size, region.address - base, region.length, region.address)
        except CudaError as error:
            raise ConfigError(
                f"the transfer backend {NAME!r} cannot share the KV pool: {clause(error.message)}. Leave "
                "expandable_segments out of PYTORCH_CUDA_ALLOC_CONF, or choose 'tcp'"
            ) from error

    def open(self, handle: bytes, pid: int) -> int:
        return self._opened().open(handle)

    def close(self, address: int) -> None:
        self._opened().close(address)

    def copy(self, targets: NDArray[np.uint64], sources: NDArray[np.uint64], lengths: NDArray[np.uint64]) -> None:
        assert self._device is not None
        with torch.cuda.device(self._device):
            # The stream is from torch's pool, so creating one is cheap.
            stream = _cuda.Stream(self._device)
            with torch.cuda.stream(stream):
                copy_rows(rows_of(targets, sources, lengths), self._device)
            stream.synchronize()

    def _opened(self) -> CudaDriver:
        if self._driver is None:
            raise ConfigError(NEEDS_GPU)
        return self._driver
