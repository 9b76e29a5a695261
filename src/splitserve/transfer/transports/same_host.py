"""Common part of backends inside one host: host check, memory in anonymous files, gate.

Needs one process namespace (containers: a shared one) and the same user on both sides, or root on the sender's.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from typing import TypeVar

import msgspec

from splitserve.core.errors import clause
from splitserve.core.layout import Region
from splitserve.core.machine import Arena
from splitserve.transfer.transports import sockets
from splitserve.transfer.transports.handshake import ProtocolError
from splitserve.transfer.transports.local_files import FileRef, OtherFileError, boot_id, open_file
from splitserve.transfer.transports.write_gate import GateKey, WriteGate

Key = TypeVar("Key", bound=GateKey)


class KernelIdentity(msgspec.Struct, frozen=True):
    """Identity of a running kernel. Host names may repeat, boot ids do not."""

    name: str
    boot_id: str


def this_host() -> KernelIdentity:
    return KernelIdentity(socket.gethostname(), boot_id())


def check_host(theirs: KernelIdentity, ours: KernelIdentity, backend: str) -> None:
    """Check that the peer is on this host. Raises ProtocolError."""
    if theirs.boot_id != ours.boot_id:
        raise ProtocolError(
            f"the receiver is on host {theirs.name!r} ({theirs.boot_id}), this worker on {ours.name!r} "
            f"({ours.boot_id}): {backend!r} works inside one host, between hosts start both workers with 'tcp'"
        )


def open_memory(pid: int, file: FileRef, backend: str) -> int:
    """Return a descriptor of our own. Raises ProtocolError if the kernel denies access or it is another file."""
    remedy = (
        f"{backend!r} needs both workers under one user and in one process namespace; otherwise start them with 'tcp'"
    )
    try:
        return open_file(pid, file)
    except OtherFileError as error:
        raise ProtocolError(f"{clause(error)}. {remedy}") from error
    except OSError as error:
        raise ProtocolError(f"cannot open the memory of process {pid}: {error.strerror}. {remedy}") from error


def open_key(kind: Callable[[int], Key], pid: int, gate: FileRef, backend: str) -> Key:
    """Open the sender's key of a gate of process `pid`. Raises ProtocolError as `open_memory` does."""
    fd = open_memory(pid, gate, backend)
    try:
        return kind(fd)
    finally:
        os.close(fd)


def region_in(arena: Arena, offset: int, length: int) -> Region:
    """Return a region of the arena. Raises ProtocolError if it lies outside."""
    if offset < 0 or length < 0 or offset + length > arena.num_bytes:
        raise ProtocolError(f"a region of [{offset}, {offset + length}) in a file of {arena.num_bytes} bytes")
    return arena.region(offset, length)


class GatedIncoming:
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
