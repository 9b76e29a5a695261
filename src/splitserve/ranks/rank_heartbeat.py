"""Heartbeats of ranks: the process that started a rank kills it if it is stopped or cannot run.

A rank sends one byte per second through a named pipe, in a thread of its own, from when its model is loaded until its
process ends. A long step does not delay them (ADR 72). A named pipe also works for a process that was started before
its owner knew its configuration.
"""

from __future__ import annotations

import os
import threading
import time
from contextlib import suppress

# Seconds between two heartbeats, and between two checks by the owner.
HEARTBEAT_SECONDS = 1.0
# Number of checks in a row without a heartbeat after which the owner kills a rank. Checks are counted, not seconds,
# because a stopped machine or owner misses none. The time equals the router's default of --hang-timeout.
MAX_MISSED_HEARTBEATS = 30
# Bytes per read: what a pipe contains if the owner was stopped for hours.
_PIPE_BYTES = 1 << 16


class RankHeartbeats:
    """Named pipe of one rank's heartbeats, in the process that owns the rank. The constructor creates it at `path`."""

    def __init__(self, path: str) -> None:
        os.mkfifo(path, mode=0o600)
        self._reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        # None: the rank has not sent its first heartbeat, because it loads.
        self._num_missed: int | None = None

    def is_missing(self) -> bool:
        """Check the pipe once. Return whether the last MAX_MISSED_HEARTBEATS checks found no heartbeat."""
        try:
            # Empty without a writer: the rank has not begun, or it has ended.
            if os.read(self._reader, _PIPE_BYTES):
                self._num_missed = 0
        except BlockingIOError:
            if self._num_missed is not None:
                self._num_missed += 1
        return (self._num_missed or 0) >= MAX_MISSED_HEARTBEATS

    def close(self) -> None:
        os.close(self._reader)


def send_heartbeats(path: str) -> threading.Thread:
    """Send heartbeats in the returned daemon thread until this process or its owner ends."""
    thread = threading.Thread(target=_send, args=(path,), name="rank-heartbeat", daemon=True)
    thread.start()
    return thread


def _send(path: str) -> None:
    # Any other error: the owner has ended.
    with suppress(OSError):
        writer = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
        while True:
            # The pipe is full if the owner was stopped for hours.
            with suppress(BlockingIOError):
                os.write(writer, b".")
            time.sleep(HEARTBEAT_SECONDS)
