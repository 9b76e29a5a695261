"""SGLang's routers from PyPI (`sglang-router`) in front of two of our workers: the Rust router and `mini_lb`."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Literal

import httpx

from splitserve.process.child import POLL_INTERVAL

SglangRouter = Literal["router", "mini_lb"]
# Seconds until it must serve, and seconds from SIGTERM until it is killed.
_START_TIMEOUT = 60.0
_STOP_TIMEOUT = 10.0
# It accepts neither a socket nor port 0, so another process may take the free port first.
_NUM_TRIES = 5


@contextmanager
def sglang_router(
    kind: SglangRouter, prefill: str, bootstrap_port: int, decode: str, folder: Path, args: Sequence[str] = ()
) -> Iterator[str]:
    """Run a router in front of two workers during the block, and yield its URL. Its log is `folder`/`kind`.log.

    Raises AssertionError with the end of its log if it does not get ready.
    """
    log = folder / f"{kind}.log"
    process, url = _started(kind, ["--prefill", prefill, str(bootstrap_port), "--decode", decode, *args], log)
    try:
        yield url
    finally:
        _stop(process)


def _started(kind: SglangRouter, args: Sequence[str], log: Path) -> tuple[subprocess.Popen[bytes], str]:
    for _ in range(_NUM_TRIES):
        port, metrics_port = _free_ports(2)
        options = ["--pd-disaggregation", "--host", "127.0.0.1", "--port", str(port), *args]
        if kind == "mini_lb":
            options += ["--mini-lb"]
        else:
            options += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics_port)]
            options += ["--worker-startup-check-interval", "1", "--shutdown-grace-period-secs", "1"]
        with log.open("wb") as file:
            process = subprocess.Popen(
                [sys.executable, "-m", "sglang_router.launch_router", *options], stdout=file, stderr=subprocess.STDOUT
            )
        url = f"http://127.0.0.1:{port}"
        # `readiness` also waits until the router has added its workers.
        try:
            is_ready = _wait_ready(process, f"{url}/{'health' if kind == 'mini_lb' else 'readiness'}")
        except BaseException:
            _stop(process)
            raise
        if is_ready:
            return process, url
        _stop(process)
    raise AssertionError(f"SGLang's {kind} did not come up; the end of its log:\n{_tail(log)}")


def _wait_ready(process: subprocess.Popen[bytes], url: str) -> bool:
    """Return whether the process serves within the timeout. False at once if it has ended."""
    deadline = time.monotonic() + _START_TIMEOUT
    with httpx.Client(timeout=5.0, trust_env=False) as client:
        while process.poll() is None and time.monotonic() < deadline:
            try:
                if client.get(url).status_code == 200:
                    return True
            except httpx.TransportError:
                pass
            time.sleep(POLL_INTERVAL)
    return False


def _stop(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        os.kill(process.pid, signal.SIGTERM)
    try:
        process.wait(_STOP_TIMEOUT)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for sock in sockets:
            sock.bind(("127.0.0.1", 0))
        return [sock.getsockname()[1] for sock in sockets]


def _tail(log: Path, num_lines: int = 20) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-num_lines:])
