"""A cluster's status in a terminal."""

from __future__ import annotations

import msgspec
from rich.console import Console
from rich.table import Table

from splitserve.cluster.control import ClusterStatus


def show_status(status: ClusterStatus, *, as_json: bool) -> None:
    """On standard output."""
    console = Console(highlight=False)
    if as_json:
        console.print_json(msgspec.json.encode(status).decode())
        return
    table = Table("process", "state", "node", "url", "pid", "restarts", "")
    # Whoever wants a part of it copies it.
    table.columns[3].min_width = max((len(process.url or "") for process in status.processes), default=0)
    for process in status.processes:
        pid = "" if process.pid is None else str(process.pid)
        table.add_row(
            process.name, process.state, process.node, process.url, pid, str(process.num_restarts), process.detail
        )
    console.print(table)
    wanted = ", ".join(f"{count} {pool}" for pool, count in status.replicas.items())
    how = "going down" if status.is_ending else "ready" if status.is_ready else "not ready"
    console.print(f"{status.name}: {how}; wanted: {wanted}; router: {status.router_url or 'not there'}")
