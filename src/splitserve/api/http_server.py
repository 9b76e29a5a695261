"""HTTP server: uvicorn on a socket that is bound first, so that its port is known and reserved from the start.

The owner of the process handles signals (see `lifecycle.py`).
"""

from __future__ import annotations

import asyncio
import errno
import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import uvicorn
from starlette.types import ASGIApp

from splitserve.api.http_protocol import EdgeProtocol, PendingConnections
from splitserve.api.tls import TlsFiles
from splitserve.core.errors import AddressTakenError, ConfigError, SplitserveError
from splitserve.core.limits import LimitsConfig

# Key in the lifespan state of an application. The value is a function that ends its endless streams.
END_STREAMS = "end_streams"
# Seconds to wait for each step of an abort. uvicorn checks its flags ten times a second.
_ABORT_SECONDS = 1.0


def bind(host: str, port: int) -> socket.socket:
    """Return a listening socket. Port 0: any free one. Raises ConfigError if the address is not available."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
        # Clients that connect while the process still starts wait in the backlog instead of being rejected.
        sock.listen(2048)
    except (OSError, OverflowError) as error:
        sock.close()
        raise cannot_listen(host, port, error, "--host or --port") from None
    return sock


def cannot_listen(host: str, port: int | None, error: OSError | OverflowError, options: str) -> ConfigError:
    """Return the error for an address given by `options`. AddressTakenError: another process uses it."""
    is_taken = isinstance(error, OSError) and error.errno == errno.EADDRINUSE
    why = error.strerror if isinstance(error, OSError) else error
    kind = AddressTakenError if is_taken else ConfigError
    return kind(f"cannot listen on {host}:{port} ({why}): choose another {options}")


def port_of(sock: socket.socket) -> int:
    return int(sock.getsockname()[1])


def reachable_host(host: str) -> str:
    """Return the host part of a URL at which this machine's processes reach a server bound to `host`."""
    if host in ("0.0.0.0", ""):
        return "127.0.0.1"
    if host == "::":
        return "[::1]"
    return f"[{host}]" if ":" in host else host


class HttpServer:
    """HTTP server of one ASGI application on one socket. `start` it, then `stop` it; it owns the socket."""

    def __init__(
        self,
        app: ASGIApp,
        sock: socket.socket,
        tls: TlsFiles | None = None,
        limits: LimitsConfig | None = None,
        router_header: str | None = None,
    ) -> None:
        """Create a server. `router_header`: header of requests from a router. None: there are none."""
        limits = limits or LimitsConfig()
        pending = PendingConnections(limits.max_idle_connections)
        config = uvicorn.Config(
            app,
            # uvicorn calls it like a class, once per connection.
            http=partial(EdgeProtocol, limits=limits, pending=pending, router_header=router_header),  # type: ignore[arg-type]
            log_config=None,
            access_log=False,
            lifespan="on",
            timeout_keep_alive=limits.keep_alive_timeout,  # type: ignore[arg-type]
            ws="none",
            backlog=2048,
            ssl_certfile=None if tls is None else tls.certfile,
            ssl_keyfile=None if tls is None else tls.keyfile,
            ssl_ca_certs=None if tls is None or tls.ca_certs is None else str(tls.ca_certs),
            ssl_cert_reqs=ssl.CERT_NONE if tls is None or tls.ca_certs is None else ssl.CERT_REQUIRED,
        )
        self._server = _Server(config)
        self._socket = sock
        self._task: asyncio.Task[None] | None = None

    @property
    def num_requests(self) -> int:
        """Return the number of requests without a complete response."""
        return len(self._server.server_state.tasks)

    async def start(self) -> None:
        """Start the application. Return when requests are served."""
        self._task = asyncio.create_task(self._server.serve(sockets=[self._socket]), name="http-server")
        started = asyncio.create_task(self._server.ready.wait())
        await asyncio.wait({self._task, started}, return_when=asyncio.FIRST_COMPLETED)
        started.cancel()
        if self._task.done():
            raise SplitserveError("the HTTP server could not start: see the log")

    async def stop(self, deadline: float) -> None:
        """Accept no new connections, give running requests `deadline` seconds, then abort them. Idempotent."""
        if end_streams := self._server.lifespan.state.get(END_STREAMS):
            end_streams()
        # uvicorn declares an int and passes it to `asyncio.wait_for`. With 0 that times out even if no request runs.
        self._server.config.timeout_graceful_shutdown = max(0.1, deadline)  # type: ignore[assignment]
        self._server.should_exit = True
        if self._task is not None:
            await asyncio.wait({self._task})
        self._socket.close()

    async def abort(self) -> None:
        """Abort running requests, even during a `stop`."""
        self._server.should_exit = self._server.force_exit = True
        if self._task is not None:
            await asyncio.wait({self._task}, timeout=_ABORT_SECONDS)
            self._task.cancel()
            # uvicorn skips this step when it is forced.
            await asyncio.wait({asyncio.ensure_future(self._server.lifespan.shutdown())}, timeout=_ABORT_SECONDS)
        self._socket.close()


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.ready = asyncio.Event()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.ready.set()
