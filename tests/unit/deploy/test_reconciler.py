"""The reconciler in a world of its own: processes start, serve, die, and nodes go, in any order, by a manual clock."""

from __future__ import annotations

from collections import defaultdict

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from splitserve.core.clock import ManualClock
from splitserve.core.errors import ConfigError
from splitserve.core.request import DisaggregationMode
from splitserve.deploy.config import ROUTER, SupervisionConfig
from splitserve.deploy.placer import Observation, Phase
from splitserve.deploy.reconciler import Drain, Failed, Reconciler, Remove, SlotState, StartAction
from splitserve.process.lifecycle import ReadyInfo

SETTINGS = SupervisionConfig(load_timeout=100.0, drain_timeout=20.0, backoff=1.0, max_backoff=16.0, forgive_after=60.0)
ACTIVE = (Phase.PENDING, Phase.LOADING, Phase.READY)


class World:
    """What a placer does, and what may go wrong. It checks that no order is against the rules."""

    def __init__(self, settings: SupervisionConfig = SETTINGS, *, router_first: bool = True, **replicas: int) -> None:
        self.clock = ManualClock()
        self.router_first = router_first
        self.reconciler = Reconciler(replicas, settings, self.clock.now(), router_first=router_first)
        self.phases: dict[str, Phase] = {}
        self.drained: set[str] = set()
        self.removing: set[str] = set()
        self.starts: dict[str, list[float]] = defaultdict(list)
        self.failures: list[Failed] = []
        self.exit_codes: dict[str, int] = {}

    def tick(self, seconds: float = 0.5) -> None:
        self.clock.advance(seconds)
        seen = {
            name: Observation(phase=phase, detail=phase.value, exit_code=code, log_tail="a\nend\n" if code else "")
            for name, phase in self.phases.items()
            for code in [self.exit_codes.get(name)]
        }
        for action in self.reconciler.tick(self.clock.now(), seen):
            match action:
                case StartAction(name, pool):
                    assert name not in self.phases, f"{name} is started while it is still there"
                    is_known = not self.router_first or self.phases.get(ROUTER) is Phase.READY
                    assert pool == ROUTER or is_known, "no router, no worker"
                    self.phases[name] = Phase.LOADING
                    self.starts[name].append(self.clock.now())
                case Drain(name):
                    assert self.phases[name] is Phase.READY
                    assert name not in self.drained
                    self.drained.add(name)
                case Remove(name):
                    assert name not in self.removing
                    self.removing.add(name)
                case Failed():
                    self.failures.append(action)

    def fail_start(self, name: str, phase: Phase = Phase.ENDED) -> None:
        """Let it start after its pause, and end before it serves."""
        self.finish_removals()
        self.tick(2 * SETTINGS.max_backoff)
        self.tick()
        assert self.state(name) is SlotState.STARTING
        self.phases[name] = phase
        self.tick()

    def finish_removals(self) -> None:
        for name in self.removing:
            self.phases.pop(name, None)
            self.drained.discard(name)
        self.removing.clear()

    def serve(self) -> None:
        """Let loading processes become ready, draining ones end and stopped ones disappear, until nothing changes."""
        for _ in range(400):
            for name, phase in self.phases.items():
                if name in self.drained:
                    self.phases[name] = Phase.ENDED
                elif phase in (Phase.LOADING, Phase.PENDING):
                    self.phases[name] = Phase.READY
            self.finish_removals()
            self.tick()
            if self.reconciler.is_settled or self.reconciler.is_over:
                return

    def running(self, pool: str) -> list[str]:
        return sorted(n for n, phase in self.phases.items() if n.rpartition("-")[0] == pool and phase in ACTIVE)

    def state(self, name: str) -> SlotState:
        return next(slot.state for slot in self.reconciler.slots if slot.name == name)


def up(**replicas: int) -> World:
    world = World(**replicas)
    world.serve()
    assert world.reconciler.is_settled
    return world


def test_the_router_comes_first_and_then_the_workers():
    world = World(prefill=1, decode=2)
    world.tick()
    assert set(world.phases) == {ROUTER}
    world.tick()
    assert set(world.phases) == {ROUTER}
    world.serve()
    assert set(world.phases) == {ROUTER, "prefill-0", "decode-0", "decode-1"}


def test_a_worker_that_dies_is_started_again_after_a_pause():
    world = up(prefill=1, decode=1)
    world.phases["decode-0"] = Phase.ENDED
    world.tick()
    assert world.state("decode-0") is SlotState.REMOVING
    died_at = world.clock.now()
    world.serve()
    assert world.starts["decode-0"][-1] - died_at >= SETTINGS.backoff
    assert world.failures == [Failed("decode-0", "ended", "", SETTINGS.backoff)]
    assert len(world.starts["prefill-0"]) == 1


def test_a_crash_loop_slows_down_to_the_longest_pause_and_is_forgiven_after_serving():
    world = up(prefill=1, decode=1)
    for _ in range(8):
        world.phases["decode-0"] = Phase.ENDED
        world.serve()
    assert [f.pause for f in world.failures] == [1.0, 2.0, 4.0, 8.0, 16.0, 16.0, 16.0, 16.0]
    world.tick(SETTINGS.forgive_after)
    world.phases["decode-0"] = Phase.ENDED
    world.tick()
    assert world.failures[-1].pause == SETTINGS.backoff


def test_a_worker_that_ends_before_it_serves_again_and_again_is_given_up():
    settings = msgspec.structs.replace(SETTINGS, max_failed_starts=3)
    world = World(settings, prefill=1, decode=1)
    world.serve()
    # An end while it serves does not count, and a start that succeeds resets the count.
    for _ in range(5):
        world.serve()
        world.phases["decode-0"] = Phase.ENDED
        world.tick()
        for _ in range(2):
            world.fail_start("decode-0")
    assert all(failure.pause is not None for failure in world.failures)
    world.serve()
    world.phases["decode-0"] = Phase.ENDED
    world.tick()
    for _ in range(3):
        # A node that is lost is no failed start.
        world.fail_start("decode-0", Phase.LOST)
        world.fail_start("decode-0")
    assert (world.failures[-1].pause, world.failures[-1].num_failed_starts) == (None, 3)
    world.finish_removals()
    world.tick(1000.0)
    assert world.state("decode-0") is SlotState.FAILED


def test_workers_need_not_wait_for_a_router_whose_address_is_known():
    world = World(router_first=False, prefill=1)
    world.tick()
    assert set(world.phases) == {ROUTER, "prefill-0"}


def test_a_worker_whose_options_are_wrong_is_not_started_again():
    world = World(prefill=1, decode=1)
    world.tick()
    world.phases[ROUTER] = Phase.READY
    world.tick()
    world.phases["decode-0"], world.exit_codes["decode-0"] = Phase.ENDED, 2
    world.phases["prefill-0"], world.exit_codes["prefill-0"] = Phase.ENDED, 1
    for _ in range(100):
        world.finish_removals()
        world.tick(1.0)
    assert len(world.starts["decode-0"]) == 1
    assert len(world.starts["prefill-0"]) == 2
    assert world.state("decode-0") is SlotState.FAILED
    assert [(f.name, f.pause) for f in world.failures if f.name == "decode-0"] == [("decode-0", None)]
    assert next(slot.detail for slot in world.reconciler.slots if slot.name == "decode-0") == "end"
    assert not world.reconciler.is_settled
    # The operator requests it again after the repair.
    del world.exit_codes["decode-0"]
    world.reconciler.scale("decode", 0, world.clock.now())
    world.serve()
    world.reconciler.scale("decode", 1, world.clock.now())
    world.serve()
    assert world.running("decode") == ["decode-0"]
    world.phases["prefill-0"], world.exit_codes["prefill-0"] = Phase.ENDED, 2
    world.tick()
    # It had served, so its options are good, whatever its exit code.
    assert world.failures[-1].pause == 2.0
    # The same holds after its restart: the disk with its model may be missing for a while.
    for _ in range(3):
        world.finish_removals()
        world.tick(world.failures[-1].pause or 0.0)
        assert world.state("prefill-0") is SlotState.STARTING
        world.phases["prefill-0"] = Phase.ENDED
        world.tick()
    assert [f.pause for f in world.failures[-3:]] == [4.0, 8.0, 16.0]


@pytest.mark.parametrize("hurries", [False, True])
def test_going_down_takes_along_what_has_failed_for_good(hurries):
    world = World(decode=1)
    world.tick()
    world.phases[ROUTER], world.exit_codes[ROUTER] = Phase.ENDED, 2
    for _ in range(3):
        world.tick()
        world.finish_removals()
    assert world.state(ROUTER) is SlotState.FAILED
    (world.reconciler.stop_now if hurries else world.reconciler.shut_down)()
    world.serve()
    assert world.reconciler.is_over


def test_a_worker_that_never_gets_ready_counts_as_failed_and_one_that_waits_for_room_does_not():
    world = World(prefill=1)
    world.tick()
    world.phases[ROUTER] = Phase.READY
    world.tick()
    world.tick()
    world.phases["prefill-0"] = Phase.PENDING
    world.tick(10 * SETTINGS.load_timeout)
    assert not world.failures
    world.phases["prefill-0"] = Phase.LOADING
    world.tick(SETTINGS.load_timeout - 1)
    assert not world.failures
    world.tick(2.0)
    assert "load_timeout" in world.failures[0].why
    assert world.removing == {"prefill-0"}


def test_a_lost_node_is_replaced_at_once_and_a_second_loss_waits():
    world = up(prefill=1, decode=2)
    for name in ("decode-0", "prefill-0"):
        world.phases[name] = Phase.LOST
    world.tick()
    world.finish_removals()
    world.tick(0.1)
    assert {name: world.phases[name] for name in ("decode-0", "prefill-0")} == {
        "decode-0": Phase.LOADING,
        "prefill-0": Phase.LOADING,
    }
    world.phases["decode-0"] = Phase.LOST
    world.tick()
    assert [f.pause for f in world.failures] == [0.0, 0.0, 1.0]


def test_scaling_down_drains_the_last_ones_and_takes_first_who_does_not_serve():
    world = up(prefill=1, decode=4)
    world.phases["decode-1"] = Phase.ENDED
    world.tick()
    world.reconciler.scale("decode", 2, world.clock.now())
    world.tick()
    assert world.drained == {"decode-3"}
    world.tick(SETTINGS.drain_timeout)
    assert "decode-3" not in world.removing, "its requests have their time"
    world.phases["decode-3"] = Phase.ENDED
    world.serve()
    assert world.running("decode") == ["decode-0", "decode-2"]
    assert not [f for f in world.failures if f.name == "decode-3"], "an end that was ordered is no failure"


PREFILL, DECODE = DisaggregationMode.PREFILL, DisaggregationMode.DECODE


@pytest.mark.parametrize(
    ("modes", "removed"),
    [
        ({}, "decode-1"),
        ({"decode-0": PREFILL}, "decode-0"),
        # decode-0 is the only prefill worker.
        ({"decode-0": PREFILL, "prefill-0": DECODE}, "decode-1"),
    ],
)
def test_scaling_down_keeps_a_worker_of_each_role(modes, removed):
    world = up(prefill=1, decode=2)
    world.reconciler.scale("decode", 1, world.clock.now(), modes)
    world.tick()
    assert world.drained == {removed}


def test_a_worker_with_another_role_is_removed_before_one_that_starts():
    world = up(prefill=1, decode=2)
    world.phases["decode-1"] = Phase.ENDED
    world.tick()
    world.reconciler.scale("decode", 1, world.clock.now(), {"decode-0": PREFILL})
    world.tick()
    assert world.drained == {"decode-0"}


def test_scaling_down_is_refused_if_no_worker_of_a_role_would_be_left():
    world = up(prefill=2, decode=1)
    modes = {"decode-0": DisaggregationMode.NULL, "prefill-1": DECODE}
    with pytest.raises(ConfigError, match="would leave no worker for one of the roles decode, prefill"):
        world.reconciler.scale("prefill", 1, world.clock.now(), modes)
    assert world.reconciler.replicas == {"prefill": 2, "decode": 1}
    world.tick()
    assert not world.drained


def test_a_worker_that_does_not_end_is_removed_in_the_end():
    world = up(prefill=1, decode=2)
    world.reconciler.scale("decode", 1, world.clock.now())
    world.tick()
    world.tick(SETTINGS.drain_timeout + 60)
    assert world.removing == {"decode-1"}


def test_scaling_up_while_others_drain_takes_new_names():
    world = up(prefill=1, decode=2)
    world.reconciler.scale("decode", 1, world.clock.now())
    world.tick()
    world.reconciler.scale("decode", 3, world.clock.now())
    world.tick()
    assert world.drained == {"decode-1"}
    world.serve()
    assert world.running("decode") == ["decode-0", "decode-2", "decode-3"]


def test_going_down_the_router_drains_before_the_workers():
    world = up(prefill=1, decode=1)
    world.reconciler.shut_down()
    world.tick()
    assert world.drained == {ROUTER}
    world.tick(5.0)
    assert world.drained == {ROUTER}
    world.serve()
    assert world.reconciler.is_over
    assert not world.phases


@pytest.mark.parametrize(("phase", "seconds", "why"), [(Phase.ENDED, 1.0, "hung"), (Phase.READY, 90.0, "did not end")])
def test_a_router_that_is_killed_during_its_drain_is_reported(phase, seconds, why):
    world = up(prefill=1, decode=1)
    world.reconciler.shut_down()
    world.tick()
    world.clock.advance(seconds)
    ready = ReadyInfo(pid=1, port=2, url="http://r:2")
    seen = {name: Observation(phase=Phase.READY, ready=ready) for name in world.phases}
    seen[ROUTER] = Observation(phase=phase, ready=ready, detail="hung")
    killed, removed = world.reconciler.tick(world.clock.now(), seen)
    assert (type(killed).__name__, killed.name, removed) == ("Killed", ROUTER, Remove(ROUTER))
    assert killed.why.startswith(why)


@pytest.mark.parametrize("phase", [Phase.ENDED, Phase.LOST])
def test_a_worker_that_is_gone_when_it_is_to_go_is_not_drained(phase):
    world = up(prefill=1, decode=2)
    world.phases["decode-1"] = phase
    world.reconciler.scale("decode", 1, world.clock.now())
    world.tick()
    assert (world.drained, world.removing) == (set(), {"decode-1"})


def test_a_second_order_to_go_down_waits_for_nothing():
    world = up(prefill=1, decode=2)
    world.reconciler.shut_down()
    world.tick()
    world.reconciler.stop_now()
    world.tick()
    assert world.removing == {ROUTER, "prefill-0", "decode-0", "decode-1"}
    world.reconciler.scale("decode", 5, world.clock.now())
    world.finish_removals()
    world.tick()
    world.tick()
    assert world.reconciler.is_over


def test_workers_outlive_their_router_and_new_ones_wait_for_it():
    world = up(prefill=1, decode=1)
    world.phases[ROUTER] = Phase.ENDED
    world.phases["decode-0"] = Phase.LOST
    world.tick()
    world.finish_removals()
    world.tick(0.1)
    assert set(world.phases) == {"prefill-0"}
    world.serve()
    assert world.reconciler.is_settled
    assert len(world.starts["prefill-0"]) == 1


@pytest.mark.parametrize("count", [0, 1])
def test_a_pool_may_be_empty(count):
    world = up(prefill=1, decode=1, colocated=count)
    assert len(world.running("colocated")) == count


steps = st.one_of(
    st.tuples(st.just("tick"), st.floats(0.1, 30.0)),
    st.tuples(st.sampled_from(["ready", "crash", "lose", "pend", "ended"]), st.integers(0, 10)),
    st.tuples(st.just("scale"), st.tuples(st.sampled_from(["prefill", "decode"]), st.integers(0, 4))),
    st.tuples(st.just("removed"), st.none()),
)


@settings(max_examples=300)
@given(st.lists(steps, max_size=60), st.booleans())
def test_whatever_happens_it_comes_to_what_is_wanted_and_goes_down_to_nothing(story, hurries):
    world = World(prefill=1, decode=2)
    for what, value in story:
        happen(world, what, value)
        for pool, count in world.reconciler.replicas.items():
            kept = [n for n in world.running(pool) if n not in world.drained | world.removing]
            assert len(kept) <= count
    world.serve()
    assert world.reconciler.is_settled
    for pool, count in world.reconciler.replicas.items():
        assert len(world.running(pool)) == count
    (world.reconciler.stop_now if hurries else world.reconciler.shut_down)()
    world.serve()
    assert world.reconciler.is_over
    assert not world.phases


def happen(world: World, what: str, value: object) -> None:
    alive = sorted(name for name, phase in world.phases.items() if phase in ACTIVE and name not in world.removing)
    match what, value:
        case "tick", float(seconds):
            world.tick(seconds)
        case "scale", (str(pool), int(count)):
            world.reconciler.scale(pool, count, world.clock.now())
            world.tick()
        case "removed", _:
            world.finish_removals()
        case _, int(number) if alive:
            name = alive[number % len(alive)]
            if what == "ready" or (what == "pend" and world.phases[name] is Phase.READY):
                world.phases[name] = Phase.READY
            elif what == "ended" and name not in world.drained:
                pass
            else:
                world.phases[name] = {"crash": Phase.ENDED, "lose": Phase.LOST, "pend": Phase.PENDING}.get(
                    what, Phase.ENDED
                )
