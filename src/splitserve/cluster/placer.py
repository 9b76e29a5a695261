"""Where processes run, as the supervisor sees it: this machine, or the nodes of a Ray cluster.

Nothing here waits for a process to start, serve or end: `observe` returns that later.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Protocol

import msgspec

from splitserve.launch.ready_file import ReadyInfo

# In `ProcessSpec.args`: the address of the node that the process runs on.
NODE_ADDRESS = "{node}"


class Phase(StrEnum):
    # There is no room for it yet.
    PENDING = "pending"
    LOADING = "loading"
    READY = "ready"
    ENDED = "ended"
    # Its node is gone, or does not answer any more.
    LOST = "lost"


class Secrets(msgspec.Struct, frozen=True):
    by_option: dict[str, bytes] = {}

    def __repr__(self) -> str:
        return f"Secrets({', '.join(self.by_option)})"


class ProcessSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One process as data, for any node. Its repr has no secret."""

    name: str
    # Of `splitserve`.
    args: tuple[str, ...]
    # Content of the files that are given to it, by the option that names them: they travel beside the command line.
    secrets: Secrets
    env: dict[str, str] = {}
    # Command that runs instead of `splitserve`. Empty: splitserve.
    program: tuple[str, ...] = ()
    # On this machine: listening socket that the process inherits. None: it has none.
    listen_fd: int | None = None
    # Of the node, for all its ranks; set aside where the placer can.
    num_cpus: int = 0
    num_gpus: int = 0
    # It runs beside the supervisor, if there is a choice.
    is_near: bool = False


class Observation(msgspec.Struct, frozen=True, kw_only=True):
    """The latest known state of a process."""

    phase: Phase
    node: str = ""
    pid: int | None = None
    # What it wrote when it was ready.
    ready: ReadyInfo | None = None
    # Why it is pending, ended or lost, for people.
    detail: str = ""
    # The end of its log, if it has ended.
    log_tail: str = ""
    # If it has ended by itself; negative: the signal.
    exit_code: int | None = None


class Placer(Protocol):
    """Its calls come from threads, those about one process never at the same time."""

    def start(self, spec: ProcessSpec) -> None:
        """Start a process whose name is free. A failure is observed."""
        ...

    def observe(self) -> Mapping[str, Observation]:
        """Return the state of everything that was started and not removed."""
        ...

    def terminate(self, name: str) -> None:
        """Let it drain: it accepts nothing new, and ends when its requests have ended."""
        ...

    def remove(self, name: str) -> None:
        """End it now, if it still runs, with all that it started, and free its resources. May take half a minute."""
        ...

    def close(self) -> None:
        """Remove all processes that are left, and release everything."""
        ...
