"""Ready file: a small JSON object, written atomically when a process serves."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec


class ReadyInfo(msgspec.Struct, frozen=True, kw_only=True):
    pid: int
    port: int
    # URL at which processes of this machine reach it.
    url: str
    # The fields below are for workers only.
    scheduler_pids: tuple[int, ...] = ()
    # Ranks beside the schedulers, if a model is sharded.
    follower_pids: tuple[int, ...] = ()
    bootstrap_port: int | None = None
    disaggregation_mode: str | None = None
    # Name under which clients request the model.
    model: str | None = None
    dtype: str | None = None
    # Size of the KV pools of all data parallel ranks together.
    kv_pool_tokens: int | None = None
    kv_pool_bytes: int | None = None


def write_ready_file(path: Path, info: ReadyInfo) -> None:
    """Write the file atomically: readers find no file or a complete one."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    partial.write_bytes(msgspec.json.encode(info))
    partial.replace(path)


def read_ready_file(path: Path) -> ReadyInfo | None:
    """Return the content of the file. None: it does not exist yet."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=ReadyInfo)
    except FileNotFoundError:
        return None
