"""Options of `splitserve serve` about its process and its addresses.

With `--join ROUTER_URL`, addresses are derived from the route to the router.
"""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

from splitserve.core.errors import ConfigError, OptionError
from splitserve.core.options import Config, option
from splitserve.process.lifecycle import ready_path
from splitserve.router.args import parse_url

logger = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
WILDCARDS = ("0.0.0.0", "::", "")
DEFAULT_PORT, DEFAULT_BOOTSTRAP_PORT = 30000, 8998
# Seconds to wait for the address of a name, or for a route to it: a machine may start before its network.
ROUTE_TIMEOUT = 60.0
_PAUSE = 0.5
_INIT_ADDR = "--dist-init-addr"


class LaunchConfig(Config, frozen=True, kw_only=True):
    """Options of `splitserve serve` from which addresses, secrets and the life of the process follow."""

    disable_cuda_graph: bool = option(
        False,
        "On GPUs: launch each kernel of a decode step instead of replaying a CUDA graph.",
        aliases="--enforce-eager",
        section="Model",
    )
    disaggregation_host: str | None = option(
        None, "Address at which other workers reach this one. Default: --host.", section="Disaggregation"
    )
    disaggregation_bootstrap_port: int | None = option(
        None,
        "On prefill workers: port of the bootstrap server. 0: any free one. Default: 8998, with --join 0. On "
        "decode workers: port for requests that name none.",
        ge=0,
        le=65535,
        section="Disaggregation",
    )
    cluster_token_file: Path | None = option(
        None,
        "File with the token of the cluster. Prefill and decode workers need it to listen beyond loopback.",
        metavar="FILE",
        env="SPLITSERVE_CLUSTER_TOKEN_FILE",
        section="Disaggregation",
    )
    host: str | None = option(
        None,
        "Address to listen on. Default: 127.0.0.1, with --join the local address that routes to the router.",
        section="Addresses and keys",
    )
    port: int | None = option(
        None, "Port to listen on. 0: any free one. Default: 30000, with --join 0.", ge=0, le=65535
    )
    router: list[str] | None = option(
        None, "Router to register with, repeatable.", metavar="URL[,URL]", aliases="--pdlb-url"
    )
    join: str | None = option(
        None, "Register with the router at URL and advertise the local address that routes to it.", metavar="URL"
    )
    drain_timeout: float = option(
        30.0, "Seconds that running requests may take to finish on shutdown.", ge=0, section="Process"
    )
    ready_file: Path | None = option(
        None, "Write a JSON file with URL and process ids when ready.", parse=ready_path, metavar="FILE"
    )
    exit_with_parent: bool = option(False, "End when standard input ends.")


@dataclass(frozen=True, slots=True)
class WorkerAddress:
    """Addresses of one worker. Port 0: any free one."""

    host: str
    port: int
    bootstrap_port: int
    router_urls: tuple[str, ...]
    # Host at which others reach it, if known. None: `host`.
    peer_host: str | None = None


def router_urls(options: Sequence[str]) -> tuple[str, ...]:
    """Return the URLs of options `--router`, each once. An option may have several, separated by commas.

    Raises ConfigError.
    """
    words = (word for option in options for word in option.split(","))
    return tuple(dict.fromkeys(parse_url(word) for word in words))


def settle_place(
    host: str | None, port: int | None, bootstrap_port: int | None, router: Sequence[str], join: str | None
) -> WorkerAddress:
    """Return the addresses; open ones (None) are derived from `join`, if given. Raises OptionError."""
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
    timeout: float = ROUTE_TIMEOUT,
    now: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> str:
    """Return this machine's address on its route to that URL. The URL's host can reach it, unless a NAT is in between.

    Raises OptionError if there is no route for `timeout` seconds.
    """
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    look_up = partial(_source_address, parts.hostname or "", port)
    return retry_lookup(look_up, url, option, timeout=timeout, now=now, sleep=sleep)


def retry_lookup(
    look_up: Callable[[], str],
    what: str,
    option: str,
    *,
    timeout: float = ROUTE_TIMEOUT,
    now: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> str:
    """Return the result of `look_up`, retried on OSError for `timeout` seconds. Raises OptionError."""
    deadline = now() + timeout
    is_logged = False
    while True:
        try:
            return look_up()
        except OSError as error:
            if now() >= deadline:
                raise OptionError(
                    option, f"{what}: no way there ({error}): check it, or name --host yourself"
                ) from None
            if not is_logged:
                logger.warning("no way to %s yet, trying for %g s: %s", what, timeout, error)
            is_logged = True
        sleep(_PAUSE)


def _source_address(host: str, port: int) -> str:
    """Return the source address of the kernel's route, without sending anything. Raises OSError."""
    # A name means IPv4, here as for --host.
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    address = socket.getaddrinfo(host, port, family, socket.SOCK_DGRAM)[0][4]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


def parse_init_addr(text: str) -> tuple[str, int]:
    """Return host and port of HOST:PORT. Raises ConfigError."""
    try:
        parts = urlsplit(f"//{text}")
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    if not host or not port or ":" in host:
        raise ConfigError(f"{_INIT_ADDR} {text!r}: give HOST:PORT of node 0, with a name or an IPv4 address")
    return host, port


def own_address(node_rank: int, init_addr: str, host: str | None, timeout: float = ROUTE_TIMEOUT) -> str:
    """Return the address of this node's ranks. Raises ConfigError.

    Node 0: the address in `init_addr`. Other nodes: their `--host`, or the address from which they reach node 0. Waits
    up to `timeout` seconds for the network.
    """
    name, port = parse_init_addr(init_addr)
    url = f"tcp://{name}:{port}"
    timeout = min(timeout, ROUTE_TIMEOUT)
    if node_rank == 0:
        return retry_lookup(lambda: _resolved(name), url, _INIT_ADDR, timeout=timeout)
    if host not in (None, *WILDCARDS):
        return retry_lookup(lambda: _resolved(host), host, "--host", timeout=timeout)
    return address_towards(url, option=_INIT_ADDR, timeout=timeout)


def _resolved(host: str) -> str:
    """Return the IPv4 address of a host. Raises OSError."""
    return str(socket.getaddrinfo(host, None, socket.AF_INET, socket.SOCK_STREAM)[0][4][0])
