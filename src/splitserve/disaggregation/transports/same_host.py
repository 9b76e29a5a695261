"""What backends inside one host have in common: whether the peer is on it, and its memory in anonymous files.

Needs one process namespace (containers: a shared one) and the same user on both sides, or root on the sender's.
"""

from __future__ import annotations

import socket

import msgspec

from splitserve.core.arena import Arena
from splitserve.core.layout import Region
from splitserve.disaggregation.transports.door import ProtocolError
from splitserve.disaggregation.transports.local_files import FileRef, OtherFileError, boot_id, open_file


class Host(msgspec.Struct, frozen=True):
    """A running kernel. Host names may repeat, boot ids do not."""

    name: str
    boot_id: str


def this_host() -> Host:
    return Host(socket.gethostname(), boot_id())


def check_host(theirs: Host, ours: Host, backend: str) -> None:
    """Raises ProtocolError for another host than ours."""
    if theirs.boot_id != ours.boot_id:
        raise ProtocolError(
            f"the receiver is on host {theirs.name!r} ({theirs.boot_id}), this worker on {ours.name!r} "
            f"({ours.boot_id}): {backend!r} works inside one host, between hosts start both workers with 'tcp'"
        )


def open_memory(pid: int, file: FileRef, backend: str) -> int:
    """A descriptor of our own. Raises ProtocolError where the kernel does not let us, or it is another file."""
    remedy = (
        f"{backend!r} needs both workers under one user and in one process namespace; otherwise start them with 'tcp'"
    )
    try:
        return open_file(pid, file)
    except OtherFileError as error:
        raise ProtocolError(f"{error}. {remedy}") from error
    except OSError as error:
        raise ProtocolError(f"cannot open the memory of process {pid}: {error.strerror}. {remedy}") from error


def region_in(arena: Arena, offset: int, length: int) -> Region:
    """Raises ProtocolError where the arena does not hold it."""
    if offset < 0 or length < 0 or offset + length > arena.num_bytes:
        raise ProtocolError(f"a region of [{offset}, {offset + length}) in a file of {arena.num_bytes} bytes")
    return arena.region(offset, length)
