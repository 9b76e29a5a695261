"""Addresses of a worker's nodes from their options: `--node-rank`, `--dist-init-addr` and `--host`."""

from __future__ import annotations

import socket
from urllib.parse import urlsplit

from splitserve.api.http_server import bind
from splitserve.core.config import WorkerConfig
from splitserve.core.errors import ConfigError
from splitserve.worker.join import PATIENCE, WILDCARDS, address_towards, patiently

_OPTION = "--dist-init-addr"


def parse_init_addr(text: str) -> tuple[str, int]:
    """Return host and port of HOST:PORT. Raises ConfigError."""
    try:
        parts = urlsplit(f"//{text}")
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    if not host or not port or ":" in host:
        raise ConfigError(f"{_OPTION} {text!r}: give HOST:PORT of node 0, with a name or an IPv4 address")
    return host, port


def own_address(node_rank: int, init_addr: str, host: str | None, timeout: float = PATIENCE) -> str:
    """Return the address of this node's ranks. Raises ConfigError.

    Node 0: the address in `init_addr`. Other nodes: their `--host`, or the address from which they reach node 0. Waits
    up to `timeout` seconds for the network.
    """
    name, port = parse_init_addr(init_addr)
    url = f"tcp://{name}:{port}"
    patience = min(timeout, PATIENCE)
    if node_rank == 0:
        return patiently(lambda: _resolved(name), url, _OPTION, patience=patience)
    if host not in (None, *WILDCARDS):
        return patiently(lambda: _resolved(host), host, "--host", patience=patience)
    return address_towards(url, option=_OPTION, patience=patience)


def bind_head(config: WorkerConfig) -> socket.socket:
    """Open the listener of node 0 for the other nodes. Raises ConfigError."""
    try:
        return bind(config.parallel.node_host, parse_init_addr(config.parallel.dist_init_addr)[1])
    except ConfigError as error:
        where = f"--dist-init-addr {config.parallel.dist_init_addr}"
        problem = f"{where}: {error.message.partition(': choose')[0]}; node 0 must have that address"
        # Keep the type: an address in use may be free at the next attempt.
        raise type(error)(problem) from None


def _resolved(host: str) -> str:
    """Return the IPv4 address of a host. Raises OSError."""
    return str(socket.getaddrinfo(host, None, socket.AF_INET, socket.SOCK_STREAM)[0][4][0])
