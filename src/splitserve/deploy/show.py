"""Status of a cluster as text for a terminal."""

from __future__ import annotations

import msgspec
import typer

from splitserve.deploy.control import ClusterStatus, ProcessStatus

_HEAD = ("process", "role", "state", "restarts", "pid", "node", "url", "model", "dtype", "KV pool", "")


def show_status(status: ClusterStatus, *, as_json: bool) -> None:
    """Print the status on standard output."""
    typer.echo(msgspec.json.encode(status).decode() if as_json else describe(status))


def describe(status: ClusterStatus) -> str:
    """Return the status as lines of text. They are not cut, whatever the width of the terminal."""
    rows = [_HEAD, *(_row(process) for process in status.processes)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(_HEAD))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([*lines, summary(status)])


def summary(status: ClusterStatus) -> str:
    """Return one line: the actual state of the cluster, and the desired one."""
    wanted = ", ".join(f"{count} {pool}" for pool, count in status.replicas.items() if count)
    how = "going down" if status.is_ending else "ready" if status.is_ready else "not ready"
    return f"{status.name}: {how}; wanted: {wanted}; router: {status.router_url or 'not there'}"


def _row(process: ProcessStatus) -> tuple[str, ...]:
    return (
        process.name,
        process.pool,
        process.state,
        str(process.num_restarts),
        "" if process.pid is None else str(process.pid),
        process.node,
        process.url or "",
        process.model or "",
        process.dtype or "",
        _kv_pool(process),
        process.detail,
    )


def _kv_pool(process: ProcessStatus) -> str:
    if process.kv_pool_tokens is None or process.kv_pool_bytes is None:
        return ""
    return f"{process.kv_pool_tokens} tokens, {process.kv_pool_bytes / 1e6:.0f} MB"
