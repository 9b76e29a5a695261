"""How `splitserve cluster scale`, `down` and `status` reach the supervisor: HTTP over a Unix socket of this user.

Its folder lets nobody else in, so there is no key to keep and no port to take. Whoever wants it from elsewhere has ssh.
"""

from __future__ import annotations

import fcntl
import http.client
import os
import socket
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Protocol

import msgspec
from aiohttp import web

from splitserve.cluster.reconciler import SlotState
from splitserve.errors import ConfigError, SplitserveError, WorkerUnavailableError

# Seconds until the supervisor must have answered.
_ANSWER_SECONDS = 30.0
# Where the sockets are, instead of the usual folder.
FOLDER_VARIABLE = "SPLITSERVE_RUN_DIR"


class ProcessStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One process as `status` shows it."""

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


class ClusterStatus(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    pid: int
    router_url: str | None
    # Everything that is wanted serves, the router has proven its way through all workers, and nothing else is there.
    is_ready: bool
    # It is going down.
    is_ending: bool
    # Wanted, by pool.
    replicas: dict[str, int]
    processes: list[ProcessStatus]

    @property
    def failed(self) -> list[str]:
        """Processes that are not started any more: nothing is to be waited for."""
        return [process.name for process in self.processes if process.state == SlotState.FAILED]


class Controlled(Protocol):
    async def status(self) -> ClusterStatus: ...

    def scale(self, replicas: dict[str, Any]) -> None:
        """Raises ConfigError."""
        ...

    def down(self, *, now: bool) -> None: ...


def socket_path(name: str) -> Path:
    """Of the supervisor of this user's cluster of that name; its folder is there."""
    given = os.environ.get(FOLDER_VARIABLE)
    folder = Path(given) if given else Path(tempfile.gettempdir()) / f"splitserve-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        stat = folder.lstat()
    except OSError as error:
        raise ConfigError(f"{folder}: {error.strerror}; name another folder with {FOLDER_VARIABLE}") from None
    if stat.st_uid != os.getuid() or stat.st_mode & 0o077 or folder.is_symlink():
        raise ConfigError(f"{folder} is open to others: chmod 700 it, or name another with {FOLDER_VARIABLE}")
    return folder / f"{name}.sock"


@asynccontextmanager
async def control_server(name: str, controlled: Controlled) -> AsyncIterator[None]:
    """Answers while the context is open. Raises ConfigError where a cluster of that name is up."""
    path = socket_path(name)
    with path.with_suffix(".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"a cluster {name!r} is up: splitserve cluster down --name {name}, or choose another name"
            ) from None
        # Of one whose supervisor was killed.
        path.unlink(missing_ok=True)
        runner = web.AppRunner(_app(controlled), access_log=None, handle_signals=False, shutdown_timeout=1.0)
        try:
            await runner.setup()
            await _listen(runner, path)
            yield
        finally:
            path.unlink(missing_ok=True)
            await runner.cleanup()


async def _listen(runner: web.AppRunner, path: Path) -> None:
    """Raises ConfigError, such as where the path is too long for a socket."""
    try:
        await web.UnixSite(runner, str(path)).start()
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}; name another folder with {FOLDER_VARIABLE}") from None


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
    """Raises ConfigError where the supervisor refuses, WorkerUnavailableError where there is none."""

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
