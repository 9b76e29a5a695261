"""One GPU for transports that gather on it: location of memory, streams, page-locked memory of the host.

`CudaDevice` is a real GPU, by torch. `CudaDriver` has functions of CUDA's driver that torch does not have. Tests use a
device in the CPU's memory (`tests/support/fake_device.py`). Independent of pages, peers and the data copied.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from splitserve.core.errors import ConfigError, SplitserveError
from splitserve.core.layout import Region

# Size of a handle.
HANDLE_BYTES = 64
# Flag: access memory of another GPU directly if the hardware can.
_LAZY_PEER_ACCESS = 1
# Arguments of cuFlushGPUDirectRDMAWrites: what to flush, and for which reader.
_CURRENT_CONTEXT = 0
_TO_OWNER = 100


class CudaError(SplitserveError):
    """Error of the driver, with the function and the name of the cause."""

    reason = "cuda_error"


class _Handle(ctypes.Structure):
    """CUipcMemHandle."""

    _fields_ = (("reserved", ctypes.c_char * HANDLE_BYTES),)


class CudaDriver:
    """Driver functions for one device, by its number in this process. Raises CudaError; OSError without a driver.

    A handle names a whole allocation of the driver, which other processes of the host may map. Torch places its tensors
    inside allocations, so a region is a handle and an offset. A process cannot open its own handles. The driver counts
    how often a process has opened a handle, and returns the same address each time.
    """

    def __init__(self, device: int) -> None:
        self._library = ctypes.CDLL("libcuda.so.1")
        self._library.cuIpcOpenMemHandle_v2.argtypes = (ctypes.POINTER(ctypes.c_uint64), _Handle, ctypes.c_uint)
        self._call("cuInit", 0)
        number = ctypes.c_int()
        self._call("cuDeviceGet", ctypes.byref(number), device)
        # The context that torch uses too. Retained until the process ends.
        self._context = ctypes.c_void_p()
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), number)

    def allocation_of(self, address: int) -> tuple[int, int]:
        """Return the base address and the size of the allocation that contains `address`."""
        base, size = ctypes.c_uint64(), ctypes.c_size_t()
        self._in_context("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(address))
        return base.value, size.value

    def export(self, base: int) -> bytes:
        """Return the handle of the allocation that begins at `base`."""
        handle = _Handle()
        self._in_context("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(base))
        return bytes(handle)

    def open(self, handle: bytes) -> int:
        """Map another process's allocation. Return its address for this device. End it with `close`."""
        base = ctypes.c_uint64()
        named = _Handle.from_buffer_copy(handle)
        self._in_context("cuIpcOpenMemHandle_v2", ctypes.byref(base), named, ctypes.c_uint(_LAZY_PEER_ACCESS))
        return base.value

    def close(self, base: int) -> None:
        self._in_context("cuIpcCloseMemHandle", ctypes.c_uint64(base))

    def flush_remote_writes(self) -> None:
        """Make earlier writes by network devices to this GPU's memory visible to kernels that start from now on."""
        self._in_context("cuFlushGPUDirectRDMAWrites", _CURRENT_CONTEXT, _TO_OWNER)

    def _in_context(self, function: str, *args: object) -> None:
        """Call a function in the device's context, which the driver sets per thread."""
        self._call("cuCtxSetCurrent", self._context)
        self._call(function, *args)

    def _call(self, function: str, *args: object) -> None:
        if code := getattr(self._library, function)(*args):
            name = ctypes.c_char_p()
            self._library.cuGetErrorName(code, ctypes.byref(name))
            raise CudaError(f"{function}: {(name.value or b'unknown').decode()} ({code})")


# Some attributes of torch.cuda have no types.
_cuda: Any = torch.cuda
# cudaHostRegisterPortable: page-locked for every GPU of the process.
_PORTABLE = 1

# Returns a context: the work that this thread starts inside runs on one stream, and is done at the end of the block.
DeviceStream = Callable[[], AbstractContextManager[None]]


class CudaDevice:
    """A GPU by torch and the driver. For any thread."""

    def __init__(self, device: torch.device) -> None:
        # Device for tensors.
        self.torch_device = device
        # Number of the GPU for transfer libraries.
        self.gpu_id = device.index if device.index is not None else torch.cuda.current_device()
        self._driver: CudaDriver | None = None

    def holds(self, region: Region) -> bool:
        """Return whether a region is on this GPU, or else in this process. Raises ConfigError for another GPU."""
        found = device_of(region)
        if found is not None and found != self.torch_device:
            raise ConfigError(
                f"memory of {found} was registered with a transport on {self.torch_device}: name one device"
            )
        return found is not None

    def bytes_at(self, address: int, length: int) -> torch.Tensor:
        """Return memory of this GPU as a tensor of bytes. Its owner must keep the memory valid."""
        return _device_bytes(address, length)

    def synchronize(self) -> None:
        """Wait until all work of the calling thread's current stream is done."""
        torch.cuda.current_stream(self.torch_device).synchronize()

    def new_stream(self) -> DeviceStream:
        """Return a stream for the work of one staging buffer, in order, parallel to other work of the GPU."""
        # The stream is from torch's pool, which returns the same streams again after a while.
        stream = _cuda.Stream(self.torch_device)

        @contextlib.contextmanager
        def work() -> Iterator[None]:
            with torch.cuda.device(self.torch_device), torch.cuda.stream(stream):
                try:
                    yield
                finally:
                    # Synchronize after a failure, too, because the memory may be freed next.
                    stream.synchronize()

        return work

    def page_lock(self, address: int, length: int) -> None:
        """Lock memory of the host, so that the GPU can copy to and from it directly. Raises OSError."""
        with torch.cuda.device(self.torch_device):
            self._check(_cuda.cudart().cudaHostRegister(address, length, _PORTABLE), f"page-lock {length} bytes")

    def page_unlock(self, address: int) -> None:
        """Unlock memory. Call before it is freed. Raises OSError."""
        with torch.cuda.device(self.torch_device):
            self._check(_cuda.cudart().cudaHostUnregister(address), "unlock page-locked memory")

    def flush_remote_writes(self) -> None:
        """Make earlier writes by network devices to this GPU's memory visible to work that starts from now on.

        Raises SplitserveError if the GPU cannot guarantee that.
        """
        if self._driver is None:
            self._driver = CudaDriver(self.gpu_id)
        self._driver.flush_remote_writes()

    def _check(self, code: Any, what: str) -> None:
        if int(code):
            raise OSError(f"cannot {what} for {self.torch_device}: CUDA error {int(code)}")


def find_device(regions: Sequence[Region]) -> CudaDevice | None:
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
