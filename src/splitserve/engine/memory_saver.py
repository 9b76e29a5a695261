"""The KV pool's memory on a GPU, returned and allocated again at the same addresses by torch_memory_saver.

The package replaces torch's allocator within `region`. Written from its documentation and not measured: no test here
runs it on a GPU.
"""

from __future__ import annotations

import contextlib
from typing import Any

from splitserve.core.errors import ConfigError, OptionError, clause
from splitserve.core.memory import MemoryTag


def find() -> Any:
    """Return the library. Raises OptionError if it is missing, or cannot be loaded."""
    try:
        # Imported here, because the package is for GPUs.
        from torch_memory_saver import torch_memory_saver as saver
    except Exception as error:
        # Its errors for a broken CUDA installation have no common class.
        raise OptionError(
            "--enable-memory-saver",
            f"needs torch_memory_saver on GPUs ({type(error).__name__}: {clause(error)}): pip install "
            "torch_memory_saver, or leave the option out",
        ) from error
    return saver


def region() -> contextlib.AbstractContextManager[None]:
    """Return the context in which the pool is allocated. Raises OptionError."""
    saver = find()
    # The other mode needs LD_PRELOAD in the environment of the process.
    saver.hook_mode = "torch"
    found: contextlib.AbstractContextManager[None] = saver.region(tag=MemoryTag.KV_CACHE.value, enable_cpu_backup=False)
    return found


def pause() -> None:
    """Return the pool's memory to the device. Raises ConfigError."""
    with _errors("released"):
        find().pause(MemoryTag.KV_CACHE.value)


def resume() -> None:
    """Allocate the pool's memory again; its content is undefined. Raises ConfigError."""
    with _errors("allocated again"):
        find().resume(MemoryTag.KV_CACHE.value)


@contextlib.contextmanager
def _errors(what: str) -> Any:
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            f"the KV pool cannot be {what} on the GPU: {type(error).__name__}: {clause(error)}. Free memory of the "
            "device and retry, or restart the worker."
        ) from error
