"""Cluster token: its file, and the rule that a worker without one listens on loopback only.

The token itself is never on a command line or in an environment, because other users may read both.
"""

from __future__ import annotations

import ipaddress
import logging
import os
import secrets
import socket
from pathlib import Path

import msgspec

from splitserve.core.config import ClusterToken, DisaggregationConfig
from splitserve.core.errors import ConfigError, OptionError
from splitserve.core.request import DisaggregationMode

logger = logging.getLogger(__name__)

MIN_TOKEN_BYTES = 16
_OTHERS_MAY_READ = 0o044


def read_token_file(path: Path) -> ClusterToken:
    """Return the content of the file, without white space around it. Raises ConfigError if that is no token.

    A file that others may read causes only a warning: secrets that containers mount often have such a mode.
    """
    try:
        secret = path.read_bytes().strip()
        mode = path.stat().st_mode
    except OSError as error:
        raise OptionError("--cluster-token-file", f"{path}: {error.strerror}; {_recipe(path)}") from None
    if len(secret) < MIN_TOKEN_BYTES:
        problem = f"{len(secret)} bytes are too few for a cluster token, it needs at least {MIN_TOKEN_BYTES}"
        raise OptionError("--cluster-token-file", f"{path}: {problem}; {_recipe(path)}")
    if mode & _OTHERS_MAY_READ:
        logger.warning("others on this machine may read the cluster token: chmod 600 %s", path)
    return ClusterToken(secret)


def new_token() -> bytes:
    return secrets.token_hex(32).encode()


def write_secret_file(path: Path, content: bytes) -> None:
    """Write a new file that only this user can read. Raises FileExistsError."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)


def settle_host(config: DisaggregationConfig) -> DisaggregationConfig:
    """Return the config with `host` resolved to an address.

    Raises ConfigError if it cannot be resolved, or if other hosts could reach it without a cluster token.
    """
    if config.mode is DisaggregationMode.NULL:
        return config
    address = _resolve(config.host)
    if address.is_unspecified:
        raise OptionError("--disaggregation-host", f"{config.host!r} is no address that others can reach: name one")
    if not address.is_loopback and not config.cluster_token.secret:
        raise ConfigError(
            f"a {config.mode} worker would listen on {config.host}, which is no loopback address, without a cluster "
            "token: any client that reaches it could read and write KV caches. Start all workers with the same "
            "--cluster-token-file F (openssl rand -hex 32 > F), or with --disaggregation-host 127.0.0.1"
        )
    return msgspec.structs.replace(config, host=str(address))


def _resolve(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    # A name means IPv4, as for --host.
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        found = socket.getaddrinfo(host, None, family, socket.SOCK_STREAM)
        return ipaddress.ip_address(found[0][4][0])
    except (OSError, UnicodeError, ValueError) as error:
        raise OptionError("--disaggregation-host", f"{host!r} has no address: {error}") from None


def _recipe(path: Path) -> str:
    return f"make one with: openssl rand -hex 32 > {path}"
