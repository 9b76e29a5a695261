"""Table of the client requests this worker serves: admission, request ids, and the wait until none is left.

It knows request ids and counts only, neither HTTP nor the scheduler. Used from one event loop's thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from splitserve.core.errors import CapacityError, InvalidRequestError, WorkerUnavailableError


class RequestTable:
    """Open requests. `capacity`: maximum number of open samples."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        # Request id -> the rids of its samples.
        self._names: dict[str, tuple[str, ...]] = {}
        self._rids: set[str] = set()
        # Rids that a client or operator ordered to end.
        self._ordered_to_end: set[str] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self.is_draining = False

    @property
    def num_open_samples(self) -> int:
        return len(self._rids)

    @contextmanager
    def admit(self, names: Mapping[str, tuple[str, ...]], *, is_again: bool = False) -> Iterator[None]:
        """Hold a slot for each sample while the context is open.

        `is_again`: an earlier attempt of the same request may still run here; its samples have rids of their own.

        Raises WorkerUnavailableError while draining, CapacityError when full, InvalidRequestError on a running id.
        """
        rids = [rid for group in names.values() for rid in group]
        self._check(names, rids, is_again)
        for name, group in names.items():
            self._names[name] = (*self._names.get(name, ()), *group)
        self._rids.update(rids)
        self._idle.clear()
        try:
            yield
        finally:
            for name, group in names.items():
                self._names[name] = tuple(rid for rid in self._names[name] if rid not in group)
                if not self._names[name]:
                    del self._names[name]
            self._rids.difference_update(rids)
            self._ordered_to_end.difference_update(rids)
            if not self._rids:
                self._idle.set()

    def samples_of(self, name: str) -> tuple[str, ...]:
        """Return the rids to abort for this request id (or the rid of a single sample). Empty if none is open."""
        return self._names.get(name) or ((name,) if name in self._rids else ())

    def all_samples(self) -> tuple[str, ...]:
        return tuple(self._rids)

    def order_to_end(self, rid: str) -> None:
        """Mark a sample as ordered to end, so that its end does not count as a failure."""
        if rid in self._rids:
            self._ordered_to_end.add(rid)

    def is_ordered_to_end(self, rid: str) -> bool:
        return rid in self._ordered_to_end

    def begin_drain(self) -> None:
        """Accept no new requests; running ones continue."""
        self.is_draining = True

    def end_drain(self) -> None:
        """Accept requests again."""
        self.is_draining = False

    async def wait_idle(self, timeout: float) -> bool:
        """Return whether all requests ended within `timeout` seconds."""
        try:
            async with asyncio.timeout(timeout):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    def _check(self, names: Mapping[str, tuple[str, ...]], rids: list[str], is_again: bool) -> None:
        if self.is_draining:
            raise WorkerUnavailableError("this worker is draining and takes no new requests: send it to another")
        is_known = not is_again and bool(names.keys() & self._names.keys())
        if len(set(rids)) < len(rids) or any(rid in self._rids for rid in rids) or is_known:
            raise InvalidRequestError(
                "a request of this id is running on this worker: use another rid, or leave it out", param="rid"
            )
        if len(self._rids) + len(rids) > self._capacity:
            raise CapacityError(
                f"{len(self._rids)} samples are open and {len(rids)} more would exceed this worker's {self._capacity}: "
                "retry in a second"
            )
