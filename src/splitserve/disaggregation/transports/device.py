"""One GPU as transports see it that gather on it: where memory lies, streams, page-locked memory of the host.

`CudaDevice` is the real one, by torch. Tests have one that lies in the CPU's memory (`testing/fake_device.py`). Knows
nothing of pages, of peers or of what is copied.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from splitserve.core.layout import Region
from splitserve.disaggregation.transports.cuda_driver import CudaDriver
from splitserve.errors import ConfigError

# Parts of it have no types.
_cuda: Any = torch.cuda
# cudaHostRegisterPortable: page-locked for every GPU of the process.
_PORTABLE = 1


class Stream(Protocol):
    """Work of one staging buffer, in order; beside everything else that the GPU does."""

    def work(self) -> AbstractContextManager[None]:
        """What this thread starts inside goes on the stream. At its end all of it has been done."""
        ...


class Device(Protocol):
    # Where tensors are made.
    torch_device: torch.device
    # Its number, as transfer libraries want it.
    gpu_id: int

    def holds(self, region: Region) -> bool:
        """False for memory of this process. Raises ConfigError for memory of another GPU."""
        ...

    def bytes_at(self, address: int, length: int) -> torch.Tensor:
        """Memory of this GPU as a tensor of bytes. Whoever registered it keeps it valid."""
        ...

    def synchronize(self) -> None:
        """Return when the calling thread's current stream has done everything."""
        ...

    def stream(self) -> Stream: ...

    def page_lock(self, address: int, length: int) -> None:
        """Let the GPU copy to and from this memory of the host by itself. Raises OSError."""
        ...

    def page_unlock(self, address: int) -> None:
        """Before the memory goes. Raises OSError."""
        ...

    def flush_remote_writes(self) -> None:
        """What network devices have written into this GPU's memory is seen by work that starts from now on.

        Raises SplitserveError where the GPU cannot promise that.
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

    def stream(self) -> Stream:
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
        # From torch's pool of streams, which hands the same ones out again after a while.
        self._stream = _cuda.Stream(device)

    @contextlib.contextmanager
    def work(self) -> Iterator[None]:
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            try:
                yield
            finally:
                # Also of what failed half-way: its memory may be given back next.
                self._stream.synchronize()


def find_device(regions: Sequence[Region]) -> Device | None:
    """The GPU on which the first of these lies that lies on one."""
    if not torch.cuda.is_available():
        return None
    found = next((device for device in map(device_of, regions) if device is not None), None)
    return None if found is None else CudaDevice(found)


def device_of(region: Region) -> torch.device | None:
    """The GPU on which a region lies; None for memory of this process."""
    try:
        return _device_bytes(region.address, region.length).device
    except RuntimeError:
        # What torch says of a pointer that no GPU knows.
        return None


def host_bytes(address: int, length: int) -> NDArray[np.uint8]:
    """Memory of this process as an array. Whoever registered it keeps it valid."""
    return np.asarray(_AtAddress("__array_interface__", address, length))


def _device_bytes(address: int, length: int) -> torch.Tensor:
    return torch.as_tensor(_AtAddress("__cuda_array_interface__", address, length))


class _AtAddress:
    """Memory that numpy and torch take by its address."""

    def __init__(self, protocol: str, address: int, length: int) -> None:
        description = {"data": (address, False), "shape": (length,), "typestr": "|u1", "version": 3}
        setattr(self, protocol, description)
