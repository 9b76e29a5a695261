"""How `splitserve cluster scale`, `down` and `status` reach the supervisor: HTTP over a Unix socket of this user.

The folder of the socket is closed to other users, so there is no key to keep and no port to find. It belongs to the
supervisor (`core/owned_folder.py`): one cluster of a name at a time, and it goes with a supervisor that was killed.
"""

from __future__ import annotations

import http.client
import itertools
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

import msgspec
from aiohttp import web

from splitserve.cluster.reconciler import SlotState
from splitserve.core.owned_folder import (
    RUN_FOLDER_VARIABLE,
    FolderTakenError,
    OwnedFolder,
    remove_run_folder,
    run_folder,
)
from splitserve.errors import ConfigError, SplitserveError, WorkerUnavailableError

# Seconds until the supervisor must have answered.
_ANSWER_SECONDS = 30.0
_SOCKET_NAME = "control.sock"
_NUM_ATTEMPTS = 10


class ProcessStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One process, as `status` prints it."""

    name: str
    # A pool's name, or "router".
    pool: str
    # A SlotState.
    state: str
    node: str
    url: str | None
    pid: int | None
    num_restarts: int
    detail: str
    # Of workers that are ready: name of the model for clients, dtype, and size of the KV pool.
    model: str | None = None
    dtype: str | None = None
    kv_pool_tokens: int | None = None
    kv_pool_bytes: int | None = None


class ClusterStatus(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    pid: int
    router_url: str | None
    # Everything that is wanted serves, the router gives requests to all workers, and there is nothing else.
    is_ready: bool
    # It is going down.
    is_ending: bool
    # Wanted, by pool.
    replicas: dict[str, int]
    processes: list[ProcessStatus]

    @property
    def failed(self) -> list[str]:
        """Processes that were given up."""
        return [process.name for process in self.processes if process.state == SlotState.FAILED]


class Controlled(Protocol):
    async def status(self) -> ClusterStatus: ...

    def scale(self, replicas: dict[str, Any]) -> None:
        """Raises ConfigError."""
        ...

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
    """Answer while the context is open. Raises ConfigError if a cluster of that name is up."""
    folder = _own_folder(name)
    path = folder.path / _SOCKET_NAME
    runner = web.AppRunner(_app(controlled), access_log=None, handle_signals=False, shutdown_timeout=1.0)
    try:
        # Of a supervisor that was killed.
        path.unlink(missing_ok=True)
        await runner.setup()
        await _listen(runner, path)
        yield
    finally:
        await runner.cleanup()
        folder.close()
        remove_run_folder()


def _own_folder(name: str) -> OwnedFolder:
    """Raises ConfigError."""
    for attempt in itertools.count(1):
        try:
            run_folder().mkdir(mode=0o700, exist_ok=True)
            return OwnedFolder(socket_path(name).parent)
        except FolderTakenError:
            raise ConfigError(
                f"a cluster {name!r} is up: splitserve cluster down --name {name}, or choose another name"
            ) from None
        except OSError as error:
            # Another process may have removed the folder of all clusters in the moment in which it was empty.
            if not isinstance(error, FileNotFoundError) or attempt == _NUM_ATTEMPTS:
                problem = f"{run_folder()}: {error.strerror or error}"
                raise ConfigError(f"{problem}; name another folder with {RUN_FOLDER_VARIABLE}") from None
    raise AssertionError("unreachable")


async def _listen(runner: web.AppRunner, path: Path) -> None:
    """Raises ConfigError, such as for a path that is too long for a socket."""
    try:
        await web.UnixSite(runner, str(path)).start()
    except OSError as error:
        raise ConfigError(
            f"{path}: {error.strerror or error}; name another folder with {RUN_FOLDER_VARIABLE}"
        ) from None


def _app(controlled: Controlled) -> web.Application:
    async def status(_: web.Request) -> web.Response:
        return _answer(await controlled.status())

    async def scale(request: web.Request) -> web.Response:
        controlled.scale(msgspec.json.decode(await request.read(), type=dict[str, int]))
        return _answer(await controlled.status())

    async def down(request: web.Request) -> web.Response:
        controlled.down(now=request.query.get("now") == "true")
        return _answer(await controlled.status())

    app = web.Application(middlewares=[_tell_errors])
    app.add_routes([web.get("/status", status), web.post("/scale", scale), web.post("/down", down)])
    return app


@web.middleware
async def _tell_errors(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    try:
        return await handler(request)
    except (SplitserveError, msgspec.MsgspecError) as error:
        return web.json_response({"error": str(error)}, status=400)


def _answer(status: ClusterStatus) -> web.Response:
    return web.Response(body=msgspec.json.encode(status), content_type="application/json")


class ControlClient:
    """Raises ConfigError if the supervisor refuses, WorkerUnavailableError if there is none."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._path = socket_path(name)

    def status(self) -> ClusterStatus:
        return self._ask("GET", "/status")

    def scale(self, replicas: dict[str, int]) -> ClusterStatus:
        return self._ask("POST", "/scale", msgspec.json.encode(replicas))

    def down(self, *, now: bool) -> ClusterStatus:
        return self._ask("POST", f"/down?now={str(now).lower()}")

    def is_up(self) -> bool:
        return self._path.exists()

    def _ask(self, method: str, path: str, body: bytes = b"") -> ClusterStatus:
        connection = _UnixConnection(self._path)
        try:
            connection.request(method, path, body)
            answer = connection.getresponse()
            content = answer.read()
        except (OSError, http.client.HTTPException) as error:
            raise WorkerUnavailableError(
                f"no cluster {self._name!r} is up here ({error}): splitserve cluster up, as this user, or name it by "
                "--name"
            ) from None
        finally:
            connection.close()
        if answer.status != 200:
            raise ConfigError(_problem(content))
        return msgspec.json.decode(content, type=ClusterStatus)


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: Path) -> None:
        super().__init__("cluster", timeout=_ANSWER_SECONDS)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(_ANSWER_SECONDS)
        # Where that fails, `close` closes it.
        self.sock.connect(str(self._path))


def _problem(content: bytes) -> str:
    try:
        return msgspec.json.decode(content, type=dict[str, str])["error"]
    except (msgspec.MsgspecError, KeyError):
        return content.decode(errors="replace")
