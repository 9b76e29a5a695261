"""A pool of KV pages shared by several workers of a host: pages change owner, and no byte moves.

The pool is a file in memory that every worker maps: a table with the owner of each page, followed by the pages. The
file is sparse; only pages that were written to take memory.

1. A worker joins: it takes a free place and owns the pages of that place, including those of a dead predecessor.
2. A decode worker announces pages of its own. A prefill worker computes the prompt in pages of its own and exchanges
   them for those (`exchange`): each worker owns as many as before.
3. Each worker gets from `resolve` the pages it has now in place of those it held.
4. A worker that leaves or dies frees its place: the kernel releases its lock.

The exchange is a journal of two steps, so that it is either done or not, even if its process is killed. Pages are
numbers here; requests and models are not known.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import secrets
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from splitserve.core.errors import ConfigError, WorkerUnavailableError

# Maximum number of workers of one pool at a time.
MAX_WORKERS = 16
_MAGIC = b"SSPP\0\0\0\1"
# magic, pool id, pages per worker, shape; then the generation of each place.
_HEADER = struct.Struct("<8s16sQ16s")
_GENERATIONS_AT = 64
# The tag of the exchange in progress of each place; 0: none.
_IN_FLIGHT_AT = 256
# The lock byte of place i is at this offset plus i.
_LOCKS_AT = 1024
_TABLE_AT = 4096
# Owner, giver, page given for, tag.
_TABLE_ROW_BYTES = 1 + 1 + 4 + 8
# Seconds. Normally the lock is held for microseconds.
_LOCK_TIMEOUT = 10.0
# struct flock on 64-bit Linux: type, whence, start, length, pid.
_FLOCK = struct.Struct("hhqqi4x")


_Pages = NDArray[np.int64]


class SharedPages:
    """A worker's view of the pool's table. Close it when the worker is done, to free its place.

    The first worker lays out the pool, with `pages_per_worker` pages for each. `arena_bytes` returns the memory that a
    number of pages takes. `shape` must be the same for all workers. Raises ConfigError if it differs from the pool's,
    if no place is free, or if the file cannot be used.
    """

    def __init__(self, file: Path, *, pages_per_worker: int, shape: bytes, arena_bytes: Callable[[int], int]) -> None:
        try:
            # File behind the pages, for mapping them. It stays owned by this object.
            self.fd = os.open(file, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise ConfigError(
                f"the shared pool {file} cannot be opened ({error.strerror}): give all workers the same file"
            ) from None
        # Tag -> pages given, and pages received for them. Removed by `resolve`.
        self._received: dict[int, tuple[_Pages, _Pages]] = {}
        # The lock belongs to the open file, which all threads of this process share.
        self._threads = threading.Lock()
        # Guards `_now`. `_threads` may be held for seconds, by an exchange that waits for another process.
        self._looking_up = threading.Lock()
        try:
            with self._locked(fcntl.LOCK_EX):
                self.pages_per_worker = self._read_header(file, shape) or pages_per_worker
                # Pages of all workers that may ever join: page numbers are smaller than this.
                self.num_pages = self.pages_per_worker * MAX_WORKERS
                # Maps each page to itself; during a lookup, exchanged pages to their replacements. Sorting instead
                # would take ten times as long for many pages.
                self._now = np.arange(self.num_pages, dtype=np.int64)
                # Offset of the pages in the file.
                table_end = _TABLE_AT + self.num_pages * _TABLE_ROW_BYTES
                self.arena_offset = -(-table_end // mmap.PAGESIZE) * mmap.PAGESIZE
                if self._pool_id == b"":
                    self._lay_out(shape, self.arena_offset + arena_bytes(self.num_pages))
                self._map()
                self.place = self._take_place(file)
                self._generations[self.place] += 1
                # Pages that a predecessor received and did not resolve.
                self._tags[self._owners == self.place] = 0
                self._in_flight[self.place] = 0
        except BaseException:
            os.close(self.fd)
            raise
        self.generation = int(self._generations[self.place])

    @property
    def identity(self) -> str:
        """Equal for all workers of one pool."""
        return self._pool_id.hex()

    def owned(self) -> list[int]:
        """Return the pages of this worker, in order."""
        return [int(p) for p in np.flatnonzero(self._owners == self.place)]

    def exchange(self, ours: Sequence[int], theirs: Sequence[int], *, tag: int, generation: int) -> bool:
        """Exchange pages of this worker for as many of another one, identified by `generation` from the handshake.

        `tag` identifies the transfer for both workers; 64 bits, not 0. Returns False, changing nothing, if that worker
        is gone: its successor may use the pages for something else already. Raises ValueError for pages that this
        worker does not own, or if the numbers of pages differ.
        """
        if len(ours) != len(theirs):
            raise ValueError(f"{len(ours)} pages cannot be exchanged for {len(theirs)}")
        if not ours:
            return True
        a, b = np.asarray(ours, dtype=np.int64), np.asarray(theirs, dtype=np.int64)
        with self._locked(fcntl.LOCK_SH):
            receiver = int(self._owners[b[0]])
            if not (self._owners[b] == receiver).all() or int(self._generations[receiver]) != generation:
                return False
            if not (self._owners[a] == self.place).all():
                raise ValueError("a page is given away that is not ours")
            self._given_for[a], self._givers[a], self._tags[a] = b, self.place, tag
            # From here on the exchange counts: if this process is killed, `resolve` in the other worker completes it.
            self._in_flight[self.place] = tag
            self._owners[a] = receiver
            self._owners[b] = self.place
            self._in_flight[self.place] = 0
            self._received[tag] = (a, b)
        return True

    def resolve(self, pages: Sequence[int], *, tag: int) -> list[int]:
        """Return the pages owned in place of given or announced ones. Call when no worker can exchange them."""
        if (received := self._received.pop(tag, None)) is not None:
            return self._exchanged(pages, *received)
        given = np.flatnonzero((self._tags == tag) & (self._owners == self.place))
        self._tags[given] = 0
        for_ours = self._given_for[given].astype(np.int64)
        # If the giver was killed between the two steps, the page goes to the giver's place, and so to its next worker.
        unfinished = self._in_flight[self._givers[given]] == tag
        self._owners[for_ours[unfinished]] = self._givers[given[unfinished]]
        return self._exchanged(pages, for_ours, given)

    def _exchanged(self, pages: Sequence[int], old: _Pages, new: _Pages) -> list[int]:
        """Return `pages` with each page of `old` replaced by its counterpart in `new`."""
        if not len(old):
            return list(pages)
        with self._looking_up:
            self._now[old] = new
            try:
                now: list[int] = self._now[np.asarray(pages, dtype=np.int64)].tolist()
            finally:
                self._now[old] = old
        return now

    def close(self) -> None:
        """Free the place of this worker. Idempotent."""
        if self.fd >= 0:
            # Unlock explicitly: the mapping keeps the file open, and with it the lock, while anything refers to the
            # memory.
            fcntl.fcntl(self.fd, fcntl.F_OFD_SETLK, _lock_of(fcntl.F_UNLCK, self.place))
            os.close(self.fd)
            self.fd = -1

    def _read_header(self, file: Path, shape: bytes) -> int:
        """Return the pages per worker; 0 if the pool is not laid out yet."""
        head = os.pread(self.fd, _HEADER.size, 0)
        if head.strip(b"\0") == b"":
            self._pool_id = b""
            return 0
        magic, self._pool_id, pages, theirs = _HEADER.unpack(head)
        if magic != _MAGIC:
            raise ConfigError(f"{file} is no shared pool of this release: give the workers a new file")
        if theirs != shape:
            raise ConfigError(
                f"the shared pool {file} was laid out for another KV cache ({theirs.hex()} against {shape.hex()}): "
                "give all its workers the same model, dtype and page size"
            )
        return int(pages)

    def _lay_out(self, shape: bytes, size: int) -> None:
        self._pool_id = secrets.token_bytes(16)
        os.ftruncate(self.fd, size)
        owners = np.repeat(np.arange(MAX_WORKERS, dtype=np.uint8), self.pages_per_worker)
        os.pwrite(self.fd, owners.tobytes(), _TABLE_AT)
        # Write the header last: if this worker is killed before, the next one lays out the file anew.
        os.pwrite(self.fd, _HEADER.pack(_MAGIC, self._pool_id, self.pages_per_worker, shape), 0)

    def _map(self) -> None:
        memory = mmap.mmap(self.fd, self.arena_offset, flags=mmap.MAP_SHARED)
        self._in_flight = np.frombuffer(memory, np.uint64, MAX_WORKERS, _IN_FLIGHT_AT)
        self._generations = np.frombuffer(memory, np.uint64, MAX_WORKERS, _GENERATIONS_AT)
        # MAX_WORKERS is a multiple of 8, so every column is aligned.
        n = self.num_pages
        self._owners = np.frombuffer(memory, np.uint8, n, _TABLE_AT)
        # For a page that was given and not resolved: the giver's place, the page in return and the transfer (0: none).
        self._givers = np.frombuffer(memory, np.uint8, n, _TABLE_AT + n)
        self._given_for = np.frombuffer(memory, np.uint32, n, _TABLE_AT + 2 * n)
        self._tags = np.frombuffer(memory, np.uint64, n, _TABLE_AT + 6 * n)

    def _take_place(self, file: Path) -> int:
        for place in range(MAX_WORKERS):
            with contextlib.suppress(BlockingIOError, PermissionError):
                fcntl.fcntl(self.fd, fcntl.F_OFD_SETLK, _lock_of(fcntl.F_WRLCK, place))
                return place
        raise ConfigError(f"{MAX_WORKERS} workers share the pool {file} already: start this one with a pool of its own")

    @contextlib.contextmanager
    def _locked(self, how: int) -> Iterator[None]:
        """Hold the lock of the pool: shared for an exchange, exclusive to join, so that no place changes its owner.

        Raises WorkerUnavailableError if another process does not release it: it is stopped, or hangs.
        """
        with self._threads:
            deadline = time.monotonic() + _LOCK_TIMEOUT
            while True:
                try:
                    fcntl.flock(self.fd, how | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > deadline:
                        raise WorkerUnavailableError(
                            f"a worker of the shared pool holds its lock for over {_LOCK_TIMEOUT:g} s: "
                            "end the one that is stopped"
                        ) from None
                    time.sleep(0.001)
            try:
                yield
            finally:
                fcntl.flock(self.fd, fcntl.LOCK_UN)


def _lock_of(kind: int, place: int) -> bytes:
    return _FLOCK.pack(kind, os.SEEK_SET, _LOCKS_AT + place, 1, 0)
