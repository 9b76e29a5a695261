"""Routers that `bench router` measures: ours and others, each in a process in front of the same mock workers.

Our router starts with its default options. The others come from the package sglang-router: `sglang-router` in Rust, and
`mini_lb` in Python, a load balancer for debugging.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil  # type: ignore[import-untyped]

from splitserve.api.http_server import bind, port_of
from splitserve.core.errors import SplitserveError
from splitserve.process.child import ChildProcess
from splitserve.tools.bench.peers import is_healthy, last_line, stop_process

DIRECT, OURS, MINI_LB, RUST = "direct", "splitserve", "mini_lb", "sglang-router"
PEER_ROUTERS = (MINI_LB, RUST)
# Bootstrap port of the prefill worker, an option of every router. Nothing listens there.
_BOOTSTRAP_PORT = 8998
_READY_TIMEOUT = 60.0
_POLL_INTERVAL = 0.1
# Prints the packages of the peers' interpreter.
_ASK_PEERS = """
import importlib.metadata, json
found = {d.name: d.version for d in importlib.metadata.distributions()}
print(json.dumps(found))
"""
# Packages that affect the figures.
_PEER_PACKAGES = (RUST, "aiohttp", "httptools", "uvicorn", "uvloop")


class RouterUnavailableError(SplitserveError):
    """Another router is not installed or does not run on this machine."""

    reason = "router_unavailable"


@dataclass(frozen=True, slots=True)
class Mock:
    """Ports of the mock workers' process."""

    prefill: int
    decode: int
    acks: int

    @property
    def prefill_url(self) -> str:
        return f"http://127.0.0.1:{self.prefill}"

    @property
    def decode_url(self) -> str:
        return f"http://127.0.0.1:{self.decode}"


@dataclass(frozen=True, slots=True)
class RunningRouter:
    """Router that accepts requests. `pid`: None for the worker itself, which is no router."""

    name: str
    port: int
    pid: int | None

    def cpu_seconds(self) -> float:
        """Return the CPU seconds of the process and its children so far."""
        if self.pid is None:
            return 0.0
        process = psutil.Process(self.pid)
        times = [p.cpu_times() for p in (process, *process.children(recursive=True))]
        return float(sum(t.user + t.system for t in times))


@contextmanager
def running_mock(folder: Path) -> Iterator[Mock]:
    """Run the mock workers. Their ports are bound here, so that no other process can take them."""
    sockets = [bind("127.0.0.1", 0) for _ in range(3)]
    fds = [sock.fileno() for sock in sockets]
    program = (sys.executable, "-m", "splitserve.tools.bench.router_mock")
    child = ChildProcess("mock", ["--fds", *map(str, fds)], folder, pass_fds=fds, program=program)
    mock = Mock(*(port_of(sock) for sock in sockets))
    for sock in sockets:
        sock.close()
    try:
        child.wait_ready(_READY_TIMEOUT)
        yield mock
    finally:
        child.close()


@contextmanager
def running_ours(mock: Mock, folder: Path) -> Iterator[RunningRouter]:
    workers = ["--prefill", mock.prefill_url, str(_BOOTSTRAP_PORT), "--decode", mock.decode_url]
    child = ChildProcess(OURS, ["router", *workers, "--port", "0"], folder)
    try:
        port = child.wait_ready(_READY_TIMEOUT).port
        yield RunningRouter(OURS, port, child.pid)
    finally:
        child.close()


def peer_versions(python: Path) -> dict[str, str]:
    """Return package -> version of the peers' packages. Raises RouterUnavailableError if they are not installed."""
    try:
        done = subprocess.run([python, "-c", _ASK_PEERS], capture_output=True, text=True, timeout=60)
        found: dict[str, str] = json.loads(done.stdout)
    except (OSError, subprocess.TimeoutExpired, ValueError) as error:
        raise RouterUnavailableError(f"{python} is no Python that works: give --peers-python another") from error
    if RUST not in found:
        raise RouterUnavailableError(f"not installed: {python} -m pip install sglang-router httptools uvloop")
    return {name: found[name] for name in _PEER_PACKAGES if name in found}


@contextmanager
def running_peer(name: str, mock: Mock, folder: Path, python: Path) -> Iterator[RunningRouter]:
    """Run another router. Raises RouterUnavailableError with the reason."""
    log = folder / f"{name}.log"
    ports = _free_ports(2)
    command = [str(python), "-m", "sglang_router.launch_router", "--pd-disaggregation", "--host", "127.0.0.1"]
    command += ["--port", str(ports[0]), "--prometheus-port", str(ports[1])]
    command += ["--prefill", mock.prefill_url, str(_BOOTSTRAP_PORT), "--decode", mock.decode_url]
    command += ["--mini-lb", "--policy", "random"] if name == MINI_LB else ["--policy", "round_robin"]
    if setpriv := shutil.which("setpriv"):
        # It ends with this process, even if this process is killed.
        command = [setpriv, "--pdeathsig", "TERM", *command]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)
    try:
        deadline = time.monotonic() + _READY_TIMEOUT
        while not is_healthy(f"http://127.0.0.1:{ports[0]}"):
            if (code := process.poll()) is not None:
                raise RouterUnavailableError(f"ended with code {code} while it started: {last_line(log)}")
            if time.monotonic() > deadline:
                raise RouterUnavailableError(f"was not ready after {_READY_TIMEOUT:g} s: {last_line(log)}")
            time.sleep(_POLL_INTERVAL)
        yield RunningRouter(name, ports[0], process.pid)
    finally:
        stop_process(process)


def _free_ports(count: int) -> list[int]:
    sockets = [bind("127.0.0.1", 0) for _ in range(count)]
    ports = [port_of(sock) for sock in sockets]
    for sock in sockets:
        sock.close()
    return ports
