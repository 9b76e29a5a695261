"""State machine of processes: which to start and to end, from desired and actual state. Pure: no network, no Ray.

Each desired process has a slot, such as decode-1. This table is the life cycle of a slot:

    waiting   its pause is over, and the router's URL is known -> start                     -> starting
    starting  it serves                                                                     -> ready
    starting, ready: it ended, was lost, or loads for too long -> remove                    -> removing
    ready     it is no longer desired -> drain                                              -> draining
    starting  it is no longer desired -> remove                                             -> removing
    draining  it ended, or the time for that is over -> remove                              -> removing
    removing  it has been removed: desired                                                  -> waiting
                                   desired, but given up                                    -> failed
                                   not desired                                              the slot is gone
    failed    it is no longer desired                                                       the slot is gone

A failure is followed by a pause, which doubles with each failure until the process has served for some time. After the
loss of a node there is no pause the first time, as the process is not at fault.

A process is given up, so it is not started again before `restart`:
- if no process is started again (`supervision.restart`);
- if its exit code shows that its options are wrong, and its slot has never served;
- after `max_failed_starts` starts in a row that ended before it served.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

import msgspec

from splitserve.core.errors import USAGE_EXIT_CODE, ConfigError
from splitserve.core.request import DisaggregationMode
from splitserve.deploy.config import MODES, ROUTER, SupervisionConfig
from splitserve.deploy.placer import Observation, Phase

# Seconds in which a process must end, beyond the time for its requests.
_END_MARGIN = 15.0


class SlotState(StrEnum):
    WAITING = "waiting"
    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    REMOVING = "removing"
    FAILED = "failed"


@dataclass(slots=True)
class Slot:
    pool: str
    ordinal: int
    state: SlotState = SlotState.WAITING
    # Clock time of its last change of state. For a start: since its node has room for it.
    since: float = 0.0
    # While waiting: clock time before which it is not started.
    start_at: float = 0.0
    # Failures in a row, without `forgive_after` seconds of serving between them.
    num_failures: int = 0
    # Starts in a row that ended before it served.
    num_failed_starts: int = 0
    num_starts: int = 0
    is_wanted: bool = True
    # Whether it has served in any of its starts.
    has_served: bool = False
    # True: it is not started again.
    is_given_up: bool = False
    # Reason of the last failure, until it serves again.
    detail: str = ""

    @property
    def name(self) -> str:
        return ROUTER if self.pool == ROUTER else f"{self.pool}-{self.ordinal}"


@dataclass(frozen=True, slots=True)
class StartAction:
    name: str
    pool: str


@dataclass(frozen=True, slots=True)
class Drain:
    name: str


@dataclass(frozen=True, slots=True)
class Remove:
    name: str


@dataclass(frozen=True, slots=True)
class Failed:
    """Report for operators; it needs no action."""

    name: str
    why: str
    log_tail: str
    # Seconds until the next start. None: it is not started again.
    pause: float | None
    # Failed starts after which it was given up. 0: given up for another reason, or not at all.
    num_failed_starts: int = 0


@dataclass(frozen=True, slots=True)
class Killed:
    """Report for operators about a process that did not end its drain; it needs no action."""

    name: str
    why: str


Action = StartAction | Drain | Remove | Failed | Killed


class Reconciler:
    """State machine of all slots.

    `replicas`: by pool, without the router. `router_first`: workers start when the router serves.
    """

    def __init__(
        self, replicas: Mapping[str, int], settings: SupervisionConfig, now: float, *, router_first: bool = True
    ) -> None:
        self._settings = settings
        self._router_first = router_first
        self._slots: dict[str, Slot] = {}
        # Desired replicas by pool.
        self.replicas: dict[str, int] = {}
        self._is_ending = self._is_hurried = False
        self._add(ROUTER, 0, now)
        for pool, count in replicas.items():
            self.scale(pool, count, now)

    @property
    def slots(self) -> list[Slot]:
        return list(self._slots.values())

    @property
    def is_settled(self) -> bool:
        """Return whether all desired processes serve, and there are no others."""
        is_there = all(slot.is_wanted and slot.state is SlotState.READY for slot in self._slots.values())
        return is_there and not self._is_ending

    @property
    def is_over(self) -> bool:
        return self._is_ending and not self._slots

    def scale(self, pool: str, count: int, now: float, modes: Mapping[str, DisaggregationMode] | None = None) -> None:
        """Set the number of workers of a pool. No-op while the cluster ends.

        Workers in another mode than the pool's end first, then those that do not serve, then the highest numbers.
        `modes`: of workers by name, if they may differ from the pool's. Raises ConfigError if no worker of a mode
        would be left, although its pool keeps workers.
        """
        if self._is_ending:
            return
        wanted = [slot for slot in self._slots.values() if slot.pool == pool and slot.is_wanted]
        for slot in self._choose_removed(pool, count, modes or {}):
            slot.is_wanted = False
        self.replicas[pool] = count
        free = (n for n in range(len(self._slots) + count + 1) if f"{pool}-{n}" not in self._slots)
        for _ in range(count - len(wanted)):
            self._add(pool, next(free), now)

    def _choose_removed(self, pool: str, count: int, modes: Mapping[str, DisaggregationMode]) -> list[Slot]:
        """Return the slots of a pool that exceed its new number of workers."""

        def mode_of(slot: Slot) -> DisaggregationMode:
            return modes.get(slot.name, MODES[slot.pool])

        left = [slot for slot in self._slots.values() if slot.is_wanted and slot.pool != ROUTER]
        filled = {MODES[name] for name, number in {**self.replicas, pool: count}.items() if number}
        needed = filled & set(map(mode_of, left))
        candidates = [slot for slot in left if slot.pool == pool]
        candidates.sort(key=lambda slot: (mode_of(slot) is MODES[pool], slot.state is SlotState.READY, -slot.ordinal))
        num_removed = max(0, len(candidates) - count)
        removed: list[Slot] = []
        for slot in candidates:
            others = [other for other in left if other is not slot]
            if len(removed) < num_removed and needed <= set(map(mode_of, others)):
                removed.append(slot)
                left = others
        if len(removed) < num_removed:
            raise ConfigError(
                f"{pool}={count} would leave no worker for one of the roles {', '.join(sorted(needed))}, because roles "
                "were changed: change them back first (POST /role on the router)"
            )
        return removed

    def restart(self, name: str, now: float) -> bool:
        """Start a process again that was given up and has been removed. Return False if it is in another state."""
        slot = self._slots[name]
        if slot.state is not SlotState.FAILED:
            return False
        slot.is_given_up, slot.num_failed_starts, slot.start_at = False, 0, now
        self._move(slot, SlotState.WAITING, now)
        return True

    def shut_down(self) -> None:
        """Drain the router, then the workers."""
        self._is_ending = True
        if router := self._slots.get(ROUTER):
            router.is_wanted = False

    def stop_now(self) -> None:
        """End all processes at once."""
        self._is_ending = self._is_hurried = True
        for slot in self._slots.values():
            slot.is_wanted = False

    def tick(self, now: float, seen: Mapping[str, Observation]) -> list[Action]:
        """Return the actions to take now. `seen`: the processes after the actions of all earlier calls."""
        if self._is_ending and ROUTER not in self._slots:
            for slot in self._slots.values():
                slot.is_wanted = False
        return [action for slot in list(self._slots.values()) for action in self._step(slot, now, seen)]

    def _step(self, slot: Slot, now: float, seen: Mapping[str, Observation]) -> Iterator[Action]:
        found = seen.get(slot.name)
        is_gone = found is None or found.phase in (Phase.ENDED, Phase.LOST)
        match slot.state:
            case SlotState.WAITING:
                yield from self._wait(slot, now)
            case SlotState.READY if not slot.is_wanted and not self._is_hurried and not is_gone:
                self._move(slot, SlotState.DRAINING, now)
                yield Drain(slot.name)
            case SlotState.STARTING | SlotState.READY if not slot.is_wanted:
                yield self._remove(slot, now)
            case SlotState.STARTING | SlotState.READY:
                yield from self._watch(slot, now, found)
            case SlotState.DRAINING:
                if is_gone or self._is_hurried or now - slot.since > self._settings.drain_timeout + _END_MARGIN:
                    # A process that has ended has no ready file.
                    if found is not None and found.ready is not None and not self._is_hurried:
                        yield Killed(slot.name, found.detail if is_gone else "did not end in its time to drain")
                    yield self._remove(slot, now)
            case SlotState.REMOVING if found is None and slot.is_given_up and slot.is_wanted:
                self._move(slot, SlotState.FAILED, now)
            case SlotState.REMOVING if found is None:
                self._move(slot, SlotState.WAITING, now)
                yield from self._wait(slot, now)
            case SlotState.FAILED if not slot.is_wanted:
                del self._slots[slot.name]

    def _wait(self, slot: Slot, now: float) -> Iterator[Action]:
        if not slot.is_wanted:
            del self._slots[slot.name]
        elif now >= slot.start_at and (slot.pool == ROUTER or self._is_router_known()):
            slot.num_starts += 1
            self._move(slot, SlotState.STARTING, now)
            yield StartAction(slot.name, slot.pool)

    def _is_router_known(self) -> bool:
        """Return whether the address of the router is known, which is an option of workers."""
        router = self._slots.get(ROUTER)
        return not self._router_first or (router is not None and router.state is SlotState.READY)

    def _watch(self, slot: Slot, now: float, found: Observation | None) -> Iterator[Action]:
        if found is None:
            yield from self._fail(slot, now, Observation(phase=Phase.LOST, detail="its node does not know it any more"))
        elif found.phase in (Phase.ENDED, Phase.LOST):
            yield from self._fail(slot, now, found)
        elif found.phase is Phase.READY and slot.state is SlotState.STARTING:
            self._move(slot, SlotState.READY, now)
            slot.has_served, slot.num_failed_starts, slot.detail = True, 0, ""
        elif found.phase is Phase.READY:
            if now - slot.since >= self._settings.forgive_after:
                slot.num_failures = 0
        elif found.phase is Phase.PENDING:
            slot.since = now
        elif now - slot.since > self._settings.load_timeout:
            detail = f"not ready after {self._settings.load_timeout:g} s (supervision.load_timeout)"
            yield from self._fail(slot, now, msgspec.structs.replace(found, detail=detail))

    def _fail(self, slot: Slot, now: float, found: Observation) -> Iterator[Action]:
        slot.num_failures += 1
        slot.num_failed_starts += slot.state is SlotState.STARTING and found.phase is not Phase.LOST
        slot.detail = found.detail
        has_wrong_options = not slot.has_served and found.exit_code == USAGE_EXIT_CODE
        is_too_often = slot.num_failed_starts == self._settings.max_failed_starts
        slot.is_given_up = has_wrong_options or is_too_often or not self._settings.restart
        num_failed_starts, pause = 0, None
        if slot.is_given_up:
            slot.detail = last_line(found.log_tail) or found.detail
            num_failed_starts = slot.num_failed_starts if is_too_often and not has_wrong_options else 0
        else:
            pause = self._pause(slot.num_failures - (found.phase is Phase.LOST))
            slot.start_at = now + pause
        yield Failed(slot.name, found.detail, found.log_tail, pause, num_failed_starts)
        yield self._remove(slot, now)

    def _pause(self, num_failures: int) -> float:
        if num_failures == 0:
            return 0.0
        # The limit of doublings only keeps the number small; the pause has reached its maximum before.
        doubled: float = self._settings.backoff * 2 ** min(num_failures - 1, 32)
        return min(self._settings.max_backoff, doubled)

    def _remove(self, slot: Slot, now: float) -> Remove:
        self._move(slot, SlotState.REMOVING, now)
        return Remove(slot.name)

    def _move(self, slot: Slot, state: SlotState, now: float) -> None:
        slot.state, slot.since = state, now

    def _add(self, pool: str, ordinal: int, now: float) -> None:
        slot = Slot(pool, ordinal, since=now, start_at=now)
        self._slots[slot.name] = slot


def last_line(log: str) -> str:
    """Return the last line of a log: the error of a process that could not start."""
    return next((line.strip() for line in reversed(log.splitlines()) if line.strip()), "").removeprefix("error: ")
