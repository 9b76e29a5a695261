"""Orders to abort requests that are at the router: before their first attempt, or between two attempts.

Workers get each order, too, and end the requests that they have. A request that returns to the router after that was
aborted there, as its worker could not end it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from splitserve.api.validation import request_ids
from splitserve.core.errors import RequestAbortedError
from splitserve.router.access_log import LoggedRequest


class _Abortable:
    def __init__(self, record: LoggedRequest) -> None:
        self.record = record
        # Ids of its prompts for which there was no order.
        self.wanted = set(request_ids(record.rid))
        # Ends the request as soon as its time is set.
        self.end = asyncio.timeout(None)


class AbortOrders:
    def __init__(self) -> None:
        self._requests: set[_Abortable] = set()

    @asynccontextmanager
    async def obeyed(self, record: LoggedRequest) -> AsyncIterator[None]:
        """Let orders end the block while the request is at the router. Raises RequestAbortedError."""
        request = _Abortable(record)
        self._requests.add(request)
        try:
            async with request.end:
                yield
        except TimeoutError:
            if request.end.expired():
                check_order(record)
            raise
        finally:
            self._requests.discard(request)

    def give(self, rid: str | None) -> None:
        """Order to abort the request with this id. None: all requests. A batch needs an order for each of its ids."""
        for request in list(self._requests):
            request.wanted -= request.wanted if rid is None else {rid}
            if request.wanted:
                continue
            request.record.is_aborted = True
            if request.record.is_at_router:
                self._requests.remove(request)
                request.end.reschedule(asyncio.get_running_loop().time())


def check_order(record: LoggedRequest) -> None:
    """Raise RequestAbortedError if there was an order to abort all of the request."""
    if record.is_aborted:
        where = f"request {record.name} (stage: waiting at the router)"
        raise RequestAbortedError(f"{where}: aborted through /abort_request") from None
