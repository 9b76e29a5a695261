"""One GPU for transports that gather on it: location of memory, streams, page-locked memory of the host.

`CudaDevice` is a real GPU, by torch. Tests use one in the CPU's memory (`tests/support/fake_device.py`). Independent of
pages, peers and the data copied.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from splitserve.core.errors import ConfigError
from splitserve.core.layout import Region
from splitserve.transfer.transports.cuda_driver import CudaDriver

# Some attributes of torch.cuda have no types.
_cuda: Any = torch.cuda
# cudaHostRegisterPortable: page-locked for every GPU of the process.
_PORTABLE = 1


class DeviceStream(Protocol):
    """Stream for the work of one staging buffer, in order, parallel to other work of the GPU."""

    def work(self) -> AbstractContextManager[None]:
        """Run work that this thread starts inside on the stream. At the end of the block all of it is done."""
        ...


class Device(Protocol):
    # Device for tensors.
    torch_device: torch.device
    # Number of the GPU for transfer libraries.
    gpu_id: int

    def holds(self, region: Region) -> bool:
        """Return whether a region is on this GPU, or else in this process. Raises ConfigError for another GPU."""
        ...

    def bytes_at(self, address: int, length: int) -> torch.Tensor:
        """Return memory of this GPU as a tensor of bytes. Its owner must keep the memory valid."""
        ...

    def synchronize(self) -> None:
        """Wait until all work of the calling thread's current stream is done."""
        ...

    def stream(self) -> DeviceStream: ...

    def page_lock(self, address: int, length: int) -> None:
        """Lock memory of the host, so that the GPU can copy to and from it directly. Raises OSError."""
        ...

    def page_unlock(self, address: int) -> None:
        """Unlock memory. Call before it is freed. Raises OSError."""
        ...

    def flush_remote_writes(self) -> None:
        """Make earlier writes by network devices to this GPU's memory visible to work that starts from now on.

        Raises SplitserveError if the GPU cannot guarantee that.
        """
        ...


class CudaDevice:
    """A GPU by torch and the driver. For any thread."""

    def __init__(self, device: torch.device) -> None:
        self.torch_device = device
        self.gpu_id = device.index if device.index is not None else torch.cuda.current_device()
        self._driver: CudaDriver | None = None

    def holds(self, region: Region) -> bool:
        found = device_of(region)
        if found is not None and found != self.torch_device:
            raise ConfigError(
                f"memory of {found} was registered with a transport on {self.torch_device}: name one device"
            )
        return found is not None

    def bytes_at(self, address: int, length: int) -> torch.Tensor:
        return _device_bytes(address, length)

    def synchronize(self) -> None:
        torch.cuda.current_stream(self.torch_device).synchronize()

    def stream(self) -> DeviceStream:
        return _CudaStream(self.torch_device)

    def page_lock(self, address: int, length: int) -> None:
        with torch.cuda.device(self.torch_device):
            self._check(_cuda.cudart().cudaHostRegister(address, length, _PORTABLE), f"page-lock {length} bytes")

    def page_unlock(self, address: int) -> None:
        with torch.cuda.device(self.torch_device):
            self._check(_cuda.cudart().cudaHostUnregister(address), "unlock page-locked memory")

    def flush_remote_writes(self) -> None:
        if self._driver is None:
            self._driver = CudaDriver(self.gpu_id)
        self._driver.flush_remote_writes()

    def _check(self, code: Any, what: str) -> None:
        if int(code):
            raise OSError(f"cannot {what} for {self.torch_device}: CUDA error {int(code)}")


class _CudaStream:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        # The stream is from torch's pool, which returns the same streams again after a while.
        self._stream = _cuda.Stream(device)

    @contextlib.contextmanager
    def work(self) -> Iterator[None]:
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            try:
                yield
            finally:
                # Synchronize after a failure, too, because the memory may be freed next.
                self._stream.synchronize()


def find_device(regions: Sequence[Region]) -> Device | None:
    """Return the GPU of the first region that is on a GPU. None: all are on the CPU."""
    if not torch.cuda.is_available():
        return None
    found = next((device for device in map(device_of, regions) if device is not None), None)
    return None if found is None else CudaDevice(found)


def device_of(region: Region) -> torch.device | None:
    """Return the GPU that has a region in its memory. None for memory of this process."""
    try:
        return _device_bytes(region.address, region.length).device
    except RuntimeError:
        # Raised by torch for a pointer that is not on a GPU.
        return None


def host_bytes(address: int, length: int) -> NDArray[np.uint8]:
    """Return memory of this process as an array. Its owner must keep the memory valid."""
    return np.asarray(_AtAddress("__array_interface__", address, length))


def _device_bytes(address: int, length: int) -> torch.Tensor:
    return torch.as_tensor(_AtAddress("__cuda_array_interface__", address, length))


class _AtAddress:
    """Memory at an address, in the form that numpy and torch accept."""

    def __init__(self, protocol: str, address: int, length: int) -> None:
        description = {"data": (address, False), "shape": (length,), "typestr": "|u1", "version": 3}
        setattr(self, protocol, description)
