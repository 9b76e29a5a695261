"""The controller of prompt chunks: steps meet the target on any machine of its model, and limits are bounded."""

import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitserve.core.batch import RequestStep, SampleSpec, StepPlan
from splitserve.core.sampling import ResolvedSampling
from splitserve.scheduler.chunk_size import (
    ADDED_DECODE_STEPS,
    ADDED_TOKENS,
    LEAST_TARGET,
    MAX_AGE,
    UNMEASURED_TOKENS,
    ChunkController,
    StepTimes,
    StepWork,
)

UNIT, MOST = 16, 2048
GREEDY = ResolvedSampling(temperature=0.0)
seconds = st.floats(0.0, 100.0)


def decode_step(proposals=()) -> RequestStep:
    sample = SampleSpec(GREEDY, 9, [1], [2], proposals=proposals)
    return RequestStep("d", 0, [5, *proposals], 8, sample)


DECODE = decode_step()


def prompt_step(start, count) -> RequestStep:
    return RequestStep("p", 0, [1] * count, start)


def plan(num_decodes, num_prompt_tokens=0, start=0) -> StepPlan:
    prompt = (prompt_step(start, num_prompt_tokens),) if num_prompt_tokens else ()
    return StepPlan((*[DECODE] * num_decodes, *prompt))


class Machine:
    """Machine with known times. `token`: seconds per prompt token, which grow with the tokens before it."""

    def __init__(self, decode: float, token: float, growth: float = 0.0) -> None:
        self.decode, self.token, self.growth = decode, token, growth

    def seconds(self, num_decodes: int, count: int, start: int) -> float:
        context = start + count / 2
        return self.decode * (1 + num_decodes / 100) + count * self.token * (1 + self.growth * context)


def drive(controller, machine, num_decodes, num_tokens) -> list[tuple[int, float]]:
    """Compute a prompt beside decodes. Return (prompt tokens, seconds) of the steps that had some."""
    start, steps, num_empty = 0, [], 0
    while start < num_tokens:
        count = min(controller.limit(num_decodes, start, MOST), num_tokens - start)
        num_empty = 0 if count else num_empty + 1
        assert num_empty <= 3, "the prompt does not progress"
        took = machine.seconds(num_decodes, count, start)
        controller.observe(plan(num_decodes, count, start), took)
        start += count
        if count:
            steps.append((count, took))
    return steps


def test_work_of_a_step_separates_decodes_from_prompts():
    steps = (decode_step(), decode_step(proposals=(3, 4)), prompt_step(100, 50))
    assert StepWork.of(StepPlan(steps)) == StepWork(2, 50, 100.0)
    assert StepWork.of(StepPlan((decode_step(),))) == StepWork(1)
    # The last chunk of a prompt samples, too.
    last = RequestStep("p", 0, [1, 2, 3], 0, SampleSpec(GREEDY, 3, [1, 2, 3], []))
    assert StepWork.of(StepPlan((last,))) == StepWork(0, 3)


def test_without_decodes_or_measurements_a_chunk_is_full():
    controller = ChunkController(0.1, UNIT)
    assert controller.limit(4, 0, MOST) == MOST
    controller.observe(plan(0, 2048), 100.0)
    assert controller.limit(0, 0, MOST) == MOST


def measured_steps(machine, target, num_decodes) -> list[tuple[int, float]]:
    """Return the steps of a prompt after others have measured the machine, without the last."""
    controller = ChunkController(target, UNIT)
    controller.observe(plan(0, 2048), machine.seconds(0, 2048, 0))
    for _ in range(8):
        drive(controller, machine, num_decodes, 8_000)
    return drive(controller, machine, num_decodes, 8_000)[:-1]


@given(
    decode=st.floats(0.001, 0.2),
    token=st.floats(1e-5, 2e-3),
    num_decodes=st.integers(1, 100),
    added=st.floats(0.02, 1.0),
)
def test_steps_meet_the_target_and_chunks_do_not_oscillate(decode, token, num_decodes, added):
    machine = Machine(decode, token)
    target = machine.seconds(num_decodes, 0, 0) + added
    steps = measured_steps(machine, target, num_decodes)
    counts = [count for count, _ in steps]
    assert max(counts) - min(counts) <= UNIT, "rounding alone"
    for count, took in steps:
        assert took <= target + 1e-6 or count == UNIT
        # As much as fits.
        assert took + 2 * UNIT * token > target or count == MOST


@given(
    token=st.floats(1e-5, 2e-3),
    growth=st.floats(0.0, 3e-4),
    num_decodes=st.integers(1, 100),
    added=st.floats(0.02, 1.0),
)
def test_steps_stay_near_the_target_while_tokens_become_dearer(token, growth, num_decodes, added):
    machine = Machine(0.02, token, growth)
    target = machine.seconds(num_decodes, 0, 0) + added
    unit = UNIT * machine.token * (1 + growth * 8_000)
    # The time of a token is that of the last chunks, with fewer tokens before them.
    for count, took in measured_steps(machine, target, num_decodes)[5:]:
        assert took <= 1.25 * target + unit
        assert took >= 0.6 * target - unit or count == MOST


def test_a_chunk_shrinks_while_the_context_of_its_prompt_grows():
    controller = ChunkController(0.1, UNIT)
    machine = Machine(0.01, 4e-4, growth=3e-4)
    controller.observe(plan(0, 256), machine.seconds(0, 256, 0))
    counts = [count for count, _ in drive(controller, machine, 4, 16_000)][:-1]
    assert counts[3] > 1.5 * counts[-1]


@given(decode=st.floats(0.001, 0.2), token=st.floats(1e-5, 2e-3), outlier=st.floats(0.0, 60.0), at=st.integers(0, 30))
def test_an_outlier_changes_no_later_chunk_for_long(decode, token, outlier, at):
    def chunks(disturbed: bool) -> list[int]:
        controller, found = ChunkController(decode + 0.1, UNIT), []
        controller.observe(plan(0, 2048), 2048 * token)
        for i in range(60):
            count = controller.limit(1, 0, MOST)
            controller.observe(plan(1, count), outlier if disturbed and i == at else decode + count * token)
            found.append(count)
        return found

    assert chunks(True)[-10:] == pytest.approx(chunks(False)[-10:], abs=UNIT)


def test_short_prompts_do_not_promise_that_long_ones_cost_nothing():
    controller = ChunkController(0.1, UNIT)
    for _ in range(20):
        controller.observe(plan(4), 0.01)
        # 20 tokens cost as much as none.
        controller.observe(plan(4, 20), 0.01)
    assert controller.limit(4, 0, MOST) == UNMEASURED_TOKENS


def test_fewer_tokens_than_a_unit_leave_the_time_of_a_token_alone():
    times = StepTimes()
    times.add(StepWork(0, 100, 50.0), 1.0)
    times.add(StepWork(0, 3, 1.5), 1.0)
    assert times.token(0) == (0.01, 100)


def test_the_decode_time_of_a_batch_size_is_measured_first_and_again_when_it_is_old():
    controller = ChunkController(None, UNIT)
    controller.observe(plan(0, 2048), 2.0)
    limits = []
    for _ in range(MAX_AGE + 8):
        count = controller.limit(4, 0, MOST)
        controller.observe(plan(4, count), 0.01 + count / 1000)
        limits.append(count)
    assert limits[:3] == [0, 0, 0]
    assert limits.count(0) == 4, "once more, after MAX_AGE steps"
    # Another batch size of the same range is known, one of another range is not.
    assert controller.limit(7, 0, MOST) > 0
    assert controller.limit(8, 0, MOST) == 0


@given(
    times=st.lists(st.floats(0.0, 10.0), min_size=1, max_size=5),
    num_decodes=st.integers(1, 500),
    token_time=st.floats(0.0, 1.0),
)
def test_the_default_target_follows_the_measured_steps(times, num_decodes, token_time):
    controller = ChunkController(None, UNIT)
    for took in times:
        controller.observe(plan(num_decodes), took)
    decode = statistics.median(times)
    added = min(ADDED_DECODE_STEPS * decode, ADDED_TOKENS * token_time)
    assert controller.target(num_decodes, token_time) == pytest.approx(max(LEAST_TARGET, decode + added))


@given(
    target=st.none() | st.floats(0.001, 10.0),
    steps=st.lists(st.tuples(st.integers(0, 300), st.integers(0, 4096), st.integers(0, 10**6), seconds), max_size=40),
    num_decodes=st.integers(0, 300),
    context=st.integers(0, 10**6),
    most=st.integers(1, 4096),
)
def test_a_limit_is_bounded_after_any_measurements(target, steps, num_decodes, context, most):
    controller = ChunkController(target, UNIT)
    for decodes, prompt, start, took in steps:
        if decodes or prompt:
            controller.observe(plan(decodes, prompt, start), took)
    limit = controller.limit(num_decodes, context, most)
    assert limit == 0 or min(UNIT, most) <= limit <= most
    if not num_decodes:
        assert limit == most
    # Prompts always progress: steps without them are few.
    for _ in range(3):
        controller.observe(plan(num_decodes), 0.01) if num_decodes else None
    assert controller.limit(num_decodes, context, most) > 0
