"""SGLang's routers from PyPI (`sglang-router`) in front of two of our workers: the Rust router and `mini_lb`."""

from __future__ import annotations

import itertools
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Literal

from splitserve.core.errors import ClusterError
from splitserve.process.child import ForeignServer

SglangRouter = Literal["router", "mini_lb"]
# Seconds until it must serve.
_START_TIMEOUT = 60.0
# It accepts neither a socket nor port 0, so another process may take the free port first.
_NUM_TRIES = 5


@contextmanager
def sglang_router(
    kind: SglangRouter, prefill: str, bootstrap_port: int, decode: str, folder: Path, args: Sequence[str] = ()
) -> Iterator[str]:
    """Run a router in front of two workers during the block, and yield its URL. Its log is `folder`/`kind`.log.

    Raises ClusterError with the end of its log if it does not get ready.
    """
    server = _started(kind, ["--prefill", prefill, str(bootstrap_port), "--decode", decode, *args], folder)
    try:
        yield server.wait_ready(_START_TIMEOUT).url
    finally:
        server.close()


def _started(kind: SglangRouter, args: Sequence[str], folder: Path) -> ForeignServer:
    for attempt in itertools.count(1):
        port, metrics_port = _free_ports(2)
        options = ["--pd-disaggregation", "--host", "127.0.0.1", "--port", str(port), *args]
        if kind == "mini_lb":
            options += ["--mini-lb"]
        else:
            options += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics_port)]
            options += ["--worker-startup-check-interval", "1", "--shutdown-grace-period-secs", "1"]
        command = [sys.executable, "-m", "sglang_router.launch_router", *options]
        # `readiness` also waits until the router has added its workers.
        url = f"http://127.0.0.1:{port}/{'health' if kind == 'mini_lb' else 'readiness'}"
        server = ForeignServer(kind, command, folder, url)
        try:
            server.wait_ready(_START_TIMEOUT)
            return server
        except BaseException as error:
            server.close()
            if attempt == _NUM_TRIES or not isinstance(error, ClusterError):
                raise
    raise AssertionError("unreachable")


def _free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for sock in sockets:
            sock.bind(("127.0.0.1", 0))
        return [sock.getsockname()[1] for sock in sockets]
