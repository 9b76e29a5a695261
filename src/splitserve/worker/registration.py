"""Registration of a worker at its routers, repeated so that a restarted router knows it again."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Sequence

from splitserve.core.errors import WorkerUnavailableError
from splitserve.core.request import DisaggregationMode
from splitserve.process.threads import end_tasks
from splitserve.router.register import LookUp, look_up, named, register_disaggregation_server

logger = logging.getLogger(__name__)

# Seconds between two registrations while the router answers, and between two look-ups of a name's addresses.
REFRESH_INTERVAL = 10.0
# Seconds from one failed attempt to the next: first pause, longest pause. Pauses double.
_BACKOFF = (0.1, 5.0)
# Timeout of the deregistration, seconds.
_DEREGISTER_TIMEOUT = 2.0


class RouterRegistration:
    """Registrations of a worker at all its routers, in one role at a time. Routers are independent.

    A name with several addresses counts as several routers, as many as it has at the time.
    """

    def __init__(
        self,
        router_urls: Sequence[str],
        host: str,
        port: int,
        *,
        api_key: str | None = None,
        tls: ssl.SSLContext | None = None,
        scheme: str = "http",
        look_up: LookUp = look_up,
    ) -> None:
        self._router_urls = router_urls
        self._host = host
        self._port = port
        self._api_key = api_key
        self._tls = tls
        self._scheme = scheme
        self._look_up = look_up
        self._mode = DisaggregationMode.NULL
        self._bootstrap_port: int | None = None
        self._followers: list[asyncio.Task[None]] = []
        # One task per router, by URL and address.
        self._tasks: dict[tuple[str, str | None], asyncio.Task[None]] = {}
        # Routers that expect this worker to return.
        self._expecting: set[tuple[str, str | None]] = set()

    def enter(self, mode: DisaggregationMode, bootstrap_port: int | None) -> None:
        """Register the worker in this role from now on, while it serves. `bootstrap_port`: for prefill only."""
        self._mode, self._expecting = mode, set()
        self._bootstrap_port = bootstrap_port if mode is DisaggregationMode.PREFILL else None
        self._followers = [asyncio.create_task(self._follow(url), name="router-addresses") for url in self._router_urls]

    async def leave(self, reason: str = "") -> None:
        """Stop registering, and deregister at every router that still listens. Idempotent.

        `reason`: for the operators of these routers, if the worker will return. Without it, routers that it left with a
        reason forget that.
        """
        followers, self._followers = self._followers, []
        await end_tasks(followers)
        tasks, self._tasks = self._tasks, {}
        await end_tasks(tasks.values())
        routers = {*tasks, *self._expecting}
        self._expecting = routers if reason else set()
        await asyncio.gather(*(self._deregister(*router, reason) for router in routers))

    async def _follow(self, router_url: str) -> None:
        """Keep one task for each address of that router's name."""
        while True:
            try:
                found = set(await self._look_up(router_url))
            # UnicodeError: a host name with a label that is empty or too long.
            except (OSError, UnicodeError) as error:
                # Known addresses stay. Without an address the registration fails, and logs it.
                logger.debug("no address of %s: %s", router_url, error)
                found = {address for url, address in self._tasks if url == router_url} or {None}
            for router in [known for known in self._tasks if known[0] == router_url and known[1] not in found]:
                # Do not deregister: no router uses this address any more.
                await end_tasks([self._tasks.pop(router)])
            for address in found:
                if (router_url, address) not in self._tasks:
                    run = asyncio.create_task(self._run(router_url, address), name="router-registration")
                    self._tasks[router_url, address] = run
            await asyncio.sleep(REFRESH_INTERVAL)

    async def _deregister(self, router_url: str, address: str | None, reason: str) -> None:
        try:
            async with asyncio.timeout(_DEREGISTER_TIMEOUT):
                await self._send(router_url, address, leave=True, reason=reason)
        except (WorkerUnavailableError, TimeoutError) as error:
            logger.info("could not deregister: %s", error or "no answer")

    async def _send(self, router_url: str, address: str | None, *, leave: bool = False, reason: str = "") -> None:
        worker = (self._mode, self._port, self._bootstrap_port, router_url, self._host)
        more = (self._api_key, address, self._tls, self._scheme)
        await register_disaggregation_server(*worker, *more, leave=leave, reason=reason)

    async def _run(self, router_url: str, address: str | None) -> None:
        delay, longest = _BACKOFF
        # Whether it is registered, and the logged reason of the outage.
        is_known, reported = False, ""
        while True:
            try:
                await self._send(router_url, address)
            except WorkerUnavailableError as error:
                is_outage = is_known or delay >= 1.0
                is_repeated = str(error) == reported
                level = logging.DEBUG if is_repeated else logging.WARNING if is_outage else logging.INFO
                logger.log(level, "not registered, trying again until it succeeds: %s", error)
                reported = str(error) if is_outage else reported
                await asyncio.sleep(delay)
                is_known, delay = False, min(longest, delay * 2)
                continue
            if not is_known:
                logger.info("registered with the router %s", named(router_url, address))
            is_known, reported, delay = True, "", _BACKOFF[0]
            await asyncio.sleep(REFRESH_INTERVAL)
