"""Limits of the transports: the fastest way to move the same bytes on this machine without Splitserve's transports.

The limit of a transport with our own code is the same bytes in one piece, because gathering and scattering are part of
our work. The limit of a transport over a library is that library with the same copies, in its call for many of them:
our additions must cost nothing, and coalescing or staging must win.

To add one, write a context manager that takes the copies, and add a line to `LIMITS`. It yields a function that writes
all copies once, from region 0 into region 0, and returns the seconds. First writes, which connect and touch memory, are
done before. Between two calls it uses no core, because our transport is measured then. Libraries are imported only when
they are measured.
"""

from __future__ import annotations

import ctypes
import os
import select
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from numpy.typing import NDArray

from splitserve.core.machine import Arena
from splitserve.tools.bench.second_process import SecondProcess
from splitserve.tools.bench.stats import seconds_of
from splitserve.transfer.copies import Copies, num_bytes
from splitserve.transfer.transports.backend import Memory
from splitserve.transfer.transports.sockets import set_receive_timeout, set_send_timeout, tune

# Writes all copies once and returns the seconds.
Once = Callable[[], float]
OpenLimit = Callable[[Copies], AbstractContextManager[Once]]

HOST = "127.0.0.1"
# Seconds for the second process to be ready, and for one write.
_TIMEOUT = 120.0
_WRITE_TIMEOUT = 60.0
# Bytes per call of raw sockets: up to twice the throughput of one call over everything (docs/log.md).
SEND_BYTES = 2 << 20


@dataclass(frozen=True, slots=True)
class Limit:
    """Limit of one backend."""

    # Name in tables: what moves the bytes, and in which pieces.
    name: str
    opened: OpenLimit


def _filled(num_bytes: int, *, shareable: bool = False) -> Arena:
    """Return memory with pages that the system has allocated."""
    arena = Arena(num_bytes, shareable=shareable)
    ctypes.memset(arena.address, 1, num_bytes)
    return arena


@contextmanager
def one_memcpy(copies: Copies) -> Iterator[Once]:
    """Copy one block from one shareable arena into another, by one thread."""
    total_bytes = num_bytes(copies)
    source, target = _filled(total_bytes, shareable=True), _filled(total_bytes, shareable=True)

    once = partial(seconds_of, partial(ctypes.memmove, target.address, source.address, total_bytes))
    once()
    yield once


@contextmanager
def raw_sockets(copies: Copies) -> Iterator[Once]:
    """Send one block over one TCP connection, `SEND_BYTES` per call. The receiver answers each block with one byte.

    Socket buffers, options and the kind of memory are those of the transports. With other memory, or with socket
    buffers set only after connecting, the same loop is up to twice as slow (docs/log.md). A limit that is too low makes
    the transports look too good. Raises OSError if the receiver is lost.
    """
    total_bytes = num_bytes(copies)
    with socket.create_server((HOST, 0)) as listener:
        # Accepted sockets inherit the buffers. The window's scale is negotiated in the handshake.
        tune(listener)
        listener.settimeout(_TIMEOUT)
        with SecondProcess(_receive_blocks, listener.getsockname()[1], total_bytes):
            sock, _ = listener.accept()
            with sock:
                _prepare(sock)
                once = partial(seconds_of, partial(_send_block, sock, _filled(total_bytes).buffer))
                once()
                yield once


def _send_block(sock: socket.socket, source: memoryview) -> None:
    for start in range(0, len(source), SEND_BYTES):
        sock.sendall(source[start : start + SEND_BYTES])
    if not sock.recv(1):
        raise ConnectionError("the receiver of the raw sockets ended early")


def _receive_blocks(connection: Connection, port: int, total_bytes: int) -> None:
    target = Arena(total_bytes).buffer
    with socket.socket() as sock:
        tune(sock)
        sock.settimeout(_TIMEOUT)
        sock.connect((HOST, port))
        _prepare(sock)
        while True:
            got = 0
            while got < total_bytes:
                n = sock.recv_into(target[got:], total_bytes - got, socket.MSG_WAITALL)
                if n == 0:
                    return
                got += n
            sock.sendall(b"\1")


def _prepare(sock: socket.socket) -> None:
    """Make the socket blocking with the kernel's timeouts: those of Python would add a poll to each call."""
    sock.settimeout(None)
    set_send_timeout(sock, _TIMEOUT)
    set_receive_timeout(sock, _TIMEOUT)


@contextmanager
def bare_mooncake(copies: Copies) -> Iterator[Once]:
    """Write with Mooncake's own synchronous calls and settings: one piece at once, many pieces in batches.

    Raises MooncakeError, ConfigError.
    """
    engine, arena = _mooncake_engine(num_bytes(copies))
    with SecondProcess(_receive_by_mooncake, num_bytes(copies)) as process:
        session_id, address = process.receive()
        sources = (arena.address + copies["src_offset"]).tolist()
        targets = (address + copies["dst_offset"]).tolist()
        lengths = copies["length"].tolist()

        def write() -> None:
            if len(lengths) == 1:
                engine.transfer_sync(session_id, sources[0], targets[0], lengths[0])
            else:
                engine.batch_transfer_sync(session_id, sources, targets, lengths)

        # The first write opens the connections and touches the receiver's memory.
        engine.transfer_sync(session_id, arena.address, address, num_bytes(copies))
        write()
        yield partial(seconds_of, write)


def _mooncake_engine(total_bytes: int) -> tuple[Any, Arena]:
    from splitserve.transfer.transports.mooncake_engine import MooncakeTransferEngine

    engine, arena = MooncakeTransferEngine(HOST), _filled(total_bytes)
    engine.initialize()
    engine.register(arena.address, total_bytes)
    return engine, arena


def _receive_by_mooncake(connection: Connection, total_bytes: int) -> None:
    engine, arena = _mooncake_engine(total_bytes)
    connection.send((engine.get_session_id(), arena.address))
    # Return when the measuring process closes the connection.
    connection.poll(None)


@contextmanager
def bare_nixl(copies: Copies) -> Iterator[Once]:
    """Write all pieces in one transfer of NIXL, until the library reports completion.

    The descriptors are created once, outside the measured time: the library keeps such lists for that. The second
    process drives its agent during a write, because some links need it, and rests between two writes. The backend's own
    function creates the agents, with all settings of UCX. Raises ImportError without the library.
    """
    from splitserve.transfer.transports.nixl import new_agent

    source = _filled(num_bytes(copies))
    agent = new_agent(HOST, Memory([source.region()]))
    with SecondProcess(_receive_by_nixl, num_bytes(copies)) as process:
        metadata, address = process.receive()
        name = agent.add_remote_agent(metadata)
        ours = agent.get_xfer_descs(_descriptors(source.address, copies["src_offset"], copies["length"]), "DRAM")
        theirs = agent.get_xfer_descs(_descriptors(address, copies["dst_offset"], copies["length"]), "DRAM")

        def once() -> float:
            os.write(process.connection.fileno(), b"\n")
            try:
                return _transfer_by_nixl(agent, ours, theirs, name)
            finally:
                os.write(process.connection.fileno(), b"\n")

        # The first one connects.
        for _ in range(2):
            once()
        yield once
        agent.remove_remote_agent(name)


def _descriptors(base: int, offsets: NDArray[np.uint64], lengths: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return descriptors in the library's form: address, length, device 0."""
    return np.stack([np.uint64(base) + offsets, lengths, np.zeros_like(lengths)], axis=1)


def _transfer_by_nixl(agent: Any, ours: Any, theirs: Any, name: str) -> float:
    began = time.perf_counter()
    request = agent.initialize_xfer("WRITE", ours, theirs, name)
    state = agent.transfer(request)
    while state == "PROC" and time.perf_counter() - began < _WRITE_TIMEOUT:
        state = agent.check_xfer_state(request)
    seconds = time.perf_counter() - began
    request.release()
    if state != "DONE":
        raise RuntimeError(f"the library ended a transfer with {state} after {seconds:.1f} s")
    return seconds


def _receive_by_nixl(connection: Connection, total_bytes: int) -> None:
    from splitserve.transfer.transports.nixl import new_agent

    target = _filled(total_bytes)
    agent = new_agent(HOST, Memory([target.region()]))
    connection.send((agent.get_agent_metadata(), target.address))
    # Each byte switches between driving the agent and resting. The connection's end stops both.
    switch = select.poll()
    switch.register(connection.fileno(), select.POLLIN)
    while os.read(connection.fileno(), 1):
        while not switch.poll(0):
            agent.get_new_notifs()
        os.read(connection.fileno(), 1)


_SOCKETS = Limit("one piece by calls of 2 MiB through raw sockets", raw_sockets)
_LIBRARY = "the same pieces through the bare library"
# Backends that move host memory between two processes, which `bench transfer` can measure.
LIMITS = {
    "tcp": _SOCKETS,
    "shm": Limit("one memcpy", one_memcpy),
    "gloo": _SOCKETS,
    "mooncake": Limit(_LIBRARY, bare_mooncake),
    "mooncake-direct": Limit(_LIBRARY, bare_mooncake),
    "nixl": Limit(_LIBRARY, bare_nixl),
}
