"""HTTP client for the router of a cluster, of its supervisor and of `splitserve cluster drain` and `resume`."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import quote, urlsplit

import aiohttp

from splitserve.api.api_keys import key_header
from splitserve.core.errors import DeadlineExceededError, WorkerUnavailableError
from splitserve.core.request import DisaggregationMode
from splitserve.router.register import LookUp, connector, look_up, register_disaggregation_server

logger = logging.getLogger(__name__)

_TIMEOUT = aiohttp.ClientTimeout(total=5.0)
# Fields of a worker that left its router, beside those in its entry.
_LEFT = {"ready": False, "has_left": True, "switching_to": None, "num_running": 0}
# Seconds between two requests for the number of running requests of a draining worker.
_DRAIN_INTERVAL = 0.5


class _OrderRefusedError(WorkerUnavailableError):
    """A router answered that it does not execute an order now."""


class RouterClient:
    """HTTP to the router, and to workers. All methods raise WorkerUnavailableError.

    `operator_key`: for a router with keys. `address`: the address of the router's name to connect to. None: any.
    `tls`: for a router with https, `worker_tls`: for workers with https. None: the system's trusted certificates.
    """

    def __init__(
        self,
        operator_key: str | None,
        address: str | None = None,
        tls: ssl.SSLContext | None = None,
        worker_tls: ssl.SSLContext | None = None,
    ) -> None:
        self._key = operator_key
        self._address = address
        self._tls = tls
        self._worker_tls = worker_tls

    async def num_requests(self, worker_url: str, worker_key: str | None) -> int:
        """Return how many requests run or wait on a worker. Those of a prefill worker count on decode workers only."""
        if (await self._role(worker_url, worker_key))["role"] == DisaggregationMode.PREFILL:
            return 0
        answer = await self._send("GET", f"{worker_url}/get_load", access=(worker_key, self._worker_tls))
        return sum(int(load["num_reqs"]) for load in answer)

    async def answers(self, url: str, seconds: float) -> bool:
        """Return False if no answer and no refusal arrives within `seconds`, also if no connection can be made."""
        timeout = aiohttp.ClientTimeout(total=seconds)
        try:
            async with (
                aiohttp.ClientSession(timeout=timeout, connector=connector(None, self._worker_tls)) as session,
                session.get(f"{url}/live"),
            ):
                return True
        except TimeoutError:
            return False
        except (aiohttp.ClientError, OSError):
            # It has ended, which the placer reports, or it does not use these certificates.
            return True

    async def workers(self, router_url: str) -> list[dict[str, Any]]:
        """Return the entries of GET /workers. Those of workers that left have `reason` and `has_left`."""
        answer = await self._send("GET", f"{router_url}/workers")
        return [*({**_LEFT, **entry} for entry in answer.get("left", ())), *answer["workers"]]

    async def num_running(self, router_url: str, worker_url: str) -> int:
        """Return how many requests of this router run on that worker."""
        return sum(worker["num_running"] for worker in await self.workers(router_url) if worker["url"] == worker_url)

    async def drain(self, router_url: str, worker_url: str, *, migrate: bool, force: bool = False) -> None:
        """Stop new requests to the worker. `migrate`: the running ones move to other workers now.

        `force`: also if no other worker can serve meanwhile.
        """
        body = {"url": worker_url, "migrate": migrate, "force": force}
        await self._send("POST", f"{router_url}/workers/drain", body)

    async def resume(self, router_url: str, worker_url: str) -> None:
        """End the drain of a worker."""
        await self._send("POST", f"{router_url}/workers/resume", {"url": worker_url})

    async def forget(self, router_url: str, worker_url: str) -> None:
        """Remove a lost worker. Never raises: the router also detects the loss, within a minute."""
        try:
            await self._send("DELETE", f"{router_url}/workers?url={quote(worker_url, safe='')}")
        except WorkerUnavailableError as error:
            logger.debug("could not remove %s: %s", worker_url, error)

    async def announce(self, router_url: str, worker_url: str, worker_key: str | None) -> None:
        """Register a worker on its behalf, in its current role. Never raises, because the caller repeats it."""
        parts = urlsplit(worker_url)
        try:
            found = await self._role(worker_url, worker_key)
            if found["switching_to"] is not None or parts.port is None:
                return
            worker = (DisaggregationMode(found["role"]), parts.port, found["bootstrap_port"], router_url)
            host = parts.netloc.rpartition(":")[0]
            await register_disaggregation_server(*worker, host, self._key, tls=self._tls, scheme=parts.scheme)
        except WorkerUnavailableError as error:
            logger.warning("could not announce %s: %s", worker_url, error)

    async def _role(self, worker_url: str, worker_key: str | None) -> dict[str, Any]:
        """Return a worker's GET /role."""
        role: dict[str, Any] = await self._send("GET", f"{worker_url}/role", access=(worker_key, self._worker_tls))
        return role

    async def _send(
        self, method: str, url: str, body: Any = None, access: tuple[str | None, ssl.SSLContext | None] | None = None
    ) -> Any:
        """Send a request and return the answer. `access`: key and TLS context. None: those for the router."""
        key, tls = access or (self._key, self._tls)
        try:
            async with (
                aiohttp.ClientSession(timeout=_TIMEOUT, connector=connector(self._address, tls)) as session,
                session.request(method, url, json=body, headers=key_header(key)) as response,
            ):
                answer = await response.json()
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            raise WorkerUnavailableError(f"{url} does not answer: {error or type(error).__name__}") from None
        if response.status != 200:
            kind = _OrderRefusedError if response.status == 503 else WorkerUnavailableError
            raise kind(f"{url}: {answer.get('error', {}).get('message', answer)}")
        return answer


async def drain_worker(
    router_url: str,
    worker_url: str,
    *,
    migrate: bool,
    force: bool,
    timeout: float,
    operator_key: str | None,
    look_up: LookUp = look_up,
) -> None:
    """Drain a worker: return when no request of the routers runs on it any more, or they do not list it any more.

    A name with several addresses is several routers, and each drains the worker. Some may be lost, or not know it.
    Raises WorkerUnavailableError if none drains it, DeadlineExceededError.
    """

    async def order(router: RouterClient) -> None:
        await router.drain(router_url, worker_url, migrate=migrate, force=force)
        while await router.num_running(router_url, worker_url):  # noqa: ASYNC110
            await asyncio.sleep(_DRAIN_INTERVAL)

    try:
        async with asyncio.timeout(timeout):
            await _at_all(router_url, order, operator_key, look_up)
    except TimeoutError:
        raise DeadlineExceededError(
            f"requests still run on {worker_url} after {timeout:g} s (stage: drain): it still drains and gets "
            "no new ones; repeat the command with a longer --timeout, or with --migrate"
        ) from None


async def resume_worker(
    router_url: str, worker_url: str, *, operator_key: str | None, look_up: LookUp = look_up
) -> None:
    """End the drain of a worker at all addresses of the router's name. Raises WorkerUnavailableError if none does."""
    await _at_all(router_url, lambda router: router.resume(router_url, worker_url), operator_key, look_up)


async def _at_all(
    router_url: str, order: Callable[[RouterClient], Awaitable[None]], operator_key: str | None, look_up: LookUp
) -> None:
    """Send an order to each address of the router's name. Raises WorkerUnavailableError if it fails at all of them."""
    try:
        addresses = await look_up(router_url)
    except OSError as error:
        raise WorkerUnavailableError(f"the router {router_url} has no address: {error}") from None

    async def send(address: str | None) -> None:
        try:
            await order(RouterClient(operator_key, address))
        except WorkerUnavailableError as error:
            if address is None:
                raise
            raise type(error)(f"at {address}: {error.message}; other routers may have executed the order") from None

    answers = await asyncio.gather(*map(send, addresses), return_exceptions=True)
    problems = [answer for answer in answers if isinstance(answer, BaseException)]
    for problem in problems:
        is_tolerable = isinstance(problem, WorkerUnavailableError) and not isinstance(problem, _OrderRefusedError)
        if len(problems) == len(answers) or not is_tolerable:
            raise problem
        logger.warning("an order failed: %s", problem)
