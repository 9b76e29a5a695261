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
# Missed heartbeats after which a rank counts as silent, and its worker as not ready.
SILENT_HEARTBEATS = 5
# Bytes per read: what a pipe contains if the owner was stopped for hours.
_PIPE_BYTES = 1 << 16


class RankHeartbeats:
    """Named pipe of one rank's heartbeats, in the process that owns the rank. The constructor creates it at `path`."""

    def __init__(self, path: str) -> None:
        os.mkfifo(path, mode=0o600)
        self._reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        # Whether the rank has sent its first heartbeat. Before, it loads.
        self._has_begun = False
        # Checks in a row that found no heartbeat.
        self.num_missed = 0

    def is_missing(self) -> bool:
        """Check the pipe once. Return whether the last MAX_MISSED_HEARTBEATS checks found no heartbeat."""
        try:
            # Empty without a writer: the rank has not begun, or it has ended.
            if os.read(self._reader, _PIPE_BYTES):
                self._has_begun, self.num_missed = True, 0
        except BlockingIOError:
            self.num_missed += self._has_begun
        return self.num_missed >= MAX_MISSED_HEARTBEATS

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
