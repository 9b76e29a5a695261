"""Addresses of a router name: messages to all routers behind one name must reach each of its addresses.

A headless Service of Kubernetes is such a name. While its routers are replaced, it has the addresses of old and new
ones. A connection to the name reaches any one of them.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Awaitable, Callable
from urllib.parse import urlsplit

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult

# Maximum number of addresses of one name that are used.
MAX_ADDRESSES = 64
_LOOK_UP_SECONDS = 5.0

# Returns the addresses of a URL's name. None instead of an address: connect as the URL says. Raises OSError.
LookUp = Callable[[str], Awaitable[list[str | None]]]


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
