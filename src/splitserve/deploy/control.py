"""Control interface of the supervisor for `splitserve cluster scale`, `down` and `status`: HTTP over a Unix socket.

Only this user can access the folder of the socket, so no key and no port are needed. The supervisor owns the folder
(`process/owned_folder.py`), so a name has one cluster at a time. The folder of a killed supervisor is removed.
"""

from __future__ import annotations

import http.client
import itertools
import os
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing, suppress
from pathlib import Path
from typing import Any, Protocol

import msgspec
from aiohttp import web
from rich.console import Console

from splitserve.core.errors import ConfigError, SplitserveError, WorkerUnavailableError, clause
from splitserve.core.options import size_text
from splitserve.deploy.config import ClusterConfig
from splitserve.deploy.reconciler import SlotState
from splitserve.process.owned_folder import (
    RUN_FOLDER_VARIABLE,
    FolderTakenError,
    OwnedFolder,
    remove_run_folder,
    run_folder,
)

# Seconds in which the supervisor must answer.
_ANSWER_SECONDS = 30.0
# Seconds in which it usually closes a connection without a request.
_CLOSE_SECONDS = 1.0
_SOCKET_NAME = "control.sock"
DEFAULT_NAME = ClusterConfig().name
_NUM_ATTEMPTS = 10
_OTHER_FOLDER = f"name another folder with {RUN_FOLDER_VARIABLE}"
# Columns of `status`.
_HEAD = ("process", "role", "state", "restarts", "pid", "node", "url", "model", "dtype", "device", "KV pool", "detail")


class ProcessStatus(msgspec.Struct, frozen=True, kw_only=True):
    """State of one process, for `status`."""

    name: str
    # A pool's name, or "router".
    pool: str
    # A SlotState. For a ready worker to which the router sends no requests: draining, switching or unhealthy.
    state: str
    node: str
    url: str | None
    pid: int | None
    num_restarts: int
    detail: str
    # On ready workers only: name of the model for clients, dtype, quantization, device, and size of the KV pool.
    model: str | None = None
    dtype: str | None = None
    quantization: str | None = None
    device: str | None = None
    kv_pool_tokens: int | None = None
    kv_pool_bytes: int | None = None


class ClusterStatus(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    pid: int
    router_url: str | None
    # All desired processes serve, the router sends requests to all workers, and there are no other processes.
    is_ready: bool
    # Whether the cluster is shutting down.
    is_ending: bool
    # Desired replicas by pool.
    replicas: dict[str, int]
    processes: list[ProcessStatus]
    # Folder with a log per process. None: the logs are on other nodes.
    log_folder: str | None = None

    @property
    def failed(self) -> list[str]:
        """Return the processes that are not started again."""
        return [process.name for process in self.processes if process.state == SlotState.FAILED]


class Controlled(Protocol):
    async def status(self) -> ClusterStatus: ...

    async def scale(self, replicas: dict[str, Any]) -> None: ...

    def down(self, *, now: bool) -> None: ...


def socket_path(name: str) -> Path:
    """Return the socket of the supervisor of this user's cluster of that name. It may not exist.

    Raises ConfigError if its folder is open to other users.
    """
    folder = run_folder()
    with suppress(FileNotFoundError):
        found = folder.lstat()
        if found.st_uid != os.getuid() or found.st_mode & 0o077 or folder.is_symlink():
            raise ConfigError(f"{folder} is open to others: chmod 700 it, or name another with {RUN_FOLDER_VARIABLE}")
    return folder / name / _SOCKET_NAME


@asynccontextmanager
async def control_server(name: str, controlled: Controlled) -> AsyncIterator[None]:
    """Serve requests while the context is open. Raises ConfigError if a cluster of that name is up."""
    folder = _own_folder(name)
    path = folder.path / _SOCKET_NAME
    runner = web.AppRunner(_app(controlled), access_log=None, handle_signals=False, shutdown_timeout=1.0)
    try:
        # Left by a supervisor that was killed.
        path.unlink(missing_ok=True)
        await runner.setup()
        try:
            await web.UnixSite(runner, str(path)).start()
        except OSError as error:
            # For example: the path is too long for a socket.
            raise ConfigError(f"{path}: {error.strerror or error}; {_OTHER_FOLDER}") from None
        yield
    finally:
        await runner.cleanup()
        folder.close()
        remove_run_folder()


def _own_folder(name: str) -> OwnedFolder:
    """Return the folder of a cluster. Raises ConfigError if another supervisor owns it."""
    for attempt in itertools.count(1):
        try:
            run_folder().mkdir(mode=0o700, exist_ok=True)
            return OwnedFolder(socket_path(name).parent)
        except FolderTakenError:
            raise ConfigError(
                f"a cluster {name!r} is up: splitserve cluster down --name {name}, or choose another name"
            ) from None
        except OSError as error:
            # Another process may have removed the folder of all clusters while it was empty.
            if not isinstance(error, FileNotFoundError) or attempt == _NUM_ATTEMPTS:
                raise ConfigError(f"{run_folder()}: {error.strerror or error}; {_OTHER_FOLDER}") from None
    raise AssertionError("unreachable")


def _app(controlled: Controlled) -> web.Application:
    async def handle(request: web.Request) -> web.Response:
        try:
            if request.path == "/scale":
                await controlled.scale(msgspec.json.decode(await request.read(), type=dict[str, int]))
            elif request.path == "/down":
                controlled.down(now=request.query.get("now") == "true")
            body = msgspec.json.encode(await controlled.status())
        except (SplitserveError, msgspec.MsgspecError) as error:
            return web.Response(text=str(error), status=400)
        return web.Response(body=body, content_type="application/json")

    app = web.Application()
    app.add_routes([web.get("/status", handle), web.post("/scale", handle), web.post("/down", handle)])
    return app


def find_cluster(name: str | None) -> ControlClient:
    """Return the client of a cluster. `name` None: the default name, or the only other cluster of this user."""
    if name is None and not _accepts(socket_path(DEFAULT_NAME)):
        running = [path for path in run_folder().glob(f"*/{_SOCKET_NAME}") if _accepts(path)]
        if len(running) == 1:
            name = running[0].parent.name
    return ControlClient(name or DEFAULT_NAME)


def _accepts(path: Path) -> bool:
    """Return whether a supervisor listens at the socket. A killed one leaves the file."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(_ANSWER_SECONDS)
        try:
            sock.connect(str(path))
        except OSError:
            return False
        # Wait until it has closed the connection. With Python 3.11, a server that ends while it accepts leaks a socket.
        sock.settimeout(_CLOSE_SECONDS)
        with suppress(OSError):
            sock.shutdown(socket.SHUT_WR)
            sock.recv(1)
    return True


class ControlClient:
    """Client of a supervisor. Raises ConfigError if that rejects an order, WorkerUnavailableError if there is none."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._path = socket_path(name)

    def status(self) -> ClusterStatus:
        return self._send("GET", "/status")

    def scale(self, replicas: dict[str, int]) -> ClusterStatus:
        return self._send("POST", "/scale", msgspec.json.encode(replicas))

    def down(self, *, now: bool) -> ClusterStatus:
        return self._send("POST", f"/down?now={str(now).lower()}")

    def is_up(self) -> bool:
        return self._path.exists()

    def _send(self, method: str, path: str, body: bytes = b"") -> ClusterStatus:
        try:
            with closing(_UnixConnection(self._path)) as connection:
                connection.request(method, path, body)
                answer = connection.getresponse()
                content = answer.read()
        except (OSError, http.client.HTTPException) as error:
            names = sorted(path.parent.name for path in run_folder().glob(f"*/{_SOCKET_NAME}"))
            others = ", ".join(name for name in names if name != self.name)
            remedy = f"--name selects another of this user: {others}" if others else "start one, as this user"
            raise WorkerUnavailableError(
                f"no cluster {self.name!r} answers at {self._path} ({error}): {remedy}; if it was started with "
                f"{RUN_FOLDER_VARIABLE}, set that here, too"
            ) from None
        if answer.status != 200:
            raise ConfigError(content.decode())
        return msgspec.json.decode(content, type=ClusterStatus)


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: Path) -> None:
        super().__init__("cluster", timeout=_ANSWER_SECONDS)
        self._path = path

    def connect(self) -> None:
        # If this fails, `close` closes the socket.
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(_ANSWER_SECONDS)
        self.sock.connect(str(self._path))


def describe(status: ClusterStatus) -> str:
    """Return the status as lines of text. They are not cut, whatever the width of the terminal."""
    rows = [list(_HEAD), *(_row(process) for process in status.processes)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(_HEAD))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    logs = [] if status.log_folder is None else [f"logs: {status.log_folder}"]
    return "\n".join([*lines, *logs, summary(status)])


def summary(status: ClusterStatus) -> str:
    """Return one line: the actual state of the cluster, and the desired one."""
    wanted = ", ".join(f"{count} {pool}" for pool, count in status.replicas.items() if count)
    how = "going down" if status.is_ending else "ready" if status.is_ready else "not ready"
    return f"{status.name}: {how}; wanted: {wanted}; router: {status.router_url or 'not there'}"


def start_line(console: Console, status: ClusterStatus, began: float) -> str:
    """Return a progress line of a start. `began`: its clock time (monotonic)."""
    # Without a terminal each new text is a line, so the time is left out.
    seconds = f" ({time.monotonic() - began:.0f} s)" if console.is_terminal else ""
    return f"starting{seconds}: {process_states(status)}"


def process_states(status: ClusterStatus) -> str:
    """Return the states of all processes, each with its reason if there is one."""
    return ", ".join(_state_text(process) for process in status.processes)


def _state_text(process: ProcessStatus) -> str:
    return f"{process.name} {process.state}" + (f" ({clause(process.detail)})" if process.detail else "")


def _row(process: ProcessStatus) -> list[str]:
    pool = None
    if process.kv_pool_tokens is not None and process.kv_pool_bytes is not None:
        pool = f"{process.kv_pool_tokens} tokens, {size_text(process.kv_pool_bytes)}"
    cells = [process.name, process.pool, process.state, process.num_restarts, process.pid, process.node, process.url]
    dtype = " ".join(filter(None, (process.dtype, process.quantization)))
    cells += [process.model, dtype, process.device, pool, process.detail]
    # No cell is empty, so that programs can count columns.
    return ["-" if cell in (None, "") else str(cell) for cell in cells]
