"""The table in shared memory by which the workers of a host divide its cores (`_native/pool.c`).

1. Each worker has a row: its home cores (`--threads`), and whether it computes a step, and prompts.
2. A worker that computes uses its home cores and its share of the cores of idle workers. When one of those begins a
   step, the helpers on its cores stop after their current task, within some 0.1 ms.
3. A row belongs to the process that holds a file lock on it. The operating system releases the lock when the process
   ends, even if it is killed. Other workers then clear the row.

On GPUs the same two calls around a step would divide multiprocessors (green contexts). That is not built.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import logging
import mmap
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from splitserve.core.machine import num_cores
from splitserve.engine.kernels.library import KernelLibrary

logger = logging.getLogger(__name__)

# Bytes of a row: struct core_share of pool.c.
_ROW_BYTES = 64
_MAX_WORKERS = 64
# Seconds between two searches for rows of processes that have ended.
_SEARCH_INTERVAL = 1.0
# The table of this process, by its id: a child has none of its own yet. None: it cannot be used.
_tables: dict[int, CoreTable | None] = {}


class _Row(ctypes.Structure):
    """struct core_share of pool.c."""

    _fields_ = (
        ("home_cores", ctypes.c_uint32),
        ("is_busy", ctypes.c_uint32),
        ("has_prompts", ctypes.c_uint32),
        ("unused", ctypes.c_uint32 * 13),
    )


class CoreTable:
    """This process's row of the table. Raises OSError if the file cannot be used, or all rows are taken.

    Create one per process and file, because closing a second one would release the locks of the first.
    """

    def __init__(self, file: Path, num_cores: int) -> None:
        self.num_cores = num_cores
        self._fd = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            if os.fstat(self._fd).st_uid != os.getuid():
                raise PermissionError(f"{file} belongs to another user")
            os.ftruncate(self._fd, _MAX_WORKERS * _ROW_BYTES)
            # Without memory for it, the first write to the mapping would end the process with SIGBUS.
            os.posix_fallocate(self._fd, 0, _MAX_WORKERS * _ROW_BYTES)
            self._memory = mmap.mmap(self._fd, _MAX_WORKERS * _ROW_BYTES)
            self._own = next((i for i in range(_MAX_WORKERS) if self._lock(i)), _MAX_WORKERS)
            if self._own == _MAX_WORKERS:
                raise OSError(f"{file} has rows for {_MAX_WORKERS} workers, and all are taken")
        except BaseException:
            os.close(self._fd)
            raise
        self._rows = (_Row * _MAX_WORKERS).from_buffer(self._memory)
        self._num_computing = 0
        self._next_search = 0.0
        self._libraries: list[KernelLibrary] = []

    def attach(self, library: KernelLibrary, home_cores: int) -> None:
        """Let the kernels of a library use cores of idle workers. Do not call this while a kernel runs."""
        self._rows[self._own] = _Row(home_cores=home_cores)
        library.share_cores(ctypes.addressof(self._rows), _MAX_WORKERS, self._own, self.num_cores)
        library.cores = self
        self._libraries.append(library)

    @contextlib.contextmanager
    def computing(self, *, has_prompts: bool = False) -> Iterator[None]:
        """Own the home cores during a step, which may contain steps of a draft model."""
        if (now := time.monotonic()) >= self._next_search:
            self._next_search = now + _SEARCH_INTERVAL
            self._clear_ended()
        self._num_computing += 1
        row = self._rows[self._own]
        row.is_busy, row.has_prompts = 1, row.has_prompts | has_prompts
        try:
            yield
        finally:
            self._num_computing -= 1
            if not self._num_computing:
                row.is_busy = row.has_prompts = 0

    def is_host_computing(self) -> bool:
        """Return whether any worker of the host computes a step."""
        return any(row.is_busy for row in self._rows)

    def has_other_prompts(self) -> bool:
        """Return whether another worker of the host computes prompts."""
        return any(row.has_prompts and i != self._own for i, row in enumerate(self._rows))

    def close(self) -> None:
        """Release the row and detach all libraries."""
        for library in self._libraries:
            library.share_cores(None, 0, 0, 0)
            library.cores = None
        self._rows[self._own] = _Row()
        # Releases the lock.
        os.close(self._fd)

    def _clear_ended(self) -> None:
        for i, row in enumerate(self._rows):
            if i != self._own and row.home_cores and self._lock(i):
                self._rows[i] = _Row()
                fcntl.lockf(self._fd, fcntl.LOCK_UN, 1, i)

    def _lock(self, row: int) -> bool:
        try:
            fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, row)
        except BlockingIOError:
            return False
        return True


def default_file() -> Path:
    """Return the file of this user's table on this host."""
    folder = Path("/dev/shm")
    return (folder if folder.is_dir() else Path(tempfile.gettempdir())) / f"splitserve-cores-{os.getuid()}"


def _open_table() -> CoreTable | None:
    try:
        return CoreTable(default_file(), num_cores())
    except OSError as error:
        logger.warning("cores of idle workers are not used: %s", error)
        return None


def is_host_computing() -> bool | None:
    """Return whether any worker of this host computes a step. None: unknown, this process has not joined the table."""
    table = _tables.get(os.getpid())
    return None if table is None else table.is_host_computing()


def has_other_prompts() -> bool:
    """Return whether another worker of this host computes prompts. False, too, if this process has no table."""
    table = _tables.get(os.getpid())
    return table is not None and table.has_other_prompts()


def join_table(library: KernelLibrary, home_cores: int) -> None:
    """Let the kernels of this process use cores of idle workers. Log a warning if the table cannot be used."""
    process = os.getpid()
    if process not in _tables:
        _tables[process] = _open_table()
    if (table := _tables[process]) is not None:
        table.attach(library, home_cores)
