"""A cluster's status in a terminal."""

from __future__ import annotations

import msgspec
import typer

from splitserve.cluster.control import ClusterStatus, ProcessStatus

_HEAD = ("process", "state", "restarts", "pid", "node", "url", "")


def show_status(status: ClusterStatus, *, as_json: bool) -> None:
    """On standard output."""
    typer.echo(msgspec.json.encode(status).decode() if as_json else describe(status))


def describe(status: ClusterStatus) -> str:
    """Lines for people; nothing is cut, whatever the terminal."""
    rows = [_HEAD, *(_row(process) for process in status.processes)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(_HEAD))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([*lines, summary(status)])


def summary(status: ClusterStatus) -> str:
    """One line: whether it is as it shall be, and what that is."""
    wanted = ", ".join(f"{count} {pool}" for pool, count in status.replicas.items())
    how = "going down" if status.is_ending else "ready" if status.is_ready else "not ready"
    return f"{status.name}: {how}; wanted: {wanted}; router: {status.router_url or 'not there'}"


def _row(process: ProcessStatus) -> tuple[str, ...]:
    pid = "" if process.pid is None else str(process.pid)
    restarts = str(process.num_restarts)
    return process.name, process.state, restarts, pid, process.node, process.url or "", process.detail
