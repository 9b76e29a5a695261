"""Process of one router: socket, application, signals, drain."""

from __future__ import annotations

import logging
import os
import socket
from pathlib import Path

import uvloop

from splitserve.api.http_server import HttpServer, bind, port_of, reachable_host
from splitserve.api.tls import tls_files
from splitserve.process.lifecycle import Lifecycle, ReadyInfo, end_server, write_ready_file
from splitserve.process.settings import collect_rarely, setup_logger
from splitserve.router.app import build_router_app
from splitserve.router.args import LBArgs

logger = logging.getLogger(__name__)


def run_router(
    args: LBArgs, *, ready_file: Path | None = None, fd: int | None = None, exit_with_parent: bool = False
) -> int:
    """Serve until a signal ends it. Return the exit code.

    `fd`: inherited listener. None: listen at `args.host` and `args.port`.
    """
    setup_logger(args.log_level)
    app, tls = build_router_app(args), tls_files(args.ssl_certfile, args.ssl_keyfile)
    sock = bind(args.host, args.port) if fd is None else socket.socket(fileno=fd)
    port, scheme = port_of(sock), "http" if tls is None else "https"
    info = ReadyInfo(pid=os.getpid(), port=port, url=f"{scheme}://{reachable_host(args.host)}:{port}")
    return uvloop.run(_serve(HttpServer(app, sock, tls, args.limits), info, args, ready_file, exit_with_parent))


async def _serve(
    server: HttpServer, info: ReadyInfo, args: LBArgs, ready_file: Path | None, exit_with_parent: bool
) -> int:
    lifecycle = Lifecycle()
    with lifecycle.watch(exit_with_parent=exit_with_parent):
        await server.start()
        logger.info("router ready url=%s", info.url)
        if ready_file is not None:
            write_ready_file(ready_file, info)
        with collect_rarely():
            await lifecycle.draining.wait()
            await end_server(server, lifecycle, args.drain_timeout)
    return lifecycle.exit_code(has_served=True)
