"""One name, several routers: what is said to all of them must reach every address that the name has.

A headless Service of Kubernetes is such a name; while its routers are replaced, old and new ones stand behind it.
Connecting by the name reaches any one of them.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Awaitable, Callable
from urllib.parse import urlsplit

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult

# Routers behind one name that are told.
MAX_ADDRESSES = 64
_LOOK_UP_SECONDS = 5.0

# The addresses of a URL's name, None where there is but one way: to connect as the URL says. Raises OSError.
LookUp = Callable[[str], Awaitable[list[str | None]]]


async def look_up(url: str) -> list[str | None]:
    """See LookUp. IPv4, where the name has such addresses: a router seldom listens on both kinds."""
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
    """For people."""
    return url if address is None else f"{url} ({address})"


def connector(address: str | None, tls: ssl.SSLContext | None = None) -> aiohttp.TCPConnector:
    """Return the connector of a session that connects to `address`, whatever host its URLs name. None: to that host.

    The name stays the one in requests and in certificates. `tls`: for https. None: what the system trusts.
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
        """Nothing is held."""
