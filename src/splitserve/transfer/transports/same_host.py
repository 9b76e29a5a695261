"""Common part of backends inside one host: host check, memory in anonymous files, gate, threads of a large write.

A peer's anonymous file is opened through /proc/<pid>/fd, where the kernel lists the open files of a process. Needs one
process namespace (containers: a shared one) and the same user on both sides, or root on the sender's.

A gate is the fence of memory that senders write to directly. It admits writes and proves when the last one has ended:
1. The receiver makes a gate, an anonymous file, for each session. A sender on the same host opens it again: a key.
2. Around every bounded piece of a write the sender holds a shared lock on the file and checks that the gate is open.
3. The receiver closes the gate by a byte in the file. No piece begins any more.
4. Once the receiver gets the exclusive lock, the last piece has ended too. That is the proof.

The lock is the kernel's (flock). It is released when a sender dies, and stays with one that is stopped inside a piece.
It belongs to an open file description, so a key opens the file again instead of sharing a descriptor.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import socket
import stat
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TypeVar

import msgspec

from splitserve._native.moves import ScatterCopy
from splitserve.core.errors import ConfigError
from splitserve.core.layout import Region
from splitserve.core.machine import Arena
from splitserve.transfer.transports import sockets
from splitserve.transfer.transports.backend import Incoming, SendingEnd
from splitserve.transfer.transports.base import WriteRefused
from splitserve.transfer.transports.frames import ProtocolError
from splitserve.transfer.transports.sockets import Deadline

# Bytes that the CPU copies per entry into the gate: about a millisecond, the time that a drain waits.
PART_BYTES = 8 << 20


class FileRef(msgspec.Struct, frozen=True):
    """Descriptor in the process that sends this, with device and inode to prove that the right file was opened."""

    fd: int
    device: int
    inode: int


def boot_id() -> str:
    """Return the boot id of the running kernel. Host names may repeat, boot ids do not."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def file_ref(fd: int) -> FileRef:
    status = os.fstat(fd)
    return FileRef(fd, status.st_dev, status.st_ino)


def path_of(pid: int, file: FileRef) -> str:
    return f"/proc/{pid}/fd/{file.fd}"


def open_file(pid: int, file: FileRef, *, anonymous: bool = False) -> int:
    """Return a descriptor of our own. Raises OSError if the kernel denies access or it is another file.

    `anonymous`: refuse a file with a name, because the peer that names this one may not be allowed to write to it.
    """
    path = path_of(pid, file)
    # Before it is opened: in another process namespace it may be a device.
    _check_file(os.stat(path), file, anonymous=anonymous)
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        _check_file(os.fstat(fd), file, anonymous=anonymous)
    except OSError:
        os.close(fd)
        raise
    return fd


def _check_file(found: os.stat_result, file: FileRef, *, anonymous: bool) -> None:
    if (found.st_dev, found.st_ino) != (file.device, file.inode):
        # On this host, another process has the process id.
        raise OSError(errno.ESTALE, "it is another one here than at the receiver's")
    if not stat.S_ISREG(found.st_mode) or (anonymous and found.st_nlink):
        raise OSError(errno.EPERM, "it is no anonymous memory")


_CLOSED = b"\x01"


class WriteGate:
    """The receiver's end, open until `close_for_good`."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("splitserve-gate", os.MFD_CLOEXEC)
        # A key maps this byte, so it must exist.
        os.ftruncate(self.fd, len(_CLOSED))
        self._is_empty = False

    def close_for_good(self) -> None:
        """Let no piece begin any more. Idempotent."""
        os.pwrite(self.fd, _CLOSED, 0)

    def is_closed(self) -> bool:
        """Return whether the gate is closed and no sender is inside any more."""
        if not self._is_empty and os.pread(self.fd, 1, 0) == _CLOSED:
            self._is_empty = _try_lock(self.fd, fcntl.LOCK_EX)
        return self._is_empty

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError):
            os.close(self.fd)


class GateKey:
    """A sender's end. `fd`: any descriptor of the gate's file. The caller keeps it."""

    def __init__(self, fd: int) -> None:
        path = f"/proc/self/fd/{fd}"
        # Checked for every piece; a read of the file would make that a quarter slower. A separate descriptor, because a
        # mapping would keep the lock of a descriptor that it shares.
        with open(path, "rb") as file:
            self._said = mmap.mmap(file.fileno(), len(_CLOSED), access=mmap.ACCESS_READ)
        self._fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)

    def held(self) -> AbstractContextManager[None]:
        """Return a context in which the receiver waits for us. Raises WriteRefused if the gate is closed."""
        return _Held(self._fd, self._said)

    def close(self) -> None:
        """Close the key. Idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)
            self._said.close()


class _Held:
    """Context manager. As a generator it would take a microsecond more, of the ten that a page takes."""

    __slots__ = ("_fd", "_said")

    def __init__(self, fd: int, said: mmap.mmap) -> None:
        self._fd, self._said = fd, said

    def __enter__(self) -> None:
        if not _try_lock(self._fd, fcntl.LOCK_SH):
            raise WriteRefused("the session was drained")
        # Lock first: the receiver waits for a sender that has the lock and found the gate open.
        if self._said[:] == _CLOSED:
            fcntl.flock(self._fd, fcntl.LOCK_UN)
            raise WriteRefused("the session was drained")

    def __exit__(self, *error: object) -> None:
        fcntl.flock(self._fd, fcntl.LOCK_UN)


def _try_lock(fd: int, kind: int) -> bool:
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


Key = TypeVar("Key", bound=GateKey)


class KernelIdentity(msgspec.Struct, frozen=True):
    """Identity of a running kernel. Host names may repeat, boot ids do not."""

    name: str
    boot_id: str


def this_host() -> KernelIdentity:
    return KernelIdentity(socket.gethostname(), boot_id())


def check_shareable(region: Region, backend: str) -> None:
    """Check that other processes can map a region of the CPU. Raises ConfigError."""
    if region.fd < 0:
        raise ConfigError(
            f"the transfer backend {backend!r} needs memory of the CPU that other processes can map, and a region was "
            "registered that is private: allocate it as Arena(..., shareable=True), or choose another backend"
        )


class GatedOutgoing(SendingEnd):
    """Part of a SendingEnd that writes directly, in bounded parts, each inside the gate.

    It maps files of process `pid` of the receiver, each once, and keeps their memory alive. The subclass drops them.
    """

    def __init__(
        self, sock: socket.socket, backend: str, host: KernelIdentity, pid: int, *, anonymous: bool = False
    ) -> None:
        """`backend`, for errors: its name. `anonymous`: refuse files with a name.

        Raises ProtocolError if the receiver is on another host.
        """
        super().__init__(sock)
        ours = this_host()
        if host.boot_id != ours.boot_id:
            raise ProtocolError(
                f"the receiver is on host {host.name!r} ({host.boot_id}), this worker on {ours.name!r} "
                f"({ours.boot_id}): {backend!r} works inside one host, between hosts start both workers with 'tcp'"
            )
        self._name, self._pid, self._anonymous = backend, pid, anonymous
        self._arenas: dict[FileRef, Arena] = {}
        self._interrupted = False

    def _open(self, file: FileRef) -> int:
        """Return a descriptor of our own. Raises ProtocolError if the kernel denies access or it is another file."""
        try:
            return open_file(self._pid, file, anonymous=self._anonymous)
        except OSError as error:
            raise ProtocolError(
                f"cannot open the memory of process {self._pid}: {error.strerror}. {self._name!r} needs both workers "
                "under one user and in one process namespace; otherwise start them with 'tcp'"
            ) from error

    def _open_key(self, kind: Callable[[int], Key], gate: FileRef) -> Key:
        """Return a sender's key of the gate. Raises ProtocolError as `_open` does."""
        fd = self._open(gate)
        try:
            return kind(fd)
        finally:
            os.close(fd)

    def _map_file(self, file: FileRef, offset: int, length: int) -> Region:
        """Return part of a file as a region. Raises ProtocolError as `_open` does, and if it lies outside."""
        if file not in self._arenas:
            self._arenas[file] = Arena.attach(self._open(file))
        arena = self._arenas[file]
        if offset < 0 or length < 0 or offset + length > arena.num_bytes:
            raise ProtocolError(f"a region of [{offset}, {offset + length}) in a file of {arena.num_bytes} bytes")
        return arena.region(offset, length)

    def interrupt(self) -> None:
        self._interrupted = True

    def _check(self, deadline: Deadline) -> None:
        """Check that another part may begin. Raises TimeoutError, WriteRefused."""
        deadline.remaining()
        if self._interrupted:
            raise WriteRefused("interrupted")

    def _copy_parts(self, copy: ScatterCopy, key: GateKey, deadline: Deadline) -> None:
        """Copy part after part by the CPU until none is left, alone or in parallel to other threads."""
        while not copy.is_complete:
            self._check(deadline)
            with key.held():
                copy.advance(PART_BYTES)


class GatedIncoming(Incoming):
    """Part of an Incoming that uses a gate, for senders that write directly."""

    def __init__(self, gate: WriteGate) -> None:
        self._gate = gate

    def serve(self, sock: socket.socket) -> None:
        """Wait for the end of the connection. It carries nothing, and only shows that the sender is alive."""
        sockets.wait_until_closed(sock)

    def revoke(self) -> None:
        self._gate.close_for_good()

    def is_fenced(self) -> bool:
        return self._gate.is_closed()


def run_together(works: Sequence[Callable[[], None]]) -> None:
    """Run the first in this thread, each other in a thread of its own. On return or error, all have ended.

    All take their parts from one queue and end when it is empty, so the work is complete even if the system has no
    more threads. Raises the error of this thread's work, else that of another.
    """
    first, *others = works
    if not others:
        first()
        return
    with ThreadPoolExecutor(len(others), "kv-share") as pool:
        shares = []
        with contextlib.suppress(RuntimeError):
            for work in others:
                shares.append(pool.submit(work))
        first()
    for share in shares:
        share.result()
