"""GPU operations of `cuda_ipc.py`, by torch, CUDA's driver and a kernel of our own.

The kernel copies all scattered pieces at once: a launch for each piece would take longer. Addresses may be any that the
device reaches: its own memory, and mapped memory of another process. None is checked.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

from splitserve.core.errors import ConfigError, clause
from splitserve.core.layout import Region
from splitserve.transfer.transports.cuda_ipc import NAME, NEEDS_GPU, DeviceRegion, DeviceRows
from splitserve.transfer.transports.device import CudaDriver, CudaError, device_of

# Words copied per iteration of a program.
_BLOCK = 1024


def copy_rows(rows: DeviceRows, device: torch.device) -> None:
    """Start to copy on the current stream. There may be no rows."""
    num_rows = rows.table.shape[1]
    if not num_rows:
        return
    host = torch.from_numpy(rows.table)
    table = host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host
    _copy_kernel[(num_rows,)](table[0], table[1], table[2], WIDE=rows.word_bytes == 8, BLOCK=_BLOCK)


# Triton also compiles the signature, and accepts only its own annotations.
def _copy_words(targets, sources, counts, WIDE: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0)
    if WIDE:
        target = tl.load(targets + row).to(tl.pointer_type(tl.int64))
        source = tl.load(sources + row).to(tl.pointer_type(tl.int64))
    else:
        target = tl.load(targets + row).to(tl.pointer_type(tl.int8))
        source = tl.load(sources + row).to(tl.pointer_type(tl.int8))
    count = tl.load(counts + row)
    for first in range(0, count, BLOCK):
        places = first + tl.arange(0, BLOCK)
        inside = places < count
        tl.store(target + places, tl.load(source + places, mask=inside), mask=inside)


_copy_kernel: Any = triton.jit(_copy_words)


# Some attributes of torch.cuda have no types.
_cuda: Any = torch.cuda


class CudaGpu:
    """The GPU of the registered memory. Several threads may call `start`; each launch is on a stream of its own."""

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

    def start(self, rows: DeviceRows) -> Callable[[], object]:
        assert self._device is not None
        with torch.cuda.device(self._device):
            # The stream is from torch's pool, so creating one is cheap.
            stream = _cuda.Stream(self._device)
            with torch.cuda.stream(stream):
                copy_rows(rows, self._device)
        wait: Callable[[], object] = stream.synchronize
        return wait

    def _opened(self) -> CudaDriver:
        if self._driver is None:
            raise ConfigError(NEEDS_GPU)
        return self._driver
