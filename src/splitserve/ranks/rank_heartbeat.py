"""Heartbeats of followers: the owner of a follower's process ends it if it hangs.

A follower sends one byte per second through a pipe, in a thread of its own, from when its shard is loaded until its
process ends. Long steps do not delay them. The driver cannot detect a stopped follower: its own scheduler still answers
the router, while its steps wait for the follower (ADR 72).
"""

from __future__ import annotations

import os
import threading

# Seconds between two heartbeats, and between two checks by the owner.
HEARTBEAT_SECONDS = 1.0
# Checks in a row without a heartbeat, after which a follower hangs. Checks are counted instead of seconds, because a
# machine or an owner that was stopped itself misses none. The time equals the router's default of --hang-timeout.
MAX_MISSED_HEARTBEATS = 30
# Bytes per read: what a pipe contains if the owner was stopped for hours.
_PIPE_BYTES = 1 << 16


class FollowerHeartbeats:
    """Pipe of one follower's heartbeats, in the process that owns it. Call `close_writer` when it has started."""

    def __init__(self) -> None:
        self._reader, self.writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        # None: the follower has not sent its first heartbeat, because it loads.
        self._num_missed: int | None = None

    def close_writer(self) -> None:
        """Close this process's copy of the writing end."""
        os.close(self.writer)

    def is_missing(self) -> bool:
        """Check the pipe once. Return whether the last MAX_MISSED_HEARTBEATS checks found no heartbeat."""
        try:
            os.read(self._reader, _PIPE_BYTES)
            self._num_missed = 0
        except BlockingIOError:
            if self._num_missed is not None:
                self._num_missed += 1
        return (self._num_missed or 0) >= MAX_MISSED_HEARTBEATS

    def close(self) -> None:
        os.close(self._reader)


def send_heartbeats(writer: int) -> threading.Thread:
    """Send heartbeats in the returned daemon thread until this process or its owner ends."""
    thread = threading.Thread(target=_send, args=(writer,), name="rank-heartbeat", daemon=True)
    thread.start()
    return thread


def _send(writer: int) -> None:
    while True:
        try:
            os.write(writer, b".")
        except BlockingIOError:
            # The owner has been stopped for hours.
            pass
        except BrokenPipeError:
            return
        threading.Event().wait(HEARTBEAT_SECONDS)
