"""Decides what to start and what to end, from what shall be and what is. It knows no process, no network, no Ray.

Each process that shall be has a slot, such as decode-1, and a slot's life is this table:

    waiting   its time has come (back-off), the router serves -> start                      -> starting
    starting  it serves                                                                     -> ready
    starting, ready: it ended, was lost, or loads for too long -> remove                    -> removing
    ready     it is not wanted any more -> drain                                            -> draining
    starting  it is not wanted any more -> remove                                           -> removing
    draining  it ended, or the time for that is over -> remove                              -> removing
    removing  nothing of it is left: wanted                                                 -> waiting
                                     wanted, and it would fail whenever it is started       -> failed
                                     not wanted                                             the slot is gone
    failed    it is not wanted any more                                                     the slot is gone

A failure is followed by a pause, which doubles with each until the process has served for some time. Who was lost with
its node has done nothing wrong: the first time it is replaced at once. A process that says by its exit code that its
options are wrong, before its slot has ever served, is not started again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

import msgspec

from splitserve.cluster.config import ROUTER, SupervisionConfig
from splitserve.cluster.placer import Observation, Phase
from splitserve.errors import USAGE_EXIT_CODE

# Seconds that a process gets to end beyond those for its requests.
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
    # Clock time of its last change of state; of a start: since it has its place.
    since: float = 0.0
    # Waiting: clock time before which it is not started.
    start_at: float = 0.0
    # In a row.
    num_failures: int = 0
    num_starts: int = 0
    is_wanted: bool = True
    # Once, in any of its starts.
    has_served: bool = False
    # Started again, it would end in the same way.
    is_hopeless: bool = False
    # Of the last failure, or why it still waits.
    detail: str = ""

    @property
    def name(self) -> str:
        return ROUTER if self.pool == ROUTER else f"{self.pool}-{self.ordinal}"


@dataclass(frozen=True, slots=True)
class Start:
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
    """Nothing to do: for people."""

    name: str
    why: str
    log_tail: str
    # Seconds until the next start; None: there will be none.
    pause: float | None


Action = Start | Drain | Remove | Failed


class Reconciler:
    """`replicas`: by pool, without the router, of which there is one."""

    def __init__(self, replicas: Mapping[str, int], settings: SupervisionConfig, now: float) -> None:
        self._settings = settings
        self._slots: dict[str, Slot] = {}
        self._replicas: dict[str, int] = {}
        self._is_ending = self._is_hurried = False
        self._add(ROUTER, 0, now)
        for pool, count in replicas.items():
            self.scale(pool, count, now)

    @property
    def slots(self) -> list[Slot]:
        return list(self._slots.values())

    @property
    def replicas(self) -> dict[str, int]:
        """Wanted, by pool."""
        return dict(self._replicas)

    @property
    def is_settled(self) -> bool:
        """Everything that is wanted serves, and nothing else is there."""
        is_there = all(slot.is_wanted and slot.state is SlotState.READY for slot in self._slots.values())
        return is_there and not self._is_ending

    @property
    def is_over(self) -> bool:
        return self._is_ending and not self._slots

    def scale(self, pool: str, count: int, now: float) -> None:
        """Have so many workers of a pool. Who does not serve goes first, then the highest number. Not while it ends."""
        if self._is_ending:
            return
        self._replicas[pool] = count
        wanted = [slot for slot in self._slots.values() if slot.pool == pool and slot.is_wanted]
        wanted.sort(key=lambda slot: (slot.state is SlotState.READY, -slot.ordinal))
        for slot in wanted[: max(0, len(wanted) - count)]:
            slot.is_wanted = False
        free = (n for n in range(len(self._slots) + count + 1) if f"{pool}-{n}" not in self._slots)
        for _ in range(count - len(wanted)):
            self._add(pool, next(free), now)

    def shut_down(self) -> None:
        """First the router, which lets its requests end, then the workers."""
        self._is_ending = True
        if router := self._slots.get(ROUTER):
            router.is_wanted = False

    def stop_now(self) -> None:
        """Nothing is waited for any more."""
        self._is_ending = self._is_hurried = True
        for slot in self._slots.values():
            slot.is_wanted = False

    def tick(self, now: float, seen: Mapping[str, Observation]) -> list[Action]:
        """What is to be done now. What it says to start or to remove is expected to show in `seen` from then on."""
        if self._is_ending and ROUTER not in self._slots:
            for slot in self._slots.values():
                slot.is_wanted = False
        return [action for slot in list(self._slots.values()) for action in self._step(slot, now, seen)]

    def _step(self, slot: Slot, now: float, seen: Mapping[str, Observation]) -> Iterator[Action]:
        found = seen.get(slot.name)
        match slot.state:
            case SlotState.WAITING:
                yield from self._wait(slot, now)
            case SlotState.STARTING | SlotState.READY if not slot.is_wanted:
                yield from self._give_up(slot, now)
            case SlotState.STARTING | SlotState.READY:
                yield from self._watch(slot, now, found)
            case SlotState.DRAINING:
                is_late = now - slot.since > self._settings.drain_timeout + _END_MARGIN
                if is_late or self._is_hurried or found is None or found.phase in (Phase.ENDED, Phase.LOST):
                    yield self._remove(slot, now)
            case SlotState.REMOVING if found is None and slot.is_hopeless and slot.is_wanted:
                self._move(slot, SlotState.FAILED, now)
            case SlotState.REMOVING if found is None:
                self._move(slot, SlotState.WAITING, now)
                yield from self._wait(slot, now)
            case SlotState.FAILED if not slot.is_wanted:
                del self._slots[slot.name]

    def _wait(self, slot: Slot, now: float) -> Iterator[Action]:
        if not slot.is_wanted:
            del self._slots[slot.name]
        elif now >= slot.start_at and self._may_start(slot):
            slot.num_starts += 1
            self._move(slot, SlotState.STARTING, now)
            yield Start(slot.name, slot.pool)

    def _may_start(self, slot: Slot) -> bool:
        """Workers are told where the router is when they start."""
        router = self._slots.get(ROUTER)
        return slot.pool == ROUTER or (router is not None and router.state is SlotState.READY)

    def _give_up(self, slot: Slot, now: float) -> Iterator[Action]:
        if slot.state is SlotState.STARTING or self._is_hurried:
            yield self._remove(slot, now)
        else:
            self._move(slot, SlotState.DRAINING, now)
            yield Drain(slot.name)

    def _watch(self, slot: Slot, now: float, found: Observation | None) -> Iterator[Action]:
        if found is None:
            yield from self._fail(slot, now, Observation(phase=Phase.LOST, detail="nothing is known of it any more"))
        elif found.phase in (Phase.ENDED, Phase.LOST):
            yield from self._fail(slot, now, found)
        elif found.phase is Phase.READY:
            self._serve(slot, now)
        elif found.phase is Phase.PENDING:
            slot.since, slot.detail = now, found.detail
        elif now - slot.since > self._settings.load_timeout:
            detail = f"not ready after {self._settings.load_timeout:g} s (supervision.load_timeout)"
            yield from self._fail(slot, now, msgspec.structs.replace(found, detail=detail))

    def _serve(self, slot: Slot, now: float) -> None:
        if slot.state is SlotState.STARTING:
            self._move(slot, SlotState.READY, now)
            slot.has_served, slot.detail = True, ""
        elif slot.num_failures and now - slot.since >= self._settings.forgive_after:
            slot.num_failures = 0

    def _fail(self, slot: Slot, now: float, found: Observation) -> Iterator[Action]:
        slot.num_failures += 1
        slot.detail = found.detail
        slot.is_hopeless = not slot.has_served and found.exit_code == USAGE_EXIT_CODE
        if slot.is_hopeless:
            slot.detail = last_line(found.log_tail) or found.detail
            yield Failed(slot.name, found.detail, found.log_tail, None)
        else:
            num_own = slot.num_failures - (found.phase is Phase.LOST)
            pause = self._pause(num_own)
            slot.start_at = now + pause
            yield Failed(slot.name, found.detail, found.log_tail, pause)
        yield self._remove(slot, now)

    def _pause(self, num_failures: int) -> float:
        if num_failures == 0:
            return 0.0
        # Beyond that many doublings it is the longest anyway.
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
    """What a process that could not start said last."""
    return next((line.strip() for line in reversed(log.splitlines()) if line.strip()), "").removeprefix("error: ")
