"""What both ends of a room have in common: a state that only the table moves, one cause of failure, one owner.

The scheduler's thread reads `poll` and `failure` at any time; everything else happens under the manager's lock.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field

from splitserve.cache.shared_pages import SharedPages
from splitserve.clock import Clock
from splitserve.config import DisaggregationConfig
from splitserve.core.request import RoomKey
from splitserve.disaggregation.arrival import Arrivals
from splitserve.disaggregation.checksum import Checksums
from splitserve.disaggregation.mail import Mailbox
from splitserve.disaggregation.staging import Staging
from splitserve.disaggregation.state import KVEvent, KVPoll, advance
from splitserve.disaggregation.transports.base import Transport
from splitserve.disaggregation.wire import KVArgs
from splitserve.errors import DeadlineExceededError, RequestAbortedError, SplitserveError


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds of a manager's tables."""

    # Rooms open at a time.
    max_rooms: int = 8192
    # Prefill: announcements and aborts of rooms whose request has not come yet.
    max_early: int = 8192
    # Prefill: finished rooms remembered, so that late messages are answered with what happened.
    max_closed: int = 8192
    # Peers at a time.
    max_peers: int = 1024


@dataclass(slots=True, kw_only=True)
class Context:
    """What a manager hands to its side and its rooms."""

    clock: Clock
    mailbox: Mailbox
    transport: Transport
    args: KVArgs
    # Of all ranks of this worker, ours among them, in order of their index.
    group_args: list[KVArgs]
    config: DisaggregationConfig
    # Prefill: where KV is converted and packed; None: it cannot be.
    staging: Staging | None
    # Decode: widens what travelled in a narrower dtype; None: nothing does.
    arrivals: Arrivals | None
    # Of rooms in our pool; None: the CPU cannot read it.
    checksums: Checksums | None
    # Where pages can be exchanged with workers that compute in the same pool; None: ours is our own.
    shared: SharedPages | None
    limits: Limits
    # Guards the manager and all its rooms.
    lock: contextlib.AbstractContextManager[object]
    # Have `tick` called soon; from any thread.
    wake: Callable[[], None]
    # Set when a room's state changed, taken by `tick`.
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
        """The state or the quiescence is another one now. Under the lock, and after the change: who hears it looks."""
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
        """Become Failed. False where the room was final already: the first cause stays."""
        if self.is_final:
            return False
        # Before the state: a reader that sees Failed finds the cause.
        self._failure = error
        self.advance(KVEvent.FAILED)
        return True

    def deadline_error(self, stage: str, seconds: float, setting: str) -> DeadlineExceededError:
        return DeadlineExceededError(
            f"room {self.key} of request {self.rid} spent over {seconds:g} s {stage}: "
            f"see whether the other side is up and not overloaded, or raise {setting}"
        )


def abort_error(rid: str, key: RoomKey, reason: str, status_code: int) -> SplitserveError:
    """The failure of a room whose own side gave it up."""
    error = RequestAbortedError(f"request {rid} (room {key}): {reason}")
    error.http_status = status_code
    return error
