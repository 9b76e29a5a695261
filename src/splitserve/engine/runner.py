"""The model as the scheduler knows it: a step plan in, a step result out.

A step: (1) flatten the plan to tensors, which `prepare` does, perhaps while the step before it still runs, (2) fill in
tokens that one has drawn, plan the attention, (3) one pass through the model's body, which stores the KV of every
token, (4) logits for the few rows that are scored or sampled, some at a time, (5) logprobs of prompt tokens, (6) draw
the next tokens, by bitmasks that were filled during (3) where requests have grammars; where a request brings
proposals, one token after each of them, and so many count as were foreseen (`core/verify.py`).

The runner keeps nothing between steps but the token it drew last for each row of the page table. Which request owns
which page, who runs next and when a request ends, it does not know.

Where the model is cut over ranks this is the driver, and it tells the others of a step before it computes its own share
(`parallel/`): when the step runs, or with `begin` before that, so that the first stage need not wait for the last.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from itertools import islice

import numpy as np
import torch

from splitserve.core.batch import InputLogprobSpec, RequestResult, SampleSpec, StepPlan, StepResult, TokenLogprob
from splitserve.core.verify import specs_to_draw, verified
from splitserve.engine.attention.base import AttentionBackend, PagedBatch
from splitserve.engine.bitmask import BitmaskFiller, FilledBitmask
from splitserve.engine.graphs import DecodeGraphs
from splitserve.engine.head import LanguageHead
from splitserve.engine.inputs import PageTable, StepInputs, WindowTable, build_inputs
from splitserve.engine.loader import LoadedModel
from splitserve.engine.logprobs import score
from splitserve.engine.parallel.orders import encode, step_order
from splitserve.engine.sampler import draw
from splitserve.engine.upload import to_device
from splitserve.errors import EngineError, RanksLostError

# Logits that exist at one time at most (float32, so four times as many bytes), rounded down to whole rows.
_MAX_LOGITS = 1 << 24


class ModelRunner:
    """Engine over one model and one pool."""

    def __init__(
        self,
        loaded: LoadedModel,
        attention: AttentionBackend,
        page_size: int,
        page_table: PageTable,
        tell: Callable[[bytes], None] | None = None,
        window_table: WindowTable | None = None,
    ) -> None:
        """`tell` brings an order to each of the other ranks' `FollowerRunner.run`; None: there are none.

        `window_table`: where layers with windows have a pool of their own.
        """
        self._loaded = loaded
        self._attention = attention
        self._page_size = page_size
        # Owned and written by the scheduler; read at the start of a step.
        self._page_table = page_table
        self._window_table = window_table
        self._tell = tell
        self._num_told = 0
        # Of the model, in this step, that the other ranks make with this one.
        self._calls_left = 0
        self._body = loaded.body()
        self._head = LanguageHead(loaded.model)
        # [rows of the page table], on the device.
        self._drawn = torch.zeros(len(page_table), dtype=torch.int64, device=loaded.device)
        # The same on the host, for the other ranks.
        self._drawn_on_host = np.zeros(len(page_table), np.int64)
        self._bitmasks = BitmaskFiller(loaded.vocab_size, loaded.eos_token_ids)
        # Of decode steps; None: each of their kernels is launched anew.
        self.graphs: DecodeGraphs | None = None

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step; an empty plan gives an empty result. Raises EngineError."""
        return self.prepare(plan)()

    def prepare(self, plan: StepPlan) -> Callable[[], StepResult]:
        """Read the page table; what is returned runs the step. Both raise EngineError."""
        if not plan.requests:
            return StepResult
        return functools.partial(self._run, plan, self._inputs(plan))

    def begin(self, plan: StepPlan) -> Callable[[], StepResult]:
        """`prepare`, and tell the other ranks at once: they may compute their share before what is returned is called.

        Several steps may be begun so before the first has been computed. A request may be in two of them with chunks of
        its prompt, in their order; LAST_DRAWN only where the step that draws it has ended. What is returned must be
        called, in the same order, and may be called by another thread. Both raise EngineError; where `begin` does,
        nothing was told. Either raises RanksLostError where no step can be computed any more.
        """
        if not plan.requests:
            return StepResult
        inputs = self._inputs(plan)
        return functools.partial(self._compute, plan, inputs, self._tell_of(plan, inputs))

    def _inputs(self, plan: StepPlan) -> StepInputs:
        with _errors_of(plan), torch.inference_mode():
            table, windows = self._page_table, self._window_table
            return build_inputs(plan, table, self._page_size, self._loaded.device, windows)

    def _run(self, plan: StepPlan, inputs: StepInputs) -> StepResult:
        return self._compute(plan, inputs, self._tell_of(plan, inputs))

    def _tell_of(self, plan: StepPlan, inputs: StepInputs) -> int:
        """Tell the other ranks of a step; returns how many calls of the model they will make together with this one."""
        if self._tell is None:
            return 0
        specs = ((i, r.input_logprobs) for i, r in enumerate(plan.requests))
        scored = [_rows_to_score(spec, inputs.offsets[i]) for i, spec in specs if spec is not None]
        head_rows = [rows[part] for rows in (*scored, _rows_to_draw(plan, inputs)) for part in self._parts(rows)]
        order = step_order(self._num_told, plan, inputs.batch, self._drawn_on_host, head_rows)
        self._num_told += 1
        try:
            self._tell(encode(order))
        except Exception as error:
            raise RanksLostError(
                f"The other ranks of this worker could not be told of a step: {type(error).__name__}: {error}. "
                "Start it again."
            ) from error
        return 1 + len(head_rows)

    def _compute(self, plan: StepPlan, inputs: StepInputs, num_calls: int) -> StepResult:
        self._calls_left = num_calls
        with _errors_of(plan), torch.inference_mode():
            try:
                return self._step(plan, inputs)
            except Exception as error:
                if self._calls_left <= 0:
                    raise
                # The other ranks wait in the next of them, in vain.
                raise RanksLostError(
                    f"The ranks of this worker are out of step: {type(error).__name__}: {error}. Start it again."
                ) from error

    def _step(self, plan: StepPlan, inputs: StepInputs) -> StepResult:
        inputs.fill_in(self._drawn)
        specs = [spec for r in plan.requests if r.sample is not None for spec in specs_to_draw(r.sample)]
        allowed = self._bitmasks.begin(specs)
        hidden = self._hidden_states(inputs)
        scored = self._score_inputs(plan, inputs, hidden)
        sampled = self._sample(specs, _rows_to_draw(plan, inputs), hidden, allowed)
        if not sampled:
            self._finish()
        drawn = iter(sampled)
        results = []
        for i, request in enumerate(plan.requests):
            if (spec := request.sample) is None:
                results.append(RequestResult(input_logprobs=scored.get(i, ())))
                continue
            tokens, logprobs = zip(*islice(drawn, 1 + len(spec.proposals)), strict=True)
            results.append(verified(spec, tokens, logprobs, scored.get(i, ())))
        self._keep_drawn(plan, results)
        return StepResult(tuple(results))

    def _keep_drawn(self, plan: StepPlan, results: Sequence[RequestResult]) -> None:
        """For the steps after this one that say LAST_DRAWN."""
        drawn = [
            (step.row, r.token_id) for step, r in zip(plan.requests, results, strict=True) if r.token_id is not None
        ]
        if drawn:
            on_host = np.array(drawn).T
            rows, tokens = to_device(on_host, self._drawn.device)
            self._drawn[rows] = tokens
            self._drawn_on_host[on_host[0]] = on_host[1]

    def _finish(self) -> None:
        """Wait for the device, where nothing else has: who hands the step's KV over reads it outside torch's order."""
        if self._loaded.device.type == "cuda":
            torch.cuda.current_stream(self._loaded.device).synchronize()

    def warm_up(self, padding_page: int, window_padding_page: int | None = None) -> None:
        """Have everything compiled that is compiled on first use, by steps of nobody that write to the padding page."""
        for num_tokens in (2, 1):
            num_pages = -(-num_tokens // self._page_size)
            windows = None if window_padding_page is None else (np.full(num_pages, window_padding_page),)
            pages = (np.full(num_pages, padding_page),)
            batch = PagedBatch(np.array([0]), np.array([num_tokens]), pages, self._page_size, windows)
            token_ids = torch.zeros(1, num_tokens, dtype=torch.int64, device=self._loaded.device)
            with torch.inference_mode():
                hidden = self._hidden_states(StepInputs(token_ids, torch.zeros_like(token_ids), batch, batch.offsets))
                self._head(hidden[-1:]).argmax(-1).tolist()

    def _hidden_states(self, inputs: StepInputs) -> torch.Tensor:
        """The body's output for every token of the step, [T, hidden_size]. Stores their KV on the way."""
        if self.graphs is not None and (replayed := self.graphs.run(inputs)) is not None:
            return replayed
        hidden = self._body(inputs.token_ids, inputs.positions, self._attention.plan(inputs.batch))
        self._calls_left -= 1
        # Tokens are drawn where the last layer is.
        assert hidden is not None
        return hidden

    def _parts(self, rows: Sequence[int]) -> Iterator[slice]:
        """Of `rows`: those whose logits exist at one time."""
        rows_at_a_time = max(1, _MAX_LOGITS // self._loaded.vocab_size)
        for begin in range(0, len(rows), rows_at_a_time):
            yield slice(begin, begin + rows_at_a_time)

    def _logits(self, hidden: torch.Tensor, rows: Sequence[int]) -> Iterator[tuple[slice, torch.Tensor]]:
        """Part after part of `rows`, with the logits of that part [n, vocab_size]."""
        for part in self._parts(rows):
            logits = self._head(hidden[to_device(np.array(rows[part]), hidden.device)])
            self._calls_left -= 1
            yield part, logits

    def _score_inputs(
        self, plan: StepPlan, inputs: StepInputs, hidden: torch.Tensor
    ) -> dict[int, tuple[TokenLogprob, ...]]:
        """Logprobs of prompt tokens, by request number."""
        scored: dict[int, tuple[TokenLogprob, ...]] = {}
        for i, request in enumerate(plan.requests):
            if (spec := request.input_logprobs) is not None:
                scored[i] = self._score_rows(spec, hidden, _rows_to_score(spec, inputs.offsets[i]))
        return scored

    def _score_rows(self, spec: InputLogprobSpec, hidden: torch.Tensor, rows: range) -> tuple[TokenLogprob, ...]:
        found: list[TokenLogprob] = []
        for part, logits in self._logits(hidden, rows):
            found += score(logits, spec.targets[part], [spec.num_top_logprobs] * len(logits))
        return tuple(found)

    def _sample(
        self, specs: Sequence[SampleSpec], rows: Sequence[int], hidden: torch.Tensor, allowed: FilledBitmask
    ) -> list[tuple[int, TokenLogprob | None]]:
        """The token after each of `rows` of the step, and its logprob where asked for."""
        sampled: list[tuple[int, TokenLogprob | None]] = []
        for part, logits in self._logits(hidden, rows):
            tokens = draw(logits, specs[part], self._loaded.eos_token_ids, allowed.rows(part))
            sampled += zip(tokens, _score_sampled(logits, specs[part], tokens), strict=True)
        return sampled


def _rows_to_score(spec: InputLogprobSpec, offset: int) -> range:
    """Rows of the step whose logits score prompt tokens of a request, whose first row is `offset`."""
    first = int(offset) + spec.first
    return range(first, first + len(spec.targets))


def _rows_to_draw(plan: StepPlan, inputs: StepInputs) -> list[int]:
    """Rows of the step after which a token is drawn: of each sampled request the last, and one before each proposal."""
    rows: list[int] = []
    for request, end in zip(plan.requests, inputs.offsets[1:].tolist(), strict=True):
        if request.sample is not None:
            rows += range(end - 1 - len(request.sample.proposals), end)
    return rows


@contextlib.contextmanager
def _errors_of(plan: StepPlan) -> Iterator[None]:
    """Whatever goes wrong in a step is an EngineError that says which, unless no step can be computed after it."""
    try:
        yield
    except RanksLostError:
        raise
    except Exception as error:
        cause = error.message if isinstance(error, EngineError) else f"{type(error).__name__}: {error}"
        rids = ", ".join(r.rid for r in plan.requests[:4]) + (", ..." if len(plan.requests) > 4 else "")
        raise EngineError(
            f"The forward pass over {plan.num_tokens} tokens of {len(plan.requests)} requests ({rids}) failed: {cause}"
        ) from error


def _score_sampled(
    logits: torch.Tensor, specs: Sequence[SampleSpec], tokens: Sequence[int]
) -> list[TokenLogprob | None]:
    """The logprob of each row's token; None where not asked for."""
    asked = np.flatnonzero([spec.return_logprob for spec in specs]).tolist()
    found: list[TokenLogprob | None] = [None] * len(specs)
    if asked:
        rows = logits[to_device(np.array(asked), logits.device)]
        for i, logprob in zip(
            asked, score(rows, [tokens[i] for i in asked], [specs[i].num_top_logprobs for i in asked]), strict=True
        ):
            found[i] = logprob
    return found
