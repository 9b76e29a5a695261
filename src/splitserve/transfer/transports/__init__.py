"""The ways bytes travel between two pools. `TransferBackend` names them; each loads only when it is chosen.

To add one: a file with a factory `NAME_transport` that takes TransportOptions, and an entry here.
"""

from __future__ import annotations

import ctypes
import enum
import importlib
import importlib.util
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from splitserve.core.errors import ConfigError, clause
from splitserve.core.machine import Sharing, shares_huge_pages
from splitserve.core.request import FAKE_BACKEND
from splitserve.transfer.transports.base import Transport, TransportOptions, direct_option, is_direct, thread_count
from splitserve.transfer.transports.fake import bandwidth_of, delay_of


class TransferBackend(enum.StrEnum):
    # No peer: a sink for prefill workers, a clock of synthetic KV for decode workers.
    FAKE = FAKE_BACKEND
    # Sockets, on any machine. On one host: direct writes to the peer's memory.
    TCP = "tcp"
    # One host: direct writes to the peer's memory.
    SHM = "shm"
    # One host, KV pools on GPUs: direct writes to the peer's pool.
    CUDA_IPC = "cuda_ipc"
    # torch.distributed between CPUs, and between GPUs.
    GLOO = "gloo"
    NCCL = "nccl"
    # Libraries for RDMA fabrics.
    MOONCAKE = "mooncake"
    NIXL = "nixl"


# Backends available on any machine.
_FOR_CPUS = "tcp, shm or gloo"
_DEVICE_FILES = Path("/dev")


def _missing_for_nccl() -> str | None:
    lack = missing_of_cuda("CUDA and NCCL")
    return lack and f"{lack}; or use {_FOR_CPUS}"


def _missing_for_cuda_ipc() -> str | None:
    if lack := missing_of_cuda("CUDA"):
        return f"{lack}; or use {_FOR_CPUS}"
    has_triton = importlib.util.find_spec("triton") is not None
    return None if has_triton else "the Python package 'triton', which comes with torch's builds for CUDA"


def missing_of_cuda(built_with: str) -> str | None:
    """Return why CUDA cannot be used. Causes that only an import of torch (seconds) reveals are left to the factory."""
    torch = importlib.util.find_spec("torch")
    folder = Path(torch.origin).parent / "lib" if torch and torch.origin else None
    if folder is None or not (folder / "libtorch_cuda.so").exists():
        return f"a torch that is built with {built_with}: install one, see https://pytorch.org/get-started"
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "a CUDA device, and this machine has no driver for one"
    return None


def has_gpu() -> bool:
    """Return whether CUDA probably finds a GPU. It does not initialize the driver, which may take seconds."""
    is_visible = os.environ.get("CUDA_VISIBLE_DEVICES") not in ("", "-1")
    return is_visible and missing_of_cuda("CUDA") is None and any(_DEVICE_FILES.glob("nvidia[0-9]*"))


def _missing_for_mooncake() -> str | None:
    for library, package in (("ibverbs.so.1", "ibverbs1"), ("numa.so.1", "numa1"), ("curl.so.4", "curl4")):
        try:
            ctypes.CDLL(f"lib{library}")
        except OSError:
            return f"the system library lib{library}: on Debian, apt-get install lib{package}"
    return None


# Device types of KV pools, by torch's names.
_CPU, _GPU = frozenset({"cpu"}), frozenset({"cuda"})


@dataclass(frozen=True, slots=True)
class _Entry:
    # Module with the factory, in this package.
    module: str
    # Required module, and how to install it. "": our own requirements are enough.
    needs: str = ""
    hint: str = ""
    # Names in TransportOptions.extra, each with a function that checks a value before a worker starts.
    options: Mapping[str, Callable[[str], object]] = field(default_factory=dict)
    # Registered memory of the CPU must be in shareable arenas, which other processes can map.
    shareable: bool = False
    # Devices of the KV pools that it can transfer.
    pools: frozenset[str] = _CPU
    # Returns what else is missing and what to do, or None.
    lacks: Callable[[], str | None] = lambda: None


# By backend.
_ENTRIES: dict[str, _Entry] = {
    TransferBackend.FAKE: _Entry("fake", options={"bandwidth": bandwidth_of, "delay": delay_of}, pools=_CPU | _GPU),
    TransferBackend.TCP: _Entry("tcp", options={"direct": direct_option}),
    TransferBackend.SHM: _Entry("shm", options={"threads": thread_count}, shareable=True),
    TransferBackend.CUDA_IPC: _Entry("cuda_ipc", shareable=True, pools=_GPU, lacks=_missing_for_cuda_ipc),
    TransferBackend.GLOO: _Entry("process_group"),
    TransferBackend.NCCL: _Entry("process_group", options={"device": str}, pools=_GPU, lacks=_missing_for_nccl),
    TransferBackend.MOONCAKE: _Entry(
        "mooncake",
        "mooncake",
        "pip install 'splitserve[mooncake]'",
        options={"protocol": str, "device": str, "staging": str, "direct": direct_option},
        pools=_CPU | _GPU,
        lacks=_missing_for_mooncake,
    ),
    TransferBackend.NIXL: _Entry(
        "nixl", "nixl_cu12", "pip install 'splitserve[nixl]'", options={"threads": thread_count}
    ),
}

# Backends that reach a peer. Only `serve` offers the fake one, too.
USER_BACKENDS = tuple(backend.value for backend in TransferBackend if backend is not TransferBackend.FAKE)
# Backends of a worker that is started by itself.
WORKER_BACKENDS = (*USER_BACKENDS, FAKE_BACKEND)


def missing(backend: str) -> str | None:
    """Return why this backend cannot be used on this machine and what to do. None: no obstacle is visible."""
    entry = _ENTRIES.get(backend)
    if entry is None:
        return f"unknown transfer backend {backend!r}: choose one of {', '.join(TransferBackend)}"
    if entry.needs and importlib.util.find_spec(entry.needs) is None:
        return f"the transfer backend {backend!r} needs the Python package {entry.needs!r}: {entry.hint}"
    if lack := entry.lacks():
        return f"the transfer backend {backend!r} needs {lack}"
    return None


def needs_shareable_memory(backend: str) -> bool:
    """Return whether memory for this backend must come from `Arena(..., shareable=True)`."""
    return backend in _ENTRIES and _ENTRIES[backend].shareable


def sharing_of(backend: str, extra: Mapping[str, str]) -> Sharing:
    """Return whether a worker's memory of the CPU should be shareable. `extra`: the backend's options.

    Raises OptionError.
    """
    if backend == TransferBackend.TCP:
        return Sharing.WITH_HUGE_PAGES if is_direct(extra) and shares_huge_pages() else Sharing.NONE
    return Sharing.ALWAYS if needs_shareable_memory(backend) else Sharing.NONE


def pool_sharing_of(backend: str, extra: Mapping[str, str]) -> Sharing:
    """Return whether a KV pool of the CPU should be shareable, too. Raises OptionError."""
    return sharing_of(backend, extra) if moves_pools_on(backend, "cpu") else Sharing.NONE


def moves_pools_on(backend: str, device_type: str) -> bool:
    """Return whether it can transfer a KV pool on such a device ("cpu", "cuda")."""
    return backend in _ENTRIES and device_type in _ENTRIES[backend].pools


def options_help() -> str:
    """Return the options of each backend, for users."""
    return "; ".join(f"{name}: {', '.join(sorted(e.options))}" for name, e in _ENTRIES.items() if e.options)


def check_options(backend: str, given: Mapping[str, str]) -> None:
    """Check option names and the number of threads. The backend checks other values. Raises ConfigError."""
    options = _ENTRIES[backend].options
    if unknown := set(given) - set(options):
        known = ", ".join(sorted(options)) or "none"
        raise ConfigError(f"the transfer backend {backend!r} has no option {min(unknown)!r}: it takes {known}")
    for name, value in given.items():
        options[name](value)


def create_transport(backend: str, options: TransportOptions) -> Transport:
    """Create the transport named `backend`. Raises ConfigError if it is unknown or its library is missing."""
    if problem := missing(backend):
        raise ConfigError(problem)
    entry = _ENTRIES[backend]
    check_options(backend, options.extra)
    try:
        module = importlib.import_module(f"{__name__}.{entry.module}")
    except ImportError as error:
        # The package is installed, but a system library that it links to is missing.
        raise ConfigError(
            f"the transfer backend {backend!r} cannot be loaded: {clause(error)}. {entry.hint}"
        ) from error
    factory: Callable[[TransportOptions], Transport] = getattr(module, f"{backend}_transport")
    return factory(options)
