"""Client of OpenAI-compatible servers, and of our workers and routers: JSON requests, streams line by line, metrics.

Nothing is sent twice. An error has the message of the server. The key of the environment is sent to every server.
"""

from __future__ import annotations

import asyncio
import json
import operator
import os
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import astuple, dataclass
from typing import Any, TypeVar

import aiohttp
import msgspec
from prometheus_client.parser import text_string_to_metric_families

from splitserve.api.api_keys import key_header
from splitserve.core.errors import SplitserveError
from splitserve.deploy.control import find_cluster
from splitserve.router.args import parse_url
from splitserve.tools.options import DEFAULT_ROUTER_URL

T = TypeVar("T")
# Seconds for one request from sending to the end of its answer.
STREAM_TIMEOUT = 900.0
_CALL_TIMEOUT = 30.0
_TRANSFER = "splitserve:kv_transfer_"
_KEY_VARIABLE = "SPLITSERVE_API_KEY"


class RequestFailedError(SplitserveError):
    """A request to a server failed, or its answer is not as requested."""

    reason = "request_failed"

    def __init__(self, message: str, body: str | None = None) -> None:
        super().__init__(message)
        # Body of an answer with an error status. None: there is no such answer.
        self.body = body


class ServerUnreachableError(RequestFailedError):
    """No server accepts connections at the address."""


class KeyRejectedError(RequestFailedError):
    """The server rejects the key, or needs one."""


def router_or_default(url: str | None) -> str:
    """Return the URL of a router: the given one, or that of the cluster that `find_cluster` finds, or the default.

    Raises ConfigError.
    """
    if url is None:
        with suppress(SplitserveError):
            url = find_cluster(None).status().router_url
        url = url or DEFAULT_ROUTER_URL
    return parse_url(url)


def open_session(
    timeout: float | None = STREAM_TIMEOUT, socket_factory: aiohttp.SocketFactoryType | None = None
) -> aiohttp.ClientSession:
    """Open a session without a limit of connections. `timeout`: seconds for a whole answer. None: no limit.

    `socket_factory`: creates its sockets for addresses. None: usual sockets.
    """
    # The buffer must hold one event of a stream, which is one line.
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, socket_factory=socket_factory),
        timeout=aiohttp.ClientTimeout(total=timeout),
        headers=key_header(os.environ.get(_KEY_VARIABLE)),
        read_bufsize=2**22,
    )


async def send(session: aiohttp.ClientSession, url: str, body: Any = None) -> Any:
    """Send a POST with this JSON body, or a GET if it is None. Return the JSON of the answer.

    Raises RequestFailedError.
    """
    with _failures_of(url):
        return json.loads(await _text(session, url, body))


async def _text(session: aiohttp.ClientSession, url: str, body: Any = None) -> str:
    with _failures_of(url):
        async with session.request("GET" if body is None else "POST", url, json=body) as response:
            await _check_status(url, response)
            return await response.text()


def call(url: str, body: Any = None, *, timeout: float = _CALL_TIMEOUT) -> Any:
    """Do the same as `send` outside an event loop."""
    return asyncio.run(_alone(send, timeout, url, body))


def read_text(url: str) -> str:
    """Send a GET outside an event loop and return the text of the answer. Raises RequestFailedError."""
    return asyncio.run(_alone(_text, _CALL_TIMEOUT, url))


async def _alone(request: Callable[..., Awaitable[T]], timeout: float, *args: Any) -> T:
    async with open_session(timeout) as session:
        return await request(session, *args)


async def stream(
    session: aiohttp.ClientSession,
    url: str,
    body: Any,
    take: Callable[[bytes], None],
    headers: Mapping[str, str] | None = None,
) -> None:
    """Send a POST, or a GET if `body` is None, and call `take` with each line of its answer as it arrives.

    Raises RequestFailedError.
    """
    with _failures_of(url):
        async with session.request("GET" if body is None else "POST", url, json=body, headers=headers) as response:
            await _check_status(url, response)
            async for line in response.content:
                take(line)


def parse_event(line: bytes) -> dict[str, Any] | None:
    """Return the JSON in one line of a stream. None: it has none. Raises RequestFailedError if it is an error."""
    data = line.removeprefix(b"data:").strip()
    if not line.startswith(b"data:") or data == b"[DONE]":
        return None
    event: dict[str, Any] = msgspec.json.decode(data, type=dict[str, Any])
    if error := event.get("error"):
        message = error.get("message") if isinstance(error, dict) else error
        raise RequestFailedError(f"a stream ended with an error: {message}")
    return event


def served_models(url: str) -> list[str]:
    """Return the models that a server lists. Raises RequestFailedError."""
    try:
        return [str(model["id"]) for model in call(f"{url}/v1/models")["data"]]
    except (ServerUnreachableError, KeyRejectedError):
        raise
    except (RequestFailedError, LookupError, TypeError) as error:
        raise RequestFailedError(
            f"{url}/v1/models names no model ({error}): is an OpenAI-compatible server there?"
        ) from error


def first_model(url: str) -> str:
    """Return the first model that a server lists. Raises RequestFailedError if there is none."""
    models = served_models(url)
    if not models:
        raise RequestFailedError(f"{url}/v1/models names no model: the server serves none")
    return models[0]


@contextmanager
def _failures_of(url: str) -> Iterator[None]:
    try:
        yield
    except TimeoutError as error:
        raise RequestFailedError(
            f"{url}: no whole answer before its deadline: check whether the server is stopped or overloaded"
        ) from error
    except aiohttp.ClientConnectorCertificateError as error:
        raise RequestFailedError(
            f"the certificate of {error.host}:{error.port} is not trusted: set SSL_CERT_FILE to its authority"
        ) from error
    except aiohttp.ClientConnectorError as error:
        number = error.os_error.errno or 0
        reason = os.strerror(number) if number > 0 else error.os_error.strerror or str(error.os_error)
        raise ServerUnreachableError(
            f"no server answers at {error.host}:{error.port} ({reason}): start one, or give the URL of another"
        ) from error
    except (aiohttp.ClientError, ValueError, msgspec.MsgspecError) as error:
        raise RequestFailedError(f"a request to {url} failed: {str(error) or type(error).__name__}") from error


async def _check_status(url: str, response: aiohttp.ClientResponse) -> None:
    if response.status != 200:
        body = await response.text()
        hint, kind = "", RequestFailedError
        if response.status in (401, 403):
            kind = KeyRejectedError
            hint = "; the key sent is that in" if os.environ.get(_KEY_VARIABLE) else "; set the key in"
            hint += f" the environment variable {_KEY_VARIABLE}"
        raise kind(f"{url}: HTTP {response.status}: {_message(body)[:500]}{hint}", body)


def _message(body: str) -> str:
    """Return the message of an error in OpenAI's shape, else the whole body."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return body


def sum_samples(url: str, **labels: str) -> dict[str, float]:
    """Return sums by sample name over all samples with these labels. Raises RequestFailedError."""
    sums: dict[str, float] = {}
    for family in text_string_to_metric_families(read_text(f"{url}/metrics")):
        for sample in family.samples:
            if labels.items() <= sample.labels.items():
                sums[sample.name] = sums.get(sample.name, 0.0) + sample.value
    return sums


@dataclass(frozen=True, slots=True)
class Transfers:
    """Sums over all KV transfers of a worker so far."""

    count: int
    num_bytes: float
    # Seconds from the first write to the confirmation of the last; exposed: those after the last forward pass.
    seconds: float
    exposed_seconds: float

    def __sub__(self, earlier: Transfers) -> Transfers:
        return Transfers(*map(operator.sub, astuple(self), astuple(earlier)))

    @property
    def gb_per_s(self) -> float:
        """Return 10^9 bytes per second. The time includes compute if compute hides the transfer."""
        return self.num_bytes / self.seconds / 1e9 if self.seconds > 0 else 0.0

    @property
    def hidden(self) -> float:
        """Return the share of the transfer time that overlaps with prompt computation, in [0, 1]."""
        return 1.0 - self.exposed_seconds / self.seconds if self.seconds > 0 else 0.0


def read_transfers(prefill_url: str) -> Transfers:
    """Return the figures of a prefill worker. Raises RequestFailedError."""
    sums = sum_samples(prefill_url)
    return Transfers(
        count=int(sums.get(f"{_TRANSFER}bytes_count", 0)),
        num_bytes=sums.get(f"{_TRANSFER}bytes_sum", 0.0),
        seconds=sums.get(f"{_TRANSFER}latency_seconds_sum", 0.0),
        exposed_seconds=sums.get(f"{_TRANSFER}exposed_seconds_sum", 0.0),
    )
