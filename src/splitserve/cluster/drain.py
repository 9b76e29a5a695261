"""`splitserve cluster drain`: a router lets go of one worker, as before its machine is taken away."""

from __future__ import annotations

import asyncio

from splitserve.cluster.router_client import RouterClient
from splitserve.errors import DeadlineExceededError

_PAUSE = 0.5


async def drain_worker(
    router_url: str, worker_url: str, *, migrate: bool, timeout: float, operator_key: str | None
) -> None:
    """Returns when nothing of the router's runs on the worker any more, or the router knows it no longer.

    Raises WorkerUnavailableError where the router does not answer or cannot, DeadlineExceededError.
    """
    async with RouterClient(operator_key) as router:
        try:
            async with asyncio.timeout(timeout):
                await router.drain(router_url, worker_url, migrate=migrate)
                while await router.num_running(router_url, worker_url):  # noqa: ASYNC110
                    await asyncio.sleep(_PAUSE)
        except TimeoutError:
            raise DeadlineExceededError(
                f"requests still run on {worker_url} after {timeout:g} s (stage: drain): they end with it"
            ) from None
