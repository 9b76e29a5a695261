"""References to anonymous files of another process on this host, and how to open them.

The kernel lists a process's open files under /proc/<pid>/fd. Needs one process namespace, and one user on both sides or
root on the side that opens. Independent of the contents.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec


class FileRef(msgspec.Struct, frozen=True):
    """Descriptor in the process that sends this, with device and inode to prove that the right file was opened."""

    fd: int
    device: int
    inode: int


class OtherFileError(OSError):
    """Error for a file that is not the referenced one: on this host, another process has the process id."""


def boot_id() -> str:
    """Return the boot id of the running kernel. Host names may repeat, boot ids do not."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def file_ref(fd: int) -> FileRef:
    status = os.fstat(fd)
    return FileRef(fd, status.st_dev, status.st_ino)


def path_of(pid: int, file: FileRef) -> str:
    return f"/proc/{pid}/fd/{file.fd}"


def open_file(pid: int, file: FileRef) -> int:
    """Return a descriptor of our own. Raises OSError if the kernel denies access, OtherFileError for another file."""
    fd = os.open(path_of(pid, file), os.O_RDWR | os.O_CLOEXEC)
    opened = file_ref(fd)
    if (opened.device, opened.inode) != (file.device, file.inode):
        os.close(fd)
        raise OtherFileError(f"process {pid} is another one here than at the receiver's")
    return fd
