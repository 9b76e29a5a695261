"""Where one of a worker's nodes is, as its options say it: `--node-rank`, `--dist-init-addr` and `--host`."""

from __future__ import annotations

import socket
from urllib.parse import urlsplit

from splitserve.config import WorkerConfig
from splitserve.errors import ConfigError
from splitserve.launch.http_server import bind
from splitserve.launch.join import PATIENCE, WILDCARDS, address_towards, patiently

_OPTION = "--dist-init-addr"


def parse_init_addr(text: str) -> tuple[str, int]:
    """Host and port of HOST:PORT. Raises ConfigError."""
    try:
        parts = urlsplit(f"//{text}")
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    if not host or not port or ":" in host:
        raise ConfigError(f"{_OPTION} {text!r}: give HOST:PORT of node 0, with a name or an IPv4 address")
    return host, port


def own_address(node_rank: int, init_addr: str, host: str | None, timeout: float = PATIENCE) -> str:
    """By which this node's ranks are reached: node 0's is that of `init_addr`, another's its `--host`, or the one from
    which it reaches node 0. Waits for the network to come up, `timeout` seconds at most; raises ConfigError."""
    name, port = parse_init_addr(init_addr)
    url = f"tcp://{name}:{port}"
    patience = min(timeout, PATIENCE)
    if node_rank == 0:
        return patiently(lambda: _resolved(name), url, _OPTION, patience=patience)
    if host not in (None, *WILDCARDS):
        return patiently(lambda: _resolved(host), host, "--host", patience=patience)
    return address_towards(url, option=_OPTION, patience=patience)


def bind_head(config: WorkerConfig) -> socket.socket:
    """Where node 0 waits for the others. Raises ConfigError."""
    try:
        return bind(config.parallel.node_host, parse_init_addr(config.parallel.dist_init_addr)[1])
    except ConfigError as error:
        where = f"--dist-init-addr {config.parallel.dist_init_addr}"
        problem = f"{where}: {error.message.partition(': choose')[0]}; node 0 must have that address"
        # Of its kind: what is taken may be free when it is tried again.
        raise type(error)(problem) from None


def _resolved(host: str) -> str:
    """Raises OSError."""
    return str(socket.getaddrinfo(host, None, socket.AF_INET, socket.SOCK_STREAM)[0][4][0])
