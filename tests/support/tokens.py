"""Files with cluster tokens."""

from __future__ import annotations

from pathlib import Path

from splitserve.process.cluster_token import new_token, write_secret_file


def write_token_file(path: Path) -> None:
    write_secret_file(path, new_token() + b"\n")
