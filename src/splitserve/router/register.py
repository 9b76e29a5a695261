"""How workers become known to a router: by a message that they send, or by a line of a file.

Message: it is sent to all routers behind one name. A headless Service of Kubernetes is such a name. While its routers
are replaced, it has the addresses of old and new ones. A connection to the name reaches any one of them, so each
address gets the message.

File: it lists workers as JSON lines, and is read again when it changes.

    {"url": "http://10.0.0.5:30000", "mode": "prefill", "bootstrap_port": 8998}
    {"url": "http://10.0.0.6:30000", "mode": "decode"}

Empty lines and lines that begin with # are ignored. Effect on a worker:
1. Its line is added: it is added as a static worker. If the mode changes, it is another worker. A changed bootstrap
   port applies from then on.
2. Its line is removed: it drains, as after POST /deregister. It gets no new requests, and is forgotten when its running
   requests have ended. If its line returns before that, it is used again.

A file is read once it has not changed between two checks, so that a half-written file is not read. A file that cannot
be read, or has an invalid line, is logged once; until it changes again the previous workers stay.
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import ssl
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Literal, Self
from urllib.parse import urlsplit

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from splitserve.api.api_keys import key_header
from splitserve.core.errors import ConfigError, OptionError, WorkerUnavailableError
from splitserve.core.request import DisaggregationMode
from splitserve.router.args import parse_url
from splitserve.router.registry import WorkerRegistry

logger = logging.getLogger(__name__)

# Maximum number of addresses of one name that are used.
MAX_ADDRESSES = 64
_LOOK_UP_SECONDS = 5.0

# Returns the addresses of a URL's name. None instead of an address: connect as the URL says. Raises OSError.
LookUp = Callable[[str], Awaitable[list[str | None]]]
_TIMEOUT = aiohttp.ClientTimeout(total=5.0)
_EXAMPLE = '{"url": "http://10.0.0.6:30000", "mode": "decode"}'
# Identity of a file's version. None: there is no file.
_Signature = tuple[int, int, int] | None


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
    # Of POST /deregister: why the worker leaves, if it will return by itself or by an order.
    reason: str = Field("", max_length=200)

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
    reason: str = "",
) -> None:
    """Register the worker at `host`:`server_port` with the router at `pdlb_url`, or with `leave` remove it there.

    Repeating it is harmless. `api_key`: an operator's key, if the router has keys. `address`: IP address of the
    router's name to connect to. None: any of its addresses. `tls`: for a router at an https URL. None: the system's
    trusted certificates. `scheme`: of the worker's URL, http or https. `reason`: why it leaves, for `/ready`.

    Raises WorkerUnavailableError if the router does not answer or rejects the registration.
    """
    url = f"{scheme}://{host}:{server_port}"
    fields = {"mode": mode.value, "registry_url": url, "bootstrap_port": bootstrap_port, "reason": reason}
    request = PDRegistryRequest.model_validate(fields).model_dump(exclude_defaults=True)
    target = pdlb_url.rstrip("/") + ("/deregister" if leave else "/register")
    try:
        async with (
            aiohttp.ClientSession(timeout=_TIMEOUT, connector=connector(address, tls)) as session,
            session.post(target, json=request, headers=key_header(api_key)) as response,
        ):
            if response.status == 200:
                return
            reason = f"answered {response.status}: {(await response.text(errors='replace'))[:300]}"
            option = "--router-key-file" if response.status in (401, 403) else "--router"
    # UnicodeError: a host name with a label that is empty or too long. LookupError: an unknown charset.
    except (aiohttp.ClientError, TimeoutError, OSError, UnicodeError, LookupError) as error:
        reason, option = f"does not answer ({str(error) or type(error).__name__})", "--router"
    raise WorkerUnavailableError(f"the router {named(pdlb_url, address)} {reason}: check {option}")


# Removes a worker from a router. Arguments and errors are those of `register_disaggregation_server`.
deregister_disaggregation_server = partial(register_disaggregation_server, leave=True)


def read_workers(path: Path) -> dict[str, PDRegistryRequest]:
    """Return the workers by URL, in the file's order. Raises ConfigError, which names the line and the remedy."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise OptionError("--workers-file", f"{path}: {reason}; write one worker a line, such as {_EXAMPLE}") from None
    workers: dict[str, PDRegistryRequest] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        try:
            worker = _parse(line)
            if worker.registry_url in workers:
                raise ValueError("this worker's url has come before: leave one of the lines out")
        except ValueError as error:
            raise OptionError("--workers-file", f"{path}, line {number}: {error}") from None
        workers[worker.registry_url] = worker
    return workers


def _parse(line: str) -> PDRegistryRequest:
    """Parse one line. Raises ValueError."""
    try:
        fields = json.loads(line)
    except ValueError as error:
        raise ValueError(f"it is no JSON ({error}): write one object a line, such as {_EXAMPLE}") from None
    if not isinstance(fields, dict) or "url" not in fields:
        raise ValueError(f"it is no object with a url: write one a line, such as {_EXAMPLE}")
    try:
        return PDRegistryRequest.model_validate({**fields, "registry_url": fields["url"]})
    except ValidationError as error:
        problems = (f"{'.'.join(map(str, e['loc']))} {e['msg'].removeprefix('Value error, ')}" for e in error.errors())
        raise ValueError(f"{'; '.join(p.strip() for p in problems)}, such as {_EXAMPLE}") from None


class WorkersFile:
    """Synchronizer of the registry with the file.

    Reads the file on construction. Raises ConfigError if it is invalid.
    """

    def __init__(self, path: Path, registry: WorkerRegistry, interval: float) -> None:
        self._path = path
        self._registry = registry
        self._interval = interval
        # Versions of the file: the one that was read last, and the one at the last check.
        self._read = self._seen = _signature(path)
        self._listed: dict[str, PDRegistryRequest] = {}
        self.take(read_workers(path))

    async def run(self) -> None:
        """Check the file periodically until cancelled."""
        while True:
            await asyncio.sleep(self._interval)
            # The file may be on a slow network file system.
            listed = await asyncio.to_thread(self.changed)
            if listed is not None:
                self.take(listed)

    def changed(self) -> dict[str, PDRegistryRequest] | None:
        """Return the file's workers if it has changed and is valid. None: no valid change."""
        before, self._seen = self._seen, _signature(self._path)
        if self._seen == self._read or self._seen != before:
            return None
        self._read = self._seen
        try:
            return read_workers(self._path)
        except ConfigError as error:
            logger.error("%s. The %d workers of before stay", error.message, len(self._listed))
            return None

    def take(self, listed: dict[str, PDRegistryRequest]) -> None:
        """Apply the changes since the last list to the registry."""
        for url in self._listed.keys() - listed.keys():
            if self._registry.deregister(url):
                logger.info("worker no longer listed url=%s", url)
        for url, worker in listed.items():
            if self._listed.get(url) == worker:
                continue
            if self._registry.add(url, worker.role, worker.bootstrap_port, is_static=True):
                logger.info("worker listed url=%s mode=%s", url, worker.mode)
        self._listed = listed


def _signature(path: Path) -> _Signature:
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_ino, stat.st_mtime_ns, stat.st_size
