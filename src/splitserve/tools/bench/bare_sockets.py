"""Raw sockets: the highest throughput of one TCP connection between two processes of this machine.

1. The receiver, a separate process, connects.
2. In each round the sender sends one buffer, SEND_BYTES per call. The receiver fills one of the same size and sends one
   byte. The first round touches all memory and is not counted.
3. The receiver ends with the connection.

Socket buffers, options and the kind of memory are those of the transports. With other memory, or with socket buffers
set only after connecting, the same loop is up to twice as slow (docs/log.md). A limit that is too low makes the
transports look too good. `python -m splitserve.tools.bench.bare_sockets BYTES [REPEATS]` prints the throughput as JSON.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import numpy as np

from splitserve.core.arena import Arena
from splitserve.tools.bench.limits import Once
from splitserve.tools.bench.stats import median
from splitserve.transfer.copies import Copies, copy_table, num_bytes
from splitserve.transfer.transports.sockets import set_receive_timeout, set_send_timeout, tune

# Seconds for the receiver to connect, and for one round.
_TIMEOUT = 120.0
# Fastest size: up to twice the throughput of one call over everything (docs/log.md).
SEND_BYTES = 2 << 20


@contextmanager
def opened(copies: Copies) -> Iterator[Once]:
    """Open a connection for the bytes of all copies in one piece. Raises OSError if the receiver is lost."""
    total_bytes = num_bytes(copies)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        # Accepted sockets inherit the buffers. The window's scale is negotiated in the handshake.
        tune(listener)
        listener.settimeout(_TIMEOUT)
        port = listener.getsockname()[1]
        command = [sys.executable, "-m", "splitserve.tools.bench.bare_sockets", "receive", str(port), str(total_bytes)]
        with subprocess.Popen(command) as receiver:
            try:
                sock, _ = listener.accept()
                with sock:
                    _prepare(sock)
                    source = Arena(total_bytes).buffer
                    np.frombuffer(source, dtype=np.uint8)[:] = 1
                    _send(sock, source)
                    yield partial(_send, sock, source)
            finally:
                receiver.kill()


def _send(sock: socket.socket, source: memoryview) -> float:
    began = time.perf_counter()
    for start in range(0, len(source), SEND_BYTES):
        sock.sendall(source[start : start + SEND_BYTES])
    if not sock.recv(1):
        raise ConnectionError("the receiver of the raw sockets ended early")
    return time.perf_counter() - began


def _receive(port: int, total_bytes: int) -> None:
    target = Arena(total_bytes).buffer
    with socket.socket() as sock:
        tune(sock)
        sock.settimeout(_TIMEOUT)
        sock.connect(("127.0.0.1", port))
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


def main(words: list[str]) -> None:
    if words[0] == "receive":
        _receive(*map(int, words[1:]))
        return
    total_bytes, repeats = int(words[0]), int(words[1]) if len(words) > 1 else 5
    with opened(copy_table([(0, 0, 0, 0, total_bytes)])) as once:
        gb_per_s = total_bytes / median([once() for _ in range(repeats)]) / 1e9
    figures = {"total_bytes": total_bytes, "repeats": repeats, "gb_per_s": gb_per_s}
    sys.stdout.write(json.dumps(figures) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
