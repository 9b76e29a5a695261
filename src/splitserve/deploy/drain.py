"""`splitserve cluster drain`: drains one worker at its routers, for example before its machine is removed."""

from __future__ import annotations

import asyncio
import logging

from splitserve.core.errors import DeadlineExceededError, WorkerUnavailableError
from splitserve.deploy.router_client import RouterClient
from splitserve.router.addresses import LookUp, look_up

logger = logging.getLogger(__name__)

_PAUSE = 0.5


async def drain_worker(
    router_url: str,
    worker_url: str,
    *,
    migrate: bool,
    timeout: float,
    operator_key: str | None,
    look_up: LookUp = look_up,
) -> None:
    """Return when no request of the routers runs on the worker any more, or they do not list it any more.

    A name with several addresses is several routers, and each drains the worker. Some may be lost, or not know it.
    Raises WorkerUnavailableError if none drains it, DeadlineExceededError.
    """
    try:
        addresses = await look_up(router_url)
    except OSError as error:
        raise WorkerUnavailableError(f"the router {router_url} has no address: {error}") from None
    orders = [_drain_at(router_url, address, worker_url, migrate, operator_key) for address in addresses]
    try:
        async with asyncio.timeout(timeout):
            answers = await asyncio.gather(*orders, return_exceptions=True)
    except TimeoutError:
        raise DeadlineExceededError(
            f"requests still run on {worker_url} after {timeout:g} s (stage: drain): they end with it"
        ) from None
    problems = [answer for answer in answers if isinstance(answer, BaseException)]
    for problem in problems:
        if len(problems) == len(answers) or not isinstance(problem, WorkerUnavailableError):
            raise problem
        logger.warning("not drained there: %s", problem.message)


async def _drain_at(
    router_url: str, address: str | None, worker_url: str, migrate: bool, operator_key: str | None
) -> None:
    """Drain the worker at one router. Raises WorkerUnavailableError if that does not answer or rejects the order."""
    async with RouterClient(operator_key, address) as router:
        try:
            await router.drain(router_url, worker_url, migrate=migrate)
            while await router.num_running(router_url, worker_url):  # noqa: ASYNC110
                await asyncio.sleep(_PAUSE)
        except WorkerUnavailableError as error:
            if address is None:
                raise
            raise WorkerUnavailableError(f"at {address}: {error.message}") from None
