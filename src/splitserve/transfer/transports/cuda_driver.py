"""GPU memory that other processes of the host may map, through functions of CUDA's driver that torch does not have.

A handle names a whole allocation of the driver. Torch places its tensors inside allocations, so a region is a handle
and an offset. A process cannot open its own handles.

The driver counts how often a process has opened a handle, and returns the same address each time.
"""

from __future__ import annotations

import ctypes

from splitserve.core.errors import SplitserveError

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
    """Driver functions for one device, by its number in this process. Raises CudaError; OSError without a driver."""

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
