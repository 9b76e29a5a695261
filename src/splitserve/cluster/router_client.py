"""What a supervisor asks of the cluster's router."""

from __future__ import annotations

import logging
from types import TracebackType
from typing import Any, Self
from urllib.parse import quote, urlsplit

import aiohttp

from splitserve.core.request import DisaggregationMode
from splitserve.errors import WorkerUnavailableError
from splitserve.launch.ready_file import ReadyInfo
from splitserve.router.addresses import connector
from splitserve.router.api_keys import key_header
from splitserve.router.register import register_disaggregation_server

logger = logging.getLogger(__name__)

_TIMEOUT = aiohttp.ClientTimeout(total=5.0)


class RouterClient:
    """Use as a context manager. `operator_key`: where the router asks for one. All raise WorkerUnavailableError."""

    def __init__(self, operator_key: str | None, address: str | None = None) -> None:
        """`address`: of the router's name, the one to connect to; None: any."""
        self._key = operator_key
        self._address = address
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            timeout=_TIMEOUT, headers=key_header(self._key), connector=connector(self._address)
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._session is not None:
            await self._session.close()

    async def workers(self, router_url: str) -> list[dict[str, Any]]:
        """As GET /workers has them."""
        answer = await self._ask("GET", f"{router_url}/workers")
        workers: list[dict[str, Any]] = answer["workers"]
        return workers

    async def ready_workers(self, router_url: str) -> set[str]:
        """URLs of those whose path is proven."""
        return {worker["url"] for worker in await self.workers(router_url) if worker["ready"]}

    async def num_running(self, router_url: str, worker_url: str) -> int:
        """Requests of this router on that worker."""
        return sum(worker["num_running"] for worker in await self.workers(router_url) if worker["url"] == worker_url)

    async def drain(self, router_url: str, worker_url: str, *, migrate: bool) -> None:
        """The worker gets nothing new. `migrate`: what runs there moves to others now."""
        await self._ask("POST", f"{router_url}/workers/drain", {"url": worker_url, "migrate": migrate})

    async def forget(self, router_url: str, worker_url: str) -> None:
        """It is gone. Never raises: the router finds that out, too, and forgets it in a minute."""
        try:
            await self._ask("DELETE", f"{router_url}/workers?url={quote(worker_url, safe='')}")
        except WorkerUnavailableError as error:
            logger.info("could not remove %s: %s", worker_url, error)

    async def announce(self, router_url: str, mode: DisaggregationMode, ready: ReadyInfo) -> None:
        """As the worker would do it. Never raises: it is done again."""
        host = urlsplit(ready.url).netloc.rpartition(":")[0]
        try:
            await register_disaggregation_server(mode, ready.port, ready.bootstrap_port, router_url, host, self._key)
        except WorkerUnavailableError as error:
            logger.warning("could not announce %s: %s", ready.url, error)

    async def _ask(self, method: str, url: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        assert self._session is not None, "used outside of its context"
        try:
            async with self._session.request(method, url, json=body) as response:
                answer: dict[str, Any] = await response.json()
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            raise WorkerUnavailableError(f"the router {url} does not answer: {error or type(error).__name__}") from None
        if response.status != 200:
            raise WorkerUnavailableError(f"the router {url}: {answer.get('error', {}).get('message', answer)}")
        return answer
