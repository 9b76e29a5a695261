"""Interface between supervisor and the place of its processes: this machine, or the nodes of a Ray cluster.

No call waits for a process to start, serve or end: `observe` returns that later.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Protocol

import msgspec

from splitserve.process.ready_file import ReadyInfo

# In `ProcessSpec.args`: replaced by the address of the process's node.
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
    """Specification of one process, for any node. Its repr has no secret."""

    name: str
    # Arguments of `splitserve`.
    args: tuple[str, ...]
    # Content of the files for the process, by the option that names them; not part of the command line.
    secrets: Secrets
    env: dict[str, str] = {}
    # Command that runs instead of `splitserve`. Empty: splitserve.
    program: tuple[str, ...] = ()
    # On this machine: listening socket that the process inherits. None: it has none.
    listen_fd: int | None = None
    # Resources for all its ranks, reserved on the node if the placer supports it.
    num_cpus: int = 0
    num_gpus: int = 0
    # Whether it runs on the supervisor's node, if there is a choice.
    is_near: bool = False


class Observation(msgspec.Struct, frozen=True, kw_only=True):
    """The latest known state of a process."""

    phase: Phase
    node: str = ""
    pid: int | None = None
    # Content of its ready file.
    ready: ReadyInfo | None = None
    # Why it is pending, ended or lost, as text for operators.
    detail: str = ""
    # The end of its log, if it has ended.
    log_tail: str = ""
    # Exit code if it has ended by itself; negative: the signal.
    exit_code: int | None = None


class Placer(Protocol):
    """Placer of processes. Called from several threads, but never for one process at the same time."""

    def start(self, spec: ProcessSpec) -> None:
        """Start a process with an unused name. `observe` returns a failure."""
        ...

    def observe(self) -> Mapping[str, Observation]:
        """Return the state of everything that was started and not removed."""
        ...

    def terminate(self, name: str) -> None:
        """Drain a process: it accepts no new requests, and ends after its running requests."""
        ...

    def remove(self, name: str) -> None:
        """End a process now, with all that it started, and release its resources. May take half a minute."""
        ...

    def close(self) -> None:
        """Remove all remaining processes, and release all resources."""
        ...
