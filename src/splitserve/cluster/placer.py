"""What the supervisor needs of a place where processes run: this machine, or the nodes of a Ray cluster.

Nothing here waits for a process to start, serve or end: that shows in what `observe` tells later.
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
    """One process as data, for whichever node it comes to. Its repr has no secret."""

    name: str
    # Of `splitserve`.
    args: tuple[str, ...]
    # Content of the files that are given to it, by the option that names them: they travel beside the command line.
    secrets: Secrets
    env: dict[str, str] = {}
    # Of the node, for all its ranks; set aside where the placer can.
    num_cpus: int = 0
    num_gpus: int = 0
    # It belongs beside the supervisor, where there is a choice.
    is_near: bool = False


class Observation(msgspec.Struct, frozen=True, kw_only=True):
    """How a process is, as far as is known now."""

    phase: Phase
    node: str = ""
    pid: int | None = None
    # What it said when it was ready.
    ready: ReadyInfo | None = None
    # Why it is pending, ended or lost, for people.
    detail: str = ""
    # The end of its log, where it has ended.
    log_tail: str = ""
    # Where it has ended by itself, negative: the signal.
    exit_code: int | None = None


class Placer(Protocol):
    """Its calls come from threads, those about one process never at the same time."""

    def start(self, spec: ProcessSpec) -> None:
        """Nothing of that name is there. What goes wrong is observed."""
        ...

    def observe(self) -> Mapping[str, Observation]:
        """Everything that was started and not removed."""
        ...

    def terminate(self, name: str) -> None:
        """It shall take nothing new and end when what runs has ended."""
        ...

    def remove(self, name: str) -> None:
        """End it now, if it still runs, with all that it started; give back its place. May take half a minute."""
        ...

    def close(self) -> None:
        """Remove all that is left, and let go of everything."""
        ...
