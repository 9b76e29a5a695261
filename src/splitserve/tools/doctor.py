"""`splitserve doctor`: the software, devices and transports of this machine, and what is missing."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import psutil  # type: ignore[import-untyped]
from rich.markup import escape
from rich.table import Table

from splitserve import __version__
from splitserve.core.environment import cache_dir
from splitserve.core.errors import SplitserveError
from splitserve.core.machine import num_cores
from splitserve.core.options import size_text
from splitserve.process.console import standard_output
from splitserve.transfer.transports import TransferBackend, create_transport
from splitserve.transfer.transports.base import TransportOptions

_PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "msgspec", "pyzmq", "fastapi", "uvicorn", "aiohttp")
# Default ports of the router, the worker and the bootstrap server, with the option for another one.
_PORTS = {8000: "--port", 30000: "--port", 8998: "--disaggregation-bootstrap-port"}
_NO_FLASHINFER = "torch's: pip install 'splitserve[cuda]' for FlashInfer's"


def run_doctor() -> int:
    """Print the table and return the exit code: 1 if torch or the tcp transport does not work, else 0."""
    table = Table("", "", show_header=False)
    table.add_row("splitserve", __version__)
    table.add_row("python", f"{platform.python_version()} on {platform.platform()}")
    for package in _PACKAGES:
        table.add_row(package, _version(package))
    memory = psutil.virtual_memory()
    table.add_row("cores", f"{num_cores()} usable of {os.cpu_count()}")
    table.add_row("memory", f"{size_text(memory.available)} free of {size_text(memory.total)}")
    devices, works = _devices()
    table.add_row("devices", devices)
    if works:
        table.add_row("kernels for bfloat16", _kernels())
        # FlashInfer is not loaded, because that takes long.
        has_flashinfer = importlib.util.find_spec("flashinfer") is not None
        attention = f"FlashInfer's {_version('flashinfer-python')}" if has_flashinfer else _NO_FLASHINFER
        table.add_row("attention on GPUs", escape(attention))
    for backend in TransferBackend:
        problem = _transport_problem(backend)
        found = "for benchmarks of one worker: no KV cache moves" if backend is TransferBackend.FAKE else "works"
        table.add_row(f"transport {backend}", escape(problem or found))
        works = works and not (problem and backend is TransferBackend.TCP)
    for port, option in _PORTS.items():
        table.add_row(f"port {port}", "free" if _is_free(port) else f"taken: choose another {option}")
    table.add_row("model cache", str(cache_dir()))
    standard_output().print(table)
    return 0 if works else 1


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return f"missing: pip install {package}"


def _devices() -> tuple[str, bool]:
    """Return the devices that torch finds, and whether torch can be loaded."""
    try:
        import torch
    except (ImportError, OSError) as error:
        return f"torch does not load: {error}", False
    names = [f"cpu with {torch.get_num_threads()} threads"]
    for i in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(i)
        memory = f"{size_text(free)} free of {size_text(total)}"
        names.append(f"cuda:{i} {torch.cuda.get_device_name(i)}, {memory}")
    return ", ".join(names), True


def _kernels() -> str:
    """Return which kernels compute a bfloat16 model on the CPU: ours or torch's."""
    from splitserve.engine.kernels.library import find_library

    library = find_library()
    if library is None:
        return "torch's: ours were not built, install splitserve again with a C compiler present"
    most = library.max_bfloat16_rows
    return f"ours for {library.name}" + (f", torch's for more than {most} rows" if most else "")


def _transport_problem(backend: TransferBackend) -> str | None:
    """Return why a transport cannot be opened here. None: it can."""
    try:
        with _silent_libraries():
            create_transport(backend.value, TransportOptions()).close()
    except (SplitserveError, OSError, ImportError) as error:
        return f"absent: {error}"
    return None


@contextmanager
def _silent_libraries() -> Iterator[None]:
    """Discard what libraries in C++ write to standard error. The reason of a failure is in the exception."""
    sys.stderr.flush()
    kept = os.dup(2)
    try:
        with open(os.devnull, "wb") as nothing:
            os.dup2(nothing.fileno(), 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def _is_free(port: int) -> bool:
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
