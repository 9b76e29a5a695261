"""Anonymous files of another process on this host: how one says which they are, and how the other opens them.

The kernel shows a process's open files under /proc/<pid>/fd. Needs one process namespace, and one user on both sides or
root on the side that opens. Knows nothing of what the files hold.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec


class FileRef(msgspec.Struct, frozen=True):
    """A descriptor in the process that says it, and what proves that we opened the right file."""

    fd: int
    device: int
    inode: int


class OtherFileError(OSError):
    """The file that was found is not the one that was meant: the process is another one here."""


def boot_id() -> str:
    """Of the running kernel. Host names may repeat, boot ids do not."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def file_ref(fd: int) -> FileRef:
    status = os.fstat(fd)
    return FileRef(fd, status.st_dev, status.st_ino)


def path_of(pid: int, file: FileRef) -> str:
    return f"/proc/{pid}/fd/{file.fd}"


def open_file(pid: int, file: FileRef) -> int:
    """A descriptor of our own. Raises OSError where the kernel does not let us, OtherFileError for another file."""
    fd = os.open(path_of(pid, file), os.O_RDWR | os.O_CLOEXEC)
    opened = file_ref(fd)
    if (opened.device, opened.inode) != (file.device, file.inode):
        os.close(fd)
        raise OtherFileError(f"process {pid} is another one here than at the receiver's")
    return fd
