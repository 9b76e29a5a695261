"""Engine without a model: its next token depends on every KV slot of the request.

It writes one 64-bit value per token into a real pool. It samples the next token from all the values that it reads
through the page table. A page that was lost, swapped, overwritten or not transferred changes the output. So a
comparison with `expected_tokens` checks the bookkeeping and the transfer, at thousands of steps per second.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from splitserve.core.batch import (
    LAST_SAMPLED,
    HiddenState,
    RequestResult,
    RequestStep,
    SampleSpec,
    StepPlan,
    StepResult,
    TokenLogprob,
    specs_to_sample,
    verified,
)
from splitserve.core.errors import EngineError, RanksLostError
from splitserve.core.layout import KVComponent, KVLayout, Region
from splitserve.core.sampling import ResolvedSampling, mix64
from splitserve.engine.pool import PageBytes
from splitserve.scheduler.speculation import Proposer

Slots = npt.NDArray[np.uint64]
# Width of its hidden states.
HIDDEN_SIZE = 4
# Copied pages, and the window page of each.
FakeCopy = tuple[Slots, list[Slots | None]]


class FakeEngine:
    """Fake engine with its own pool, or with the shared `pool`.

    With a `window`, each sampled token depends on the last `window` slots only. With `num_window_pages` too, the engine
    has two layers: a full one, and one with the window and a pool of its own. Then each sampled token depends on all
    slots of the first layer and the last `window` slots of the second.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        vocab_size: int = 512,
        pool: Slots | None = None,
        window: int | None = None,
        num_window_pages: int = 0,
    ) -> None:
        # Windows of the first layer and of the second layer. None: no window, or no second layer.
        self._window = None if num_window_pages else window
        self._second_window = window if num_window_pages else None
        # The scheduler's tables, int32: [rows, pages per row], and [pages] if there are window pages.
        self._table: npt.NDArray[np.int32] = np.empty((0, 0), np.int32)
        self._window_table: npt.NDArray[np.int32] | None = None
        self._window_pool: Slots = np.zeros((num_window_pages, page_size), dtype=np.uint64)
        self.vocab_size = vocab_size
        # The KV of a token depends on them.
        self.weights = 0
        self._failure: EngineError | RanksLostError | None = None
        # Errors of requests that fail in their next step, by request id.
        self._failures: dict[str, str] = {}
        # Number of tokens of every step run so far.
        self.step_sizes: list[int] = []
        # One value per token: [num_pages, page_size].
        self._pool: Slots = np.zeros((num_pages, page_size), dtype=np.uint64) if pool is None else pool
        # Last token sampled for each row of the page table.
        self._drawn: dict[int, int] = {}
        # Steps begun and not ended: at most one, except in a pipeline.
        self._in_flight: deque[StepPlan] = deque()
        # Two float32 elements hold the eight bytes of one value.
        windows = [self._window, self._second_window] if num_window_pages else [self._window]
        components = (KVComponent("k", i, "float32", 1, 0, 1, 2, window=w) for i, w in enumerate(windows))
        self.layout = KVLayout(page_size, num_pages, tuple(components), num_window_pages)

    def start(self, page_table: npt.NDArray[np.int32], window_table: npt.NDArray[np.int32] | None) -> Proposer | None:
        """Use these tables from here on. There is no proposer."""
        self._table, self._window_table = page_table, window_table
        return None

    def regions(self) -> tuple[Region, ...]:
        pools = (self._pool, self._window_pool) if self._second_window else (self._pool,)
        return tuple(Region(pool.ctypes.data, pool.nbytes) for pool in pools)

    @property
    def bytes_per_page(self) -> int:
        return self.layout.bytes_per_page

    @property
    def page_bytes(self) -> PageBytes:
        windowed = self.layout.bytes_per_window_page if self._second_window else 0
        return PageBytes(self.layout.bytes_per_page - windowed, windowed)

    def bytes_of(self, pages: Sequence[int]) -> int:
        return self.page_bytes.of(self.window_pages(pages))

    def save(self, pages: Sequence[int]) -> FakeCopy:
        return self.copy_out(np.array(pages), self.window_pages(pages))

    def restore(self, copy: FakeCopy, first: int, pages: Sequence[int]) -> None:
        self.copy_in(copy, first, np.array(pages), self.window_pages(pages))

    def drop(self, copy: FakeCopy) -> None:
        """Do nothing: a copy is freed with the last reference to it."""

    def copy_out(self, pages: npt.NDArray[np.int64], window_pages: npt.NDArray[np.int64]) -> FakeCopy:
        windowed = [self._window_pool[page].copy() if page >= 0 else None for page in window_pages]
        return self._pool[pages], windowed

    def copy_in(
        self, copy: FakeCopy, first: int, pages: npt.NDArray[np.int64], window_pages: npt.NDArray[np.int64]
    ) -> None:
        self._pool[pages] = copy[0][first : first + len(pages)]
        for page, saved in zip(window_pages, copy[1][first : first + len(pages)], strict=True):
            if page >= 0 and saved is not None:
                self._window_pool[page] = saved

    def window_pages(self, pages: Sequence[int]) -> npt.NDArray[np.int64]:
        """Return the window page of each page, -1 if it has none."""
        if self._window_table is None:
            return np.full(len(pages), -1, np.int64)
        return self._window_table[list(pages)].astype(np.int64)

    def execute(self, plan: StepPlan) -> StepResult:
        return self.prepare(plan)()

    def prepare(self, plan: StepPlan) -> Callable[[], StepResult]:
        slots = [(self._slots(step.row, step.end), self._window_slots(step)) for step in plan.requests]

        def run() -> StepResult:
            self.step_sizes.append(plan.num_tokens)
            if self._failure is not None:
                failure, self._failure = self._failure, None
                raise failure
            return StepResult(tuple(map(self._run, plan.requests, slots)))

        return run

    def begin(self, plan: StepPlan) -> Callable[[], StepResult]:
        """Begin a step of a pipeline. Steps in flight must not depend on each other's tokens, and end in order."""
        for step in plan.requests:
            assert LAST_SAMPLED not in step.token_ids
            earlier = [s for before in self._in_flight for s in before.requests if s.row == step.row]
            if earlier:
                assert earlier[-1].sample is None, f"{step.rid} continues from a token that is not sampled yet"
                assert earlier[-1].rid == step.rid, f"{step.rid} got the row of a request in flight"
                assert earlier[-1].end == step.start
        self._in_flight.append(plan)
        work = self.prepare(plan)

        def run() -> StepResult:
            assert self._in_flight.popleft() is plan, "steps end in the order in which they began"
            return work()

        return run

    def lose_pool(self) -> None:
        """Drop the content of all pages."""
        self._pool[:] = 0
        self._window_pool[:] = 0

    def fail_next(self, error: EngineError | RanksLostError) -> None:
        """Raise `error` in the next step."""
        self._failure = error

    def fail_request(self, rid: str, error: str) -> None:
        """Let the request `rid` alone fail in its next step."""
        self._failures[rid] = error

    def _run(
        self, step: RequestStep, where: tuple[npt.NDArray[np.int64], npt.NDArray[np.int64] | None]
    ) -> RequestResult:
        if step.rid in self._failures:
            return RequestResult(error=self._failures.pop(step.rid))
        slots, window_slots = where
        flat, second = self._pool.reshape(-1), self._window_pool.reshape(-1)
        token_ids = [self._drawn[step.row] if token == LAST_SAMPLED else token for token in step.token_ids]
        flat[slots[step.start :]] = _values([token + self.weights for token in token_ids], step.start)
        if window_slots is not None:
            assert (window_slots[step.start :] >= 0).all(), "a token is computed that has no window page"
            second[window_slots[step.start :]] = ~_values(token_ids, step.start)
        logprobs = step.input_logprobs
        scored = tuple(TokenLogprob(t, -1.0) for t in logprobs.targets) if logprobs else ()
        if step.sample is None:
            return RequestResult(input_logprobs=scored)
        # The token sampled at each position depends on the slots before it.
        ends = range(step.end - len(step.sample.proposals), step.end + 1)
        firsts = [0 if self._window is None else max(0, end - self._window) for end in ends]
        states = [int(np.bitwise_xor.reduce(flat[slots[f:e]])) for f, e in zip(firsts, ends, strict=True)]
        if window_slots is not None and self._second_window is not None:
            for i, end in enumerate(ends):
                seen = window_slots[max(0, end - self._second_window) : end]
                assert (seen >= 0).all(), "a token is seen that has no window page"
                states[i] ^= _rotated(int(np.bitwise_xor.reduce(second[seen])))
        if step.sample.grammar is not None and not step.sample.grammar.is_ready():
            return RequestResult(input_logprobs=scored)
        specs = specs_to_sample(step.sample)
        sampled = [_sample(state, spec, self.vocab_size) for state, spec in zip(states, specs, strict=True)]
        chosen = [TokenLogprob(token, -1.0) if step.sample.return_logprob else None for token in sampled]
        hidden = [hidden_state_of(state) if step.sample.return_hidden_state else None for state in states]
        result = verified(step.sample, sampled, chosen, scored, hidden)
        assert result.token_id is not None
        self._drawn[step.row] = result.token_id
        return result

    def _slots(self, row: int, num_tokens: int) -> npt.NDArray[np.int64]:
        page_size = self._pool.shape[1]
        tokens = np.arange(num_tokens)
        pages: npt.NDArray[np.int64] = self._table[row, tokens // page_size].astype(np.int64)
        slots: npt.NDArray[np.int64] = pages * page_size + tokens % page_size
        return slots

    def _window_slots(self, step: RequestStep) -> npt.NDArray[np.int64] | None:
        """Return the slots in the second layer, -1 for a token without one. None: there is no second layer."""
        if self._window_table is None:
            return None
        page_size, tokens = self._pool.shape[1], np.arange(step.end)
        pages = self._window_table[self._table[step.row, tokens // page_size]].astype(np.int64)
        slots: npt.NDArray[np.int64] = np.where(pages >= 0, pages * page_size + tokens % page_size, -1)
        return slots


def hidden_state_of(state: int) -> HiddenState:
    """Return a value as a hidden state: 16 of its bits in each number, so that none is lost."""
    return np.array([state >> 16 * i & 0xFFFF for i in range(HIDDEN_SIZE)], np.float32).tobytes()


def numbers_of(state: HiddenState) -> list[float]:
    numbers: list[float] = np.frombuffer(state, np.float32).tolist()
    return numbers


def expected_hidden_states(prompt_ids: Sequence[int], output_ids: Sequence[int]) -> list[list[float]]:
    """Return the hidden state that each output token of an engine without a window was sampled from."""
    values = _values([*prompt_ids, *output_ids], 0).tolist()
    states = list(itertools.accumulate(values, operator.xor))[len(prompt_ids) - 1 : -1]
    return [numbers_of(hidden_state_of(state)) for state in states]


def expected_tokens(
    prompt_ids: Sequence[int],
    params: ResolvedSampling,
    count: int,
    vocab_size: int = 512,
    window: int | None = None,
    is_hybrid: bool = False,
    weights: int = 0,
) -> list[int]:
    """Return the `count` tokens that the fake engine samples for this prompt if nothing fails. Ignores stop conditions.

    `is_hybrid`: the engine has two layers, one of them with the window.
    """
    if is_hybrid:
        return _expected_of_two(prompt_ids, params, count, vocab_size, window)
    values = _values([token + weights for token in prompt_ids], 0).tolist()
    state = functools.reduce(operator.xor, values if window is None else values[-window:])
    output: list[int] = []
    for _ in range(count):
        spec = SampleSpec(params, len(prompt_ids) + len(output), prompt_ids, output)
        output.append(_sample(state, spec, vocab_size))
        values.append(int(_values([output[-1] + weights], spec.position)[0]))
        state ^= values[-1]
        if window is not None and len(values) > window:
            state ^= values[-1 - window]
    return output


def _expected_of_two(
    prompt_ids: Sequence[int], params: ResolvedSampling, count: int, vocab_size: int, window: int | None
) -> list[int]:
    values = _values(prompt_ids, 0).tolist()
    output: list[int] = []
    for _ in range(count):
        seen = [~value % (1 << 64) for value in (values if window is None else values[-window:])]
        state = functools.reduce(operator.xor, values) ^ _rotated(functools.reduce(operator.xor, seen))
        spec = SampleSpec(params, len(values), prompt_ids, output)
        output.append(_sample(state, spec, vocab_size))
        values.append(int(_values(output[-1:], spec.position)[0]))
    return output


def _rotated(value: int) -> int:
    """Rotate a value, so that equal values in both layers do not cancel out."""
    return (value << 13 | value >> 51) % (1 << 64)


def _values(token_ids: Sequence[int], start: int) -> Slots:
    return np.array([mix64(token, start + i) for i, token in enumerate(token_ids)], dtype=np.uint64)


def _sample(state: int, spec: SampleSpec, vocab_size: int) -> int:
    variate = mix64(state, 0 if spec.params.is_greedy else mix64(spec.params.seed, spec.position))
    if spec.grammar is None:
        return variate % vocab_size
    words = np.zeros(-(-vocab_size // 32), dtype=np.int32)
    spec.grammar.fill_bitmask(words.data)
    allowed = np.flatnonzero(np.unpackbits(words.view(np.uint8), count=vocab_size, bitorder="little"))
    return int(allowed[variate % len(allowed)])
