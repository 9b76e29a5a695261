"""One router process: socket, application, signals, drain."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Sequence
from pathlib import Path

import uvloop
from starlette.types import ASGIApp

from splitserve.launch.http_server import HttpServer, bind, port_of, reachable_host
from splitserve.launch.lifecycle import Lifecycle, end_server
from splitserve.launch.logs import setup_logger
from splitserve.launch.ready_file import ReadyInfo, write_ready_file
from splitserve.router.app import build_router_app
from splitserve.router.args import LBArgs, PrefillConfig

logger = logging.getLogger(__name__)


def run(
    prefill_configs: Sequence[PrefillConfig], decode_addrs: Sequence[str], host: str, port: int, timeout: float
) -> int:
    """Serve until a signal ends it. Returns the exit code."""
    args = LBArgs(host=host, port=port, timeout=timeout, prefill=tuple(prefill_configs), decode=tuple(decode_addrs))
    return run_router(args)


def run_router(
    args: LBArgs, *, ready_file: Path | None = None, fd: int | None = None, exit_with_parent: bool = False
) -> int:
    """As `run`. `fd`: a listening socket the starter hands down, instead of `args.host` and `args.port`."""
    setup_logger(args.log_level)
    app = build_router_app(args)
    sock = bind(args.host, args.port) if fd is None else socket.socket(fileno=fd)
    return uvloop.run(_serve(app, args, sock, ready_file, exit_with_parent))


async def _serve(
    app: ASGIApp, args: LBArgs, sock: socket.socket, ready_file: Path | None, exit_with_parent: bool
) -> int:
    lifecycle = Lifecycle()
    server = HttpServer(app, sock)
    with lifecycle.watch(exit_with_parent=exit_with_parent):
        port = port_of(sock)
        await server.start()
        url = f"http://{reachable_host(args.host)}:{port}"
        logger.info("router ready url=%s", url)
        if ready_file is not None:
            write_ready_file(ready_file, ReadyInfo(pid=os.getpid(), port=port, url=url))
        await lifecycle.draining.wait()
        await end_server(server, lifecycle, args.drain_timeout)
    return 0
