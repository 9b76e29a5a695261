"""Addresses for `splitserve serve --join ROUTER_URL`: they are derived from the route to the router."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from urllib.parse import urlsplit

from splitserve.core.errors import ConfigError
from splitserve.worker.checks import router_urls

logger = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
WILDCARDS = ("0.0.0.0", "::", "")
DEFAULT_PORT, DEFAULT_BOOTSTRAP_PORT = 30000, 8998
# Seconds to wait for the address of a name, or for a route to it: a machine may start before its network.
PATIENCE = 60.0
_PAUSE = 0.5


@dataclass(frozen=True, slots=True)
class WorkerAddress:
    """Addresses of one worker. Port 0: any free one."""

    host: str
    port: int
    bootstrap_port: int
    router_urls: tuple[str, ...]
    # Host at which others reach it, if known. None: `host`.
    peer_host: str | None = None


def settle_place(
    host: str | None, port: int | None, bootstrap_port: int | None, router: Sequence[str], join: str | None
) -> WorkerAddress:
    """Return the addresses; open ones (None) are derived from `join`, if given. Raises ConfigError."""
    urls = router_urls([*([] if join is None else [join]), *router])
    if join is None:
        bootstrap_port = DEFAULT_BOOTSTRAP_PORT if bootstrap_port is None else bootstrap_port
        return WorkerAddress(
            LOOPBACK if host is None else host, DEFAULT_PORT if port is None else port, bootstrap_port, urls
        )
    if host not in (None, *WILDCARDS):
        return WorkerAddress(host, port or 0, bootstrap_port or 0, urls)
    address = address_towards(urls[0])
    return WorkerAddress(address if host is None else host, port or 0, bootstrap_port or 0, urls, peer_host=address)


def address_towards(
    url: str,
    *,
    option: str = "--join",
    patience: float = PATIENCE,
    now: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> str:
    """Return this machine's address on its route to that URL. The URL's host can reach it, unless a NAT is in between.

    Raises ConfigError if there is no route for `patience` seconds.
    """
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    look_up = partial(_source_address, parts.hostname or "", port)
    return patiently(look_up, url, option, patience=patience, now=now, sleep=sleep)


def patiently(
    look_up: Callable[[], str],
    what: str,
    option: str,
    *,
    patience: float = PATIENCE,
    now: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> str:
    """Return the result of `look_up`, retried on OSError for `patience` seconds. Raises ConfigError."""
    deadline = now() + patience
    is_told = False
    while True:
        try:
            return look_up()
        except OSError as error:
            if now() >= deadline:
                raise ConfigError(
                    f"{option} {what}: no way there ({error}): check it, or name --host yourself"
                ) from None
            if not is_told:
                logger.warning("no way to %s yet, trying for %g s: %s", what, patience, error)
            is_told = True
        sleep(_PAUSE)


def _source_address(host: str, port: int) -> str:
    """Return the source address of the kernel's route, without sending anything. Raises OSError."""
    # A name means IPv4, here as for --host.
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    address = socket.getaddrinfo(host, port, family, socket.SOCK_DGRAM)[0][4]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])
