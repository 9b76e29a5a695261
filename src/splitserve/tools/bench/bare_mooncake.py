"""Speed of Mooncake's library alone: the limit for the transfer backend `mooncake`.

Each of two processes has an engine. One writes pieces of its memory into the other's, repeatedly, with the library's
own synchronous calls and settings: one piece at once, many pieces in batches of the size that the library accepts.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from splitserve.core.arena import Arena
from splitserve.tools.bench.limits import Once
from splitserve.transfer.copies import Copies, num_bytes
from splitserve.transfer.transports.mooncake_engine import MooncakeTransferEngine

HOST = "127.0.0.1"
# First word of the line with the receiver's address: the library writes to standard output, too.
_READY = "READY"


@contextmanager
def opened(copies: Copies) -> Iterator[Once]:
    """Open both engines for the same copies. Raises MooncakeError, ConfigError."""
    total_bytes = num_bytes(copies)
    engine, arena = _engine_over(total_bytes)
    # Write to the memory, so that it is not the system's shared page of zeros.
    arena.buffer[:] = b"\x01" * total_bytes
    receiver = subprocess.Popen(
        [sys.executable, "-m", "splitserve.tools.bench.bare_mooncake", "receive", str(total_bytes)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with receiver:
        try:
            session_id, address = _place(receiver)
            # The first write opens the connections and touches the receiver's memory.
            engine.transfer_sync(session_id, arena.address, address, total_bytes)
            sources = (arena.address + copies["src_offset"]).tolist()
            targets = (address + copies["dst_offset"]).tolist()
            pieces = (sources, targets, copies["length"].tolist())
            _seconds(engine, session_id, *pieces)
            yield partial(_seconds, engine, session_id, *pieces)
        finally:
            receiver.kill()


def _seconds(
    engine: MooncakeTransferEngine, session_id: str, sources: list[int], targets: list[int], lengths: list[int]
) -> float:
    begin = time.perf_counter()
    if len(lengths) == 1:
        engine.transfer_sync(session_id, sources[0], targets[0], lengths[0])
    else:
        engine.batch_transfer_sync(session_id, sources, targets, lengths)
    return time.perf_counter() - begin


def _place(receiver: subprocess.Popen[str]) -> tuple[str, int]:
    assert receiver.stdout is not None
    for line in receiver.stdout:
        if line.startswith(_READY):
            session_id, address = json.loads(line[len(_READY) :])
            return session_id, address
    raise ChildProcessError("the receiving process ended before it was ready: see its error above")


def _engine_over(total_bytes: int) -> tuple[MooncakeTransferEngine, Arena]:
    engine, arena = MooncakeTransferEngine(HOST), Arena(total_bytes)
    engine.initialize()
    engine.register(arena.address, total_bytes)
    return engine, arena


def _receive(total_bytes: int) -> None:
    engine, arena = _engine_over(total_bytes)
    sys.stdout.write(_READY + json.dumps([engine.get_session_id(), arena.address]) + "\n")
    sys.stdout.flush()
    # Wait until the measuring process ends.
    sys.stdin.read()


if __name__ == "__main__":
    # `receive TOTAL_BYTES`: run as the second process.
    _receive(int(sys.argv[2]))
