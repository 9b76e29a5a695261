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

from splitserve.core.errors import OptionError
from splitserve.core.options import Config, option
from splitserve.worker.checks import router_urls

logger = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
WILDCARDS = ("0.0.0.0", "::", "")
DEFAULT_PORT, DEFAULT_BOOTSTRAP_PORT = 30000, 8998
# Seconds to wait for the address of a name, or for a route to it: a machine may start before its network.
PATIENCE = 60.0
_PAUSE = 0.5


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
    ready_file: Path | None = option(None, "Write a JSON file with URL and process ids when ready.", metavar="FILE")
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
    patience: float = PATIENCE,
    now: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> str:
    """Return this machine's address on its route to that URL. The URL's host can reach it, unless a NAT is in between.

    Raises OptionError if there is no route for `patience` seconds.
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
    """Return the result of `look_up`, retried on OSError for `patience` seconds. Raises OptionError."""
    deadline = now() + patience
    is_told = False
    while True:
        try:
            return look_up()
        except OSError as error:
            if now() >= deadline:
                raise OptionError(
                    option, f"{what}: no way there ({error}): check it, or name --host yourself"
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
