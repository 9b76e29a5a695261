"""One router process: socket, application, signals, drain."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Sequence
from pathlib import Path

import uvloop

from splitserve.launch.http_server import HttpServer, bind, port_of, reachable_host
from splitserve.launch.interpreter import collect_rarely
from splitserve.launch.lifecycle import Lifecycle, end_server
from splitserve.launch.logs import setup_logger
from splitserve.launch.ready_file import ReadyInfo, write_ready_file
from splitserve.launch.tls import tls_files
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
