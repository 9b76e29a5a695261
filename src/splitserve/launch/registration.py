"""Keeps a worker known to its routers: announces it again and again, so that a restarted router learns of it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from splitserve.core.request import DisaggregationMode
from splitserve.errors import WorkerUnavailableError
from splitserve.router.register import deregister_disaggregation_server, register_disaggregation_server

logger = logging.getLogger(__name__)

# Seconds between two announcements while the router answers.
REFRESH_INTERVAL = 10.0
# Seconds from one failed attempt to the next: from the first to the last, doubling.
_BACKOFF = (0.1, 5.0)
# Seconds the goodbye may take.
_DEREGISTER_TIMEOUT = 2.0


class RouterRegistration:
    """`start` it while the worker serves; `close` says goodbye. No router waits for another."""

    def __init__(
        self,
        router_urls: Sequence[str],
        mode: DisaggregationMode,
        host: str,
        port: int,
        bootstrap_port: int | None,
        *,
        api_key: str | None = None,
    ) -> None:
        self._router_urls = tuple(router_urls)
        self._mode = mode
        self._host = host
        self._port = port
        self._bootstrap_port = bootstrap_port if mode is DisaggregationMode.PREFILL else None
        self._api_key = api_key
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        self._tasks = [asyncio.create_task(self._run(url), name="router-registration") for url in self._router_urls]

    async def close(self) -> None:
        """Stop announcing and deregister, where a router still listens. Idempotent."""
        tasks, self._tasks = self._tasks, []
        if not tasks:
            return
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(self._say_goodbye(url) for url in self._router_urls))

    async def _say_goodbye(self, router_url: str) -> None:
        try:
            async with asyncio.timeout(_DEREGISTER_TIMEOUT):
                await deregister_disaggregation_server(
                    self._mode, self._port, self._bootstrap_port, router_url, self._host, self._api_key
                )
        except (WorkerUnavailableError, TimeoutError) as error:
            logger.info("could not deregister: %s", error or "no answer")

    async def _run(self, router_url: str) -> None:
        delay, longest = _BACKOFF
        is_known = False
        while True:
            try:
                await register_disaggregation_server(
                    self._mode, self._port, self._bootstrap_port, router_url, self._host, self._api_key
                )
            except WorkerUnavailableError as error:
                level = logging.WARNING if is_known or delay >= 1.0 else logging.INFO
                logger.log(level, "not registered, trying again in %.1f s: %s", delay, error)
                await asyncio.sleep(delay)
                is_known, delay = False, min(longest, delay * 2)
                continue
            if not is_known:
                logger.info("registered with the router %s", router_url)
            is_known, delay = True, _BACKOFF[0]
            await asyncio.sleep(REFRESH_INTERVAL)


class Membership:
    """A worker's place at its routers, in one role at a time. `make`: its registration in a role; None: no router."""

    def __init__(self, make: Callable[[DisaggregationMode, int | None], RouterRegistration | None]) -> None:
        self._make = make
        self._registration: RouterRegistration | None = None

    def enter(self, mode: DisaggregationMode, bootstrap_port: int | None) -> None:
        """Announce it, from now on."""
        self._registration = self._make(mode, bootstrap_port)
        if self._registration is not None:
            self._registration.start()

    async def leave(self) -> None:
        """Say goodbye. Idempotent."""
        registration, self._registration = self._registration, None
        if registration is not None:
            await registration.close()
