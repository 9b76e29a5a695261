"""Adaptive chunks in whole schedulers under a manual clock: a long prompt arrives while streams decode."""

import random

import pytest

from splitserve.core.clock import ManualClock
from splitserve.core.messages import GenerateRequest
from splitserve.core.request import DisaggregationMode
from splitserve.core.sampling import ResolvedSampling
from splitserve.scheduler.chunk_size import ADDED_DECODE_STEPS, ADDED_TOKENS, LEAST_TARGET, StepWork
from support.fake_engine import FakeEngine, expected_tokens
from support.sim import SimSettings, SimWorker

DECODE, TOKEN = 0.01, 0.001
GREEDY = ResolvedSampling(temperature=0.0)


class TimedEngine(FakeEngine):
    """Engine with steps that take time on the manual clock. A step has the seconds of its work."""

    def __init__(self, clock, num_pages, page_size):
        super().__init__(num_pages, page_size)
        self._clock = clock
        # (work, seconds) of each step.
        self.steps = []

    def prepare(self, plan):
        run, work = super().prepare(plan), StepWork.of(plan)

        def timed():
            seconds = (DECODE if work.num_decodes else 0.0) + TOKEN * work.num_prompt_tokens
            self._clock.advance(seconds)
            self.steps.append((work, seconds))
            return run()

        return timed


def world(target_itl_ms=None, **settings) -> SimWorker:
    clock = ManualClock()
    settings = {"num_pages": 1024, "prefix": False, "make_engine": lambda *size: TimedEngine(clock, *size)} | settings
    return SimWorker(clock, DisaggregationMode.NULL, SimSettings(target_itl_ms=target_itl_ms, **settings))


def submit(worker, rid, num_tokens, max_new_tokens) -> None:
    params = ResolvedSampling(max_new_tokens=max_new_tokens, temperature=0.0)
    first = sum(rid.encode())
    worker.submit(GenerateRequest(rid=rid, prompt_ids=list(range(first, first + num_tokens)), params=params))


def run(worker, num_turns=5000) -> None:
    for _ in range(num_turns):
        worker.turn()
        if worker.is_idle():
            return
        # Time between steps is not that of a step.
        worker.clock.advance(0.5)
    raise AssertionError("still busy")


def streams_and_prompts(worker) -> None:
    """Four streams decode, then three long prompts arrive, while others are computed."""
    for i in range(4):
        submit(worker, f"stream-{i}", 20, 300)
    for _ in range(12):
        worker.turn()
    for i in range(3):
        submit(worker, f"long-{i}", 2048, 2)
        worker.turn()
    run(worker)


def mixed(worker) -> list[tuple[StepWork, float]]:
    return [(work, took) for work, took in worker.engine.steps if work.num_decodes and work.num_prompt_tokens]


LOOPS = [None, random.Random(1)]


@pytest.mark.parametrize("late_steps", LOOPS, ids=["normal", "overlapped"])
@pytest.mark.parametrize("target_itl_ms", [None, 60.0, 100.0])
def test_steps_stay_under_the_target_while_streams_decode(late_steps, target_itl_ms):
    worker = world(target_itl_ms, late_steps=late_steps)
    streams_and_prompts(worker)
    default = max(LEAST_TARGET, DECODE + min(ADDED_DECODE_STEPS * DECODE, ADDED_TOKENS * TOKEN))
    target = default if target_itl_ms is None else target_itl_ms / 1e3
    steps = mixed(worker)
    assert steps
    assert max(took for _, took in steps) <= target + 1e-9
    # Prompts use the time that they have, all in all.
    largest = max(work.num_prompt_tokens for work, _ in steps)
    assert largest * TOKEN + DECODE > target - 16 * TOKEN - 1e-9
    for i in range(3):
        first = sum(f"long-{i}".encode())
        assert worker.tokens(f"long-{i}") == expected_tokens(range(first, first + 2048), GREEDY, 2)
    worker.check_nothing_is_held()


def test_a_fixed_chunk_delays_the_streams():
    worker = world(0.0)
    streams_and_prompts(worker)
    assert max(took for _, took in mixed(worker)) > 2.0


def test_with_nothing_decoding_the_chunk_is_full():
    worker = world(60.0)
    streams_and_prompts(worker)
    before = len(worker.engine.steps)
    submit(worker, "alone", 4000, 1)
    run(worker)
    sizes = [work.num_prompt_tokens for work, _ in worker.engine.steps[before:]]
    assert sizes == [2048, 1952]


def test_a_target_that_no_step_meets_still_computes_prompts_a_page_at_a_time():
    worker = world(1.0)
    streams_and_prompts(worker)
    assert {work.num_prompt_tokens for work, _ in mixed(worker)} == {16}
    worker.check_nothing_is_held()


def test_the_state_has_the_chunk_and_the_times():
    worker = world(60.0)
    submit(worker, "stream", 20, 100)
    for _ in range(8):
        worker.turn()
    submit(worker, "long", 2048, 1)
    for _ in range(5):
        worker.turn()
    state = worker.scheduler.state()
    assert state.prefill_chunk_tokens == 48
    assert state.target_step_seconds == pytest.approx(0.06)
    assert state.mixed_step_seconds == pytest.approx(0.058)
    assert state.mixed_step_predicted_seconds == pytest.approx(0.058)


def test_a_pipeline_has_chunks_of_a_fixed_size():
    assert world().running.chunks is not None
    assert world(0.0).running.chunks is None
    assert world(late_steps=random.Random(0), pp_size=2).running.chunks is None
