"""Common part of both ends of a room: a state that only the table changes, one failure cause, one owner.

The scheduler's thread may read `poll` and `failure` at any time. Everything else happens under the manager's lock.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field

from splitserve.cache.shared_pages import SharedPages
from splitserve.core.clock import Clock
from splitserve.core.config import DisaggregationConfig
from splitserve.core.errors import DeadlineExceededError, RequestAbortedError, SplitserveError
from splitserve.core.request import RoomKey
from splitserve.transfer.arrival import Arrivals
from splitserve.transfer.checksum import Checksums
from splitserve.transfer.mail import Mailbox
from splitserve.transfer.staging import StagingArea
from splitserve.transfer.state import KVEvent, KVPoll, advance
from splitserve.transfer.transports.base import Transport
from splitserve.transfer.wire import KVArgs


@dataclass(frozen=True, slots=True, kw_only=True)
class RoomLimits:
    """Bounds of a manager's tables."""

    # Maximum number of open rooms.
    max_rooms: int = 8192
    # Prefill: announcements and aborts kept for rooms without a request.
    max_early: int = 8192
    # Prefill: finished rooms remembered to answer late messages.
    max_closed: int = 8192
    # Maximum number of peers.
    max_peers: int = 1024


@dataclass(slots=True, kw_only=True)
class Context:
    """State that a manager shares with its prefill or decode half and its rooms."""

    clock: Clock
    mailbox: Mailbox
    transport: Transport
    args: KVArgs
    # KVArgs of all ranks of this worker, including ours, in order of their index.
    group_args: list[KVArgs]
    config: DisaggregationConfig
    # Prefill: memory to convert and pack KV in. None: KV cannot be converted or packed.
    staging: StagingArea | None
    # Decode: widens KV that travelled in a narrower dtype. None: no such KV.
    arrivals: Arrivals | None
    # Computes checksums of rooms in our pool. None: the CPU cannot read the pool.
    checksums: Checksums | None
    # Pool shared with other workers, for page exchange. None: the pool is not shared.
    shared: SharedPages | None
    limits: RoomLimits
    # Guards the manager and all its rooms.
    lock: contextlib.AbstractContextManager[object]
    # Makes the owner call `tick` soon. May be called from any thread.
    wake: Callable[[], None]
    # Set when a room's state changes; reset by `tick`.
    changed: bool = field(default=False)


class Room:
    def __init__(self, context: Context, key: RoomKey, rid: str) -> None:
        self.context = context
        self.key = key
        self.rid = rid
        self.opened_at = context.clock.now()
        self._state = KVPoll.BOOTSTRAPPING
        self._failure: SplitserveError | None = None
        self._on_change: Callable[[], None] | None = None

    def watch(self, on_change: Callable[[], None]) -> None:
        self._on_change = on_change

    def note_change(self) -> None:
        """Report a changed state or quiescence. Call under the lock, after the change: observers then read both."""
        self.context.changed = True
        if self._on_change is not None:
            self._on_change()

    @property
    def is_final(self) -> bool:
        return self._state in (KVPoll.SUCCESS, KVPoll.FAILED)

    def poll(self) -> KVPoll:
        return self._state

    def failure(self) -> SplitserveError:
        if self._failure is None:
            raise RuntimeError(f"room {self.key} of request {self.rid} is {self._state.name}: it has no failure")
        return self._failure

    def advance(self, event: KVEvent) -> None:
        self._state = advance(self._state, event)
        self.note_change()

    def fail(self, error: SplitserveError) -> bool:
        """Move to Failed. Return False if the room was final already: the first cause stays."""
        if self.is_final:
            return False
        # Set the cause before the state, so that a reader of Failed finds it.
        self._failure = error
        self.advance(KVEvent.FAILED)
        return True

    def deadline_error(self, stage: str, seconds: float, setting: str) -> DeadlineExceededError:
        return DeadlineExceededError(
            f"room {self.key} of request {self.rid} spent over {seconds:g} s {stage}: "
            f"see whether the other side is up and not overloaded, or raise {setting}"
        )


def abort_error(rid: str, key: RoomKey, reason: str, status_code: int) -> SplitserveError:
    """Return the failure of a room that this worker aborted."""
    error = RequestAbortedError(f"request {rid} (room {key}): {reason}")
    error.http_status = status_code
    return error
