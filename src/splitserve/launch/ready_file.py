"""How a process tells its starter that it serves: a small JSON file that appears whole, in one moment."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec


class ReadyInfo(msgspec.Struct, frozen=True, kw_only=True):
    pid: int
    port: int
    # Where this machine's processes reach it.
    url: str
    # Workers only.
    scheduler_pids: tuple[int, ...] = ()
    # Of the ranks beside the schedulers, where models are cut over several.
    follower_pids: tuple[int, ...] = ()
    bootstrap_port: int | None = None
    disaggregation_mode: str | None = None


def write_ready_file(path: Path, info: ReadyInfo) -> None:
    """Atomic: readers see nothing or everything."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    partial.write_bytes(msgspec.json.encode(info))
    partial.replace(path)


def read_ready_file(path: Path) -> ReadyInfo | None:
    """None while the file is not there."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=ReadyInfo)
    except FileNotFoundError:
        return None
