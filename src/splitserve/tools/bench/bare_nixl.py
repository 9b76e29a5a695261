"""Speed of NIXL alone, without sessions, fences or threads of ours: the limit for the transfer backend `nixl`.

1. A second process creates an agent over `total_bytes` of memory and writes its metadata and address to standard
   output.
2. The first process writes all of it in one transfer, described piece by piece, until the library reports completion.
   The descriptors are created once, outside the measured time: the library keeps such lists for that.
3. The second process drives its agent during a write, because some links need it, and rests between two writes. Each
   line on its standard input switches this on or off. It ends with its standard input.

The backend's own function creates the agents, with all settings of UCX.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from splitserve.core.arena import Arena
from splitserve.core.layout import Region
from splitserve.tools.bench.limits import Once
from splitserve.transfer.copies import Copies, num_bytes
from splitserve.transfer.transports.memory import Memory

HOST = "127.0.0.1"
# Seconds after which a transfer fails.
TRANSFER_TIMEOUT = 60.0
# Transfers before the measured ones: the first one connects.
WARM_UP = 2

_READY = b"READY "


@contextmanager
def opened(copies: Copies) -> Iterator[Once]:
    """Open both agents for the same copies. Raises ImportError without the library."""
    from splitserve.transfer.transports.nixl import new_agent

    total_bytes = num_bytes(copies)
    source = _filled(total_bytes)
    agent = new_agent(HOST, Memory([source.region()]))
    with _peer(total_bytes) as (metadata, address, switch):
        name = agent.add_remote_agent(metadata)
        ours = agent.get_xfer_descs(_descriptors(source.address, copies["src_offset"], copies["length"]), "DRAM")
        theirs = agent.get_xfer_descs(_descriptors(address, copies["dst_offset"], copies["length"]), "DRAM")

        def once() -> float:
            switch()
            try:
                return _transfer(agent, ours, theirs, name)
            finally:
                switch()

        for _ in range(WARM_UP):
            once()
        yield once
        agent.remove_remote_agent(name)


def _descriptors(base: int, offsets: NDArray[np.uint64], lengths: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return descriptors in the library's form: address, length, device 0."""
    return np.stack([np.uint64(base) + offsets, lengths, np.zeros_like(lengths)], axis=1)


def _transfer(agent: Any, ours: Any, theirs: Any, name: str) -> float:
    start = time.perf_counter()
    request = agent.initialize_xfer("WRITE", ours, theirs, name)
    state = agent.transfer(request)
    while state == "PROC" and time.perf_counter() - start < TRANSFER_TIMEOUT:
        state = agent.check_xfer_state(request)
    seconds = time.perf_counter() - start
    request.release()
    if state != "DONE":
        raise RuntimeError(f"the library ended a transfer with {state} after {seconds:.1f} s")
    return seconds


def _filled(num_bytes: int) -> Arena:
    """Return memory with pages that the system has allocated."""
    arena = Arena(num_bytes)
    arena.buffer[:] = b"\x01" * num_bytes
    return arena


@contextmanager
def _peer(total_bytes: int) -> Iterator[tuple[bytes, int, Callable[[], object]]]:
    """Run the second process.

    Yield its agent's metadata, its memory's address, and a switch to drive its agent or rest.
    """
    command = [sys.executable, "-m", "splitserve.tools.bench.bare_nixl", "--target", str(total_bytes)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        # Libraries write to standard output, too.
        while line and not line.startswith(_READY):
            line = process.stdout.readline()
        if not line:
            raise RuntimeError(f"the second process ended with code {process.wait()}")
        size, address = line[len(_READY) :].split()
        turn = partial(os.write, process.stdin.fileno(), b"\n")
        yield process.stdout.read(int(size)), int(address), turn
    finally:
        process.stdin.close()
        process.wait(TRANSFER_TIMEOUT)
        process.stdout.close()


def _be_target(total_bytes: int) -> None:
    from splitserve.transfer.transports.nixl import new_agent

    target = _filled(total_bytes)
    agent = new_agent(HOST, Memory([Region(target.address, total_bytes)]))
    metadata = agent.get_agent_metadata()
    sys.stdout.buffer.write(_READY + b"%d %d\n" % (len(metadata), target.address) + metadata)
    sys.stdout.buffer.flush()
    asked = select.poll()
    asked.register(sys.stdin.fileno(), select.POLLIN)
    while os.read(sys.stdin.fileno(), 1):
        while not asked.poll(0):
            agent.get_new_notifs()
        os.read(sys.stdin.fileno(), 1)


if __name__ == "__main__":
    # `--target TOTAL_BYTES`: run as the second process.
    _be_target(int(sys.argv[2]))
