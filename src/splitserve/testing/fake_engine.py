"""An engine without a model whose next token depends on every KV slot of the request.

It writes one 64-bit value per token into a real pool and draws the next token from all the values it finds through the
page table. A page that was lost, swapped, overwritten or not transferred changes the output, so comparing tokens with
`expected_tokens` proves the bookkeeping and the transfer, at thousands of steps a second.
"""

from __future__ import annotations

import functools
import operator
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from splitserve.core.batch import (
    LAST_DRAWN,
    RequestResult,
    RequestStep,
    SampleSpec,
    StepPlan,
    StepResult,
    TokenLogprob,
)
from splitserve.core.layout import KVComponent, KVLayout, Region
from splitserve.core.sampling import SamplingParams, mix64
from splitserve.core.verify import specs_to_draw, verified
from splitserve.errors import EngineError, RanksLostError

Slots = npt.NDArray[np.uint64]


class FakeEngine:
    """`page_table` is the scheduler's, int32 [rows, pages per row]; the pool is the engine's own, or one it shares.

    With a `window` each draw depends on the last so many slots, and pages before them are not looked at.
    """

    def __init__(
        self,
        page_table: npt.NDArray[np.int32],
        num_pages: int,
        page_size: int,
        vocab_size: int = 512,
        pool: Slots | None = None,
        window: int | None = None,
    ) -> None:
        self._window = window
        self.vocab_size = vocab_size
        self._table = page_table
        self._failure: EngineError | RanksLostError | None = None
        # Requests that fail in their next step, and why.
        self._failures: dict[str, str] = {}
        # Tokens of every step run so far.
        self.step_sizes: list[int] = []
        # One value a token: [num_pages, page_size].
        self._pool: Slots = np.zeros((num_pages, page_size), dtype=np.uint64) if pool is None else pool
        # The last token drawn for each row of the page table.
        self._drawn: dict[int, int] = {}
        # Begun and not ended: one at a time, but in a pipeline.
        self._under_way: deque[StepPlan] = deque()
        # Two float32 elements are the eight bytes of one value.
        component = KVComponent("k", 0, "float32", num_heads=1, first_head=0, total_heads=1, head_dim=2, window=window)
        self.layout = KVLayout(page_size, num_pages, (component,))

    def regions(self) -> tuple[Region, ...]:
        return (Region(self._pool.ctypes.data, self._pool.nbytes),)

    @property
    def bytes_per_page(self) -> int:
        return self.layout.bytes_per_page

    def save(self, pages: Sequence[int]) -> Slots:
        return self._pool[list(pages)]

    def restore(self, copy: Slots, first: int, pages: Sequence[int]) -> None:
        self._pool[list(pages)] = copy[first : first + len(pages)]

    def execute(self, plan: StepPlan) -> StepResult:
        return self.prepare(plan)()

    def prepare(self, plan: StepPlan) -> Callable[[], StepResult]:
        slots = [self._slots(step.row, step.end) for step in plan.requests]

        def run() -> StepResult:
            self.step_sizes.append(plan.num_tokens)
            if self._failure is not None:
                failure, self._failure = self._failure, None
                raise failure
            return StepResult(tuple(map(self._run, plan.requests, slots)))

        return run

    def begin(self, plan: StepPlan) -> Callable[[], StepResult]:
        """A pipeline's: what is under way together must not need each other's tokens, and ends in order."""
        for step in plan.requests:
            assert LAST_DRAWN not in step.token_ids
            earlier = [s for before in self._under_way for s in before.requests if s.row == step.row]
            if earlier:
                assert earlier[-1].sample is None, f"{step.rid} goes on from a token that is not drawn yet"
                assert earlier[-1].rid == step.rid, f"{step.rid} got the row of a request under way"
                assert earlier[-1].end == step.start
        self._under_way.append(plan)
        work = self.prepare(plan)

        def run() -> StepResult:
            assert self._under_way.popleft() is plan, "steps end in the order in which they began"
            return work()

        return run

    def fail_next(self, error: EngineError | RanksLostError) -> None:
        """Raise `error` in the next step."""
        self._failure = error

    def fail_request(self, rid: str, error: str) -> None:
        """It alone fails, in its next step."""
        self._failures[rid] = error

    def _run(self, step: RequestStep, slots: npt.NDArray[np.int64]) -> RequestResult:
        if step.rid in self._failures:
            return RequestResult(error=self._failures.pop(step.rid))
        flat = self._pool.reshape(-1)
        token_ids = [self._drawn[step.row] if token == LAST_DRAWN else token for token in step.token_ids]
        flat[slots[step.start :]] = _values(token_ids, step.start)
        logprobs = step.input_logprobs
        scored = tuple(TokenLogprob(t, -1.0) for t in logprobs.targets) if logprobs else ()
        if step.sample is None:
            return RequestResult(input_logprobs=scored)
        # What is drawn at each position depends on the slots before it.
        ends = range(step.end - len(step.sample.proposals), step.end + 1)
        firsts = [0 if self._window is None else max(0, end - self._window) for end in ends]
        states = [int(np.bitwise_xor.reduce(flat[slots[f:e]])) for f, e in zip(firsts, ends, strict=True)]
        specs = specs_to_draw(step.sample)
        drawn = [_draw(state, spec, self.vocab_size) for state, spec in zip(states, specs, strict=True)]
        chosen = [TokenLogprob(token, -1.0) if step.sample.return_logprob else None for token in drawn]
        result = verified(step.sample, drawn, chosen, scored)
        assert result.token_id is not None
        self._drawn[step.row] = result.token_id
        return result

    def _slots(self, row: int, num_tokens: int) -> npt.NDArray[np.int64]:
        page_size = self._pool.shape[1]
        tokens = np.arange(num_tokens)
        pages: npt.NDArray[np.int64] = self._table[row, tokens // page_size].astype(np.int64)
        slots: npt.NDArray[np.int64] = pages * page_size + tokens % page_size
        return slots


def expected_tokens(
    prompt_ids: Sequence[int],
    params: SamplingParams,
    count: int,
    vocab_size: int = 512,
    window: int | None = None,
) -> list[int]:
    """What the fake engine draws for this prompt when nothing went wrong: `count` tokens, stop conditions ignored."""
    values = _values(prompt_ids, 0).tolist()
    state = functools.reduce(operator.xor, values if window is None else values[-window:])
    output: list[int] = []
    for _ in range(count):
        spec = SampleSpec(params, len(prompt_ids) + len(output), prompt_ids, output)
        output.append(_draw(state, spec, vocab_size))
        values.append(int(_values(output[-1:], spec.position)[0]))
        state ^= values[-1]
        if window is not None and len(values) > window:
            state ^= values[-1 - window]
    return output


def _values(token_ids: Sequence[int], start: int) -> Slots:
    return np.array([mix64(token, start + i) for i, token in enumerate(token_ids)], dtype=np.uint64)


def _draw(state: int, spec: SampleSpec, vocab_size: int) -> int:
    drawn = mix64(state, 0 if spec.params.is_greedy else mix64(spec.params.seed, spec.position))
    if spec.grammar is None:
        return drawn % vocab_size
    words = np.zeros(-(-vocab_size // 32), dtype=np.int32)
    spec.grammar.fill_bitmask(words.data)
    allowed = np.flatnonzero(np.unpackbits(words.view(np.uint8), count=vocab_size, bitorder="little"))
    return int(allowed[drawn % len(allowed)])
