"""Release of a worker's memory and updates of its weights, as its routes use them; `worker/memory.py` implements it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol

from splitserve.core.errors import InvalidRequestError
from splitserve.core.memory import MemoryTag, WeightsSource

# Longest wait for running requests, seconds.
MAX_WAIT_SECONDS = 86400.0


@dataclass(frozen=True, slots=True)
class RunningRequests:
    """What happens to running requests before memory changes. Neither flag: they block the change."""

    # End them now, as POST /abort_request does.
    abort: bool = False
    # Wait for their ends.
    drain: bool = False
    # Seconds until the worker must be idle.
    timeout: float = 60.0


def running_requests(*, abort: bool, drain: bool, timeout: float) -> RunningRequests:
    """Return what happens to running requests. Raises InvalidRequestError."""
    if abort and drain:
        raise InvalidRequestError("abort and drain exclude each other: send one of them", param="drain")
    if not 0.0 < timeout <= MAX_WAIT_SECONDS:
        raise InvalidRequestError(f"timeout {timeout:g}: must be in (0, {MAX_WAIT_SECONDS:g}]", param="timeout")
    return RunningRequests(abort, drain, timeout)


def tags_of(names: Collection[str] | None) -> frozenset[MemoryTag]:
    """Return the tags of these names. None: all. Raises InvalidRequestError."""
    if names is None:
        return frozenset(MemoryTag)
    if isinstance(names, str):
        raise InvalidRequestError(f"tags: {names!r} is a text: give a list, such as [{names!r}]", param="tags")
    if not names or (unknown := sorted(set(names) - set(MemoryTag))):
        found = repr(unknown[0]) if names else "an empty list"
        raise InvalidRequestError(f"tags: {found} is none of {', '.join(MemoryTag)}", param="tags")
    return frozenset(map(MemoryTag, names))


class MemoryControl(Protocol):
    """Changes of a worker's memory, one at a time.

    All raise InvalidRequestError, MemoryBlockedError, DeadlineExceededError, WorkerUnavailableError. If `update` or the
    first `release` raises, the worker continues as before; if `resume` raises, it stays released.
    """

    @property
    def released(self) -> frozenset[MemoryTag]: ...

    async def release(self, tags: Collection[MemoryTag], running: RunningRequests) -> None:
        """Return memory to the system. The worker takes no requests until all of it was resumed."""
        ...

    async def resume(self, tags: Collection[MemoryTag]) -> None:
        """Make released memory usable again, and serve if nothing is released any more."""
        ...

    async def update(self, source: WeightsSource, running: RunningRequests) -> None:
        """Replace the weights. Weights that were released are resumed by it."""
        ...
