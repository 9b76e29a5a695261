"""Registration of a worker at all routers behind one name: the message, and the call that sends it.

A headless Service of Kubernetes is such a name. While its routers are replaced, it has the addresses of old and new
ones. A connection to the name reaches any one of them, so each address gets the message.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Literal, Self
from urllib.parse import urlsplit

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from pydantic import BaseModel, ConfigDict, field_validator, model_validator

from splitserve.api.api_keys import key_header
from splitserve.core.errors import ConfigError, WorkerUnavailableError
from splitserve.core.request import DisaggregationMode
from splitserve.router.args import parse_url

# Maximum number of addresses of one name that are used.
MAX_ADDRESSES = 64
_LOOK_UP_SECONDS = 5.0

# Returns the addresses of a URL's name. None instead of an address: connect as the URL says. Raises OSError.
LookUp = Callable[[str], Awaitable[list[str | None]]]
_TIMEOUT = aiohttp.ClientTimeout(total=5.0)


async def look_up(url: str) -> list[str | None]:
    """Return the addresses as LookUp. IPv4 only, if there are any: a router rarely listens on both kinds."""
    parts = urlsplit(url)
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(_LOOK_UP_SECONDS):
            found = await loop.getaddrinfo(parts.hostname or "", None, type=socket.SOCK_STREAM)
    except TimeoutError:
        raise OSError("the name server does not answer") from None
    by_family = {
        family: sorted({str(entry[4][0]) for entry in found if entry[0] == family})
        for family in (socket.AF_INET, socket.AF_INET6)
    }
    addresses = by_family[socket.AF_INET] or by_family[socket.AF_INET6]
    return list(addresses[:MAX_ADDRESSES]) if len(addresses) > 1 else [None]


def named(url: str, address: str | None) -> str:
    """Return the name of a router for log lines."""
    return url if address is None else f"{url} ({address})"


def connector(address: str | None, tls: ssl.SSLContext | None = None) -> aiohttp.TCPConnector:
    """Return the connector of a session that connects to `address` for any host in its URLs. None: to that host.

    Requests and certificates still use the name. `tls`: for https. None: the system's trusted certificates.
    """
    resolver = None if address is None else _FixedResolver(address)
    return aiohttp.TCPConnector(resolver=resolver, ssl=True if tls is None else tls)


class _FixedResolver(AbstractResolver):
    def __init__(self, address: str) -> None:
        self._address = address

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        own_family = socket.AF_INET6 if ":" in self._address else socket.AF_INET
        return [
            ResolveResult(
                hostname=host, host=self._address, port=port, family=own_family, proto=0, flags=socket.AI_NUMERICHOST
            )
        ]

    async def close(self) -> None:
        """Do nothing: the resolver holds no resources."""


class PDRegistryRequest(BaseModel):
    """Body of POST /register and POST /deregister."""

    model_config = ConfigDict(extra="ignore")

    mode: Literal["prefill", "decode", "null"]
    # URL at which the router reaches the worker, e.g. http://10.0.0.7:30000.
    registry_url: str
    # On prefill workers: port of the bootstrap server. The other roles have none.
    bootstrap_port: int | None = None

    @field_validator("registry_url")
    @classmethod
    def _is_url(cls, url: str) -> str:
        try:
            return parse_url(url)
        except ConfigError as error:
            raise ValueError(error.message) from None

    @model_validator(mode="after")
    def _port_fits_mode(self) -> Self:
        if self.mode == "prefill" and (self.bootstrap_port is None or not 0 < self.bootstrap_port < 65536):
            raise ValueError("a prefill worker must give its bootstrap_port, between 1 and 65535")
        if self.mode != "prefill" and self.bootstrap_port is not None:
            raise ValueError(f"a {self.mode} worker must not have a bootstrap_port: only prefill workers do")
        return self

    @property
    def role(self) -> DisaggregationMode:
        return DisaggregationMode(self.mode)


class WorkerOrder(BaseModel):
    """Body of POST /workers/drain and POST /workers/resume."""

    model_config = ConfigDict(extra="ignore")

    # URL as in GET /workers.
    url: str
    # On drain: move running requests to other workers now, instead of letting them finish.
    migrate: bool = False


async def register_disaggregation_server(
    mode: DisaggregationMode,
    server_port: int,
    bootstrap_port: int | None,
    pdlb_url: str,
    host: str = "127.0.0.1",
    api_key: str | None = None,
    address: str | None = None,
    tls: ssl.SSLContext | None = None,
    scheme: str = "http",
    *,
    leave: bool = False,
) -> None:
    """Register the worker at `host`:`server_port` with the router at `pdlb_url`, or with `leave` remove it there.

    Repeating it is harmless. `api_key`: an operator's key, if the router has keys. `address`: IP address of the
    router's name to connect to. None: any of its addresses. `tls`: for a router at an https URL. None: the system's
    trusted certificates. `scheme`: of the worker's URL, http or https.

    Raises WorkerUnavailableError if the router does not answer or rejects the registration.
    """
    url = f"{scheme}://{host}:{server_port}"
    request = PDRegistryRequest(mode=mode.value, registry_url=url, bootstrap_port=bootstrap_port).model_dump()
    target = pdlb_url.rstrip("/") + ("/deregister" if leave else "/register")
    try:
        async with (
            aiohttp.ClientSession(timeout=_TIMEOUT, connector=connector(address, tls)) as session,
            session.post(target, json=request, headers=key_header(api_key)) as response,
        ):
            if response.status == 200:
                return
            reason = f"answered {response.status}: {(await response.text())[:300]}"
            option = "--router-key-file" if response.status in (401, 403) else "--router"
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        reason, option = f"does not answer ({error or type(error).__name__})", "--router"
    raise WorkerUnavailableError(f"the router {named(pdlb_url, address)} {reason}: check {option}")


# Removes a worker from a router. Arguments and errors are those of `register_disaggregation_server`.
deregister_disaggregation_server = partial(register_disaggregation_server, leave=True)
