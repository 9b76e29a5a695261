"""The file by which a process reports that it serves: a small JSON object that appears whole, in one moment."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec


class ReadyInfo(msgspec.Struct, frozen=True, kw_only=True):
    pid: int
    port: int
    # By which processes of this machine reach it.
    url: str
    # All that follows is of workers only.
    scheduler_pids: tuple[int, ...] = ()
    # Ranks beside the schedulers, if a model is sharded.
    follower_pids: tuple[int, ...] = ()
    bootstrap_port: int | None = None
    disaggregation_mode: str | None = None
    # Name under which clients request the model.
    model: str | None = None
    dtype: str | None = None
    # Size of the KV pool, of all data parallel ranks together.
    kv_pool_tokens: int | None = None
    kv_pool_bytes: int | None = None


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
