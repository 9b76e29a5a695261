"""Clients of the bootstrap server: prefill registers with it, decode looks prefill up. Both answer its challenge.

If the server is unreachable or not all ranks have registered (503), the request is repeated with growing pauses until
the caller's deadline. A definitive answer (400, 403 for another cluster token, 404, an unreadable body) ends the lookup
at once.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Generator

import httpx
import msgspec

from splitserve.core.errors import ConfigError, WorkerUnavailableError
from splitserve.process.authentication import answer_challenge
from splitserve.process.threads import LoopThread
from splitserve.transfer.peers import BootstrapAddress, LookupFailure
from splitserve.transfer.wire import PROTOCOL_VERSION, PrefillInfo

REQUEST_TIMEOUT_SECONDS = 5.0
FIRST_PAUSE_SECONDS = 0.05
LONGEST_PAUSE_SECONDS = 2.0
# Maximum number of lookups in progress.
MAX_LOOKUPS = 1024


class ClusterAuth(httpx.Auth):
    """Client authentication: proves to a bootstrap server that we hold the cluster token."""

    requires_request_body = True

    def __init__(self, token: bytes) -> None:
        self._token = token

    def auth_flow(self, request: httpx.Request) -> Generator[httpx.Request, httpx.Response, None]:
        response = yield request
        # A second challenge means that the first expired in flight, or that the server was replaced.
        for _ in range(2):
            challenge, target = response.headers.get("WWW-Authenticate", ""), request.url.raw_path.decode()
            authorization = answer_challenge(self._token, challenge, request.method, target, request.content)
            if response.status_code != 401 or authorization is None:
                return
            request.headers["Authorization"] = authorization
            response = yield request


class HttpDirectory:
    """Directory over HTTP, with a thread of its own. `on_result` is called from that thread when a result is ready."""

    def __init__(self, on_result: Callable[[], None], token: bytes = b"") -> None:
        self._on_result = on_result
        self._auth = ClusterAuth(token)
        self._lock = threading.Lock()
        self._answers: dict[BootstrapAddress, list[PrefillInfo] | LookupFailure] = {}
        self._running: set[BootstrapAddress] = set()
        self._thread = LoopThread("kv-directory")

    def request(self, address: BootstrapAddress, timeout: float) -> None:
        with self._lock:
            if address in self._running:
                return
            if len(self._running) >= MAX_LOOKUPS:
                self._answers[address] = LookupFailure(f"{MAX_LOOKUPS} lookups are under way", is_definitive=True)
                return
            self._answers.pop(address, None)
            self._running.add(address)
        self._thread.submit(self._look_up(address, timeout))

    def result(self, address: BootstrapAddress) -> list[PrefillInfo] | LookupFailure | None:
        with self._lock:
            return self._answers.pop(address, None)

    def close(self) -> None:
        self._thread.close()

    async def _look_up(self, address: BootstrapAddress, seconds: float) -> None:
        found: list[PrefillInfo] | LookupFailure = LookupFailure("the lookup was cancelled")
        try:
            # Ignore the proxies of the environment: they are for external traffic, not for the cluster's own.
            async with httpx.AsyncClient(auth=self._auth, timeout=REQUEST_TIMEOUT_SECONDS, trust_env=False) as client:
                found = await self._look_up_until(client, address, time.monotonic() + seconds)
        except Exception as error:
            found = LookupFailure(f"{error!r}", is_definitive=True)
        finally:
            with self._lock:
                self._running.discard(address)
                self._answers[address] = found
            self._on_result()

    async def _look_up_until(
        self, client: httpx.AsyncClient, address: BootstrapAddress, deadline: float
    ) -> list[PrefillInfo] | LookupFailure:
        pause = FIRST_PAUSE_SECONDS
        while True:
            found = await self._look_up_once(client, address)
            if isinstance(found, list) or found.is_definitive or time.monotonic() + pause > deadline:
                return found
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)

    async def _look_up_once(
        self, client: httpx.AsyncClient, address: BootstrapAddress
    ) -> list[PrefillInfo] | LookupFailure:
        url = f"{bootstrap_url(address.host, address.port)}/route"
        try:
            response = await client.get(url, params={"version": PROTOCOL_VERSION, "dp_rank": address.dp_rank})
        except httpx.TransportError as error:
            return LookupFailure(f"{url} does not answer: {error!r}")
        if response.status_code == 200:
            try:
                return msgspec.json.decode(response.content, type=list[PrefillInfo])
            except msgspec.DecodeError as error:
                return LookupFailure(f"{url} answers something else: {error}", is_definitive=True)
        text = f"{url} answers {response.status_code}: {response.text[:200]}"
        return LookupFailure(text, is_definitive=400 <= response.status_code < 500)


def bootstrap_url(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def register_rank(host: str, port: int, info: PrefillInfo, token: bytes = b"", *, timeout: float) -> None:
    """Register a prefill rank. Block until it is done.

    Raises ConfigError if the server refuses, WorkerUnavailableError if it is unreachable for `timeout` seconds.
    """
    url = f"{bootstrap_url(host, port)}/route"
    deadline, pause = time.monotonic() + timeout, FIRST_PAUSE_SECONDS
    while True:
        try:
            response = httpx.put(
                url,
                content=msgspec.json.encode(info),
                auth=ClusterAuth(token),
                timeout=REQUEST_TIMEOUT_SECONDS,
                trust_env=False,
            )
        except httpx.TransportError as error:
            problem = repr(error)
        else:
            if response.status_code == 200:
                return
            problem = f"{response.status_code}: {response.text[:200]}"
            if response.status_code < 500:
                raise ConfigError(f"the bootstrap server at {url} refuses this prefill rank: {problem}")
        if time.monotonic() + pause > deadline:
            raise WorkerUnavailableError(f"cannot register with the bootstrap server at {url}: {problem}")
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
