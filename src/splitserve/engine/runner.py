"""Execution of the model for the scheduler: takes a step plan and returns a step result.

A step has these parts:
1. `prepare` converts the plan to tensors, perhaps while the step before it still runs.
2. Tokens sampled by that step are filled in, and the attention is planned.
3. One pass through the model's body stores the KV of every token.
4. Logits are computed for the few rows that are scored or sampled, some rows at a time.
5. Prompt tokens are scored (logprobs).
6. The next tokens are sampled, with the bitmasks of grammars that were computed during the pass. With proposals, one
   token is sampled after each, and those after correct proposals count (`core/batch.py`).

Between steps the runner keeps only the last sampled token of each row of the page table. The scheduler decides which
request owns which page, which request runs next and when a request ends.

If the model is sharded over ranks, this is the driver. It sends a step to the other ranks before it computes its own
share (`parallel/`): when the step runs, or earlier with `begin`, so that the first stage does not wait for the last.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch

from splitserve.core.batch import (
    HiddenState,
    InputLogprobSpec,
    RequestResult,
    StepPlan,
    StepResult,
    TokenLogprob,
    specs_to_sample,
    verified,
)
from splitserve.core.errors import EngineError, RanksLostError, clause
from splitserve.engine.attention.base import AttentionBackend, IntArray, PagedBatch
from splitserve.engine.bitmask import NOT_READY, MaskCollector, StepMasks
from splitserve.engine.graphs import DecodeGraphs
from splitserve.engine.inputs import PageTable, StepInputs, WindowTable, build_inputs, to_device, wait_for
from splitserve.engine.loader import LoadedModel
from splitserve.engine.parallel.steps import body_and_head, encode, step_order
from splitserve.engine.sampler import NO_TOKEN, NOT_NUMBERS, sample_tokens, score, score_sampled
from splitserve.engine.whole_model import CONSTRUCTION

# Rows of the step with logits that are computed in one call.
Rows = Sequence[int]
# A sampled token, its logprob and the hidden state before it if requested, and its error.
SampledToken = tuple[int, TokenLogprob | None, HiddenState | None, str]
# Logprobs of a request's prompt tokens, or their error.
Scored = tuple[TokenLogprob, ...] | str

# Maximum number of logits that exist at one time (float32, so four times as many bytes), rounded down to whole rows.
_MAX_LOGITS = 1 << 24
# Minimum ratio of tokens to used outputs from which the last layer computes only the used ones.
_FEW_OUTPUTS = 4
_NO_GUARD = contextlib.nullcontext()


class ModelRunner:
    """Engine over one model and one pool."""

    def __init__(
        self,
        loaded: LoadedModel,
        attention: AttentionBackend,
        page_size: int,
        page_table: PageTable,
        send_order: Callable[[bytes], None] | None = None,
        window_table: WindowTable | None = None,
        *,
        meets: bool = False,
    ) -> None:
        """`send_order` sends a step to all other ranks, which run it by `FollowerRunner.run`. None: no other ranks.

        `window_table`: required if layers with windows have a pool of their own.
        `meets`: data parallel attention. Ranks run steps of their own, and exchange tokens before the experts.
        """
        self._loaded = loaded
        self._attention = attention
        self._page_size = page_size
        # Owned and written by the scheduler; read at the start of a step.
        self._page_table = page_table
        self._window_table = window_table
        self._send = send_order
        self._meets = meets
        # Whether the body computes each output of a step. A draft head reads them all.
        self.computes_all_outputs = send_order is not None or meets
        self._num_sent = 0
        self._body, self._head = body_and_head(loaded)
        # Last sampled token of each row of the page table: on the host, to be sent to the other ranks, and on the
        # device. A CPU has both in the same memory.
        self._last_sampled_on_host = np.zeros(len(page_table), np.int64)
        self._last_sampled = to_device(self._last_sampled_on_host, loaded.device)
        self._bitmasks = MaskCollector(loaded.vocab_size, loaded.eos_token_ids)
        # CUDA graphs of decode steps; None: each of their kernels is launched anew.
        self.graphs: DecodeGraphs | None = None
        # Held during a step. The ranks of a model construct another one only while no step runs.
        self._guard: contextlib.AbstractContextManager[object] = CONSTRUCTION if loaded.share is None else _NO_GUARD

    def use(self, loaded: LoadedModel) -> None:
        """Compute later steps with `loaded`, which has the same shape. No step may run while it has no model."""
        self._loaded = loaded
        self._body, self._head = body_and_head(loaded)
        # They contain the addresses of the old weights.
        self.graphs = None

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step; an empty plan gives an empty result. Raises EngineError."""
        return self.prepare(plan)()

    def prepare(self, plan: StepPlan) -> Callable[[], StepResult]:
        """Read the page table and return a function that runs the step. Both raise EngineError."""
        if not plan.requests:
            return StepResult
        inputs = self._inputs(plan)
        return lambda: self._begin(plan, inputs)()

    def begin(self, plan: StepPlan) -> Callable[[], StepResult]:
        """Prepare a step and send it to the other ranks at once. They may compute their share before this rank does.

        Several steps may be begun before the first has been computed. A request may be in two of them with chunks of
        its prompt, in their order; LAST_SAMPLED is allowed only if the step that samples it has ended. The returned
        function must be called, in the same order, and may be called by another thread. Both raise EngineError; if
        `begin` does, nothing was sent. Either raises RanksLostError if no step can be computed any more.
        """
        if not plan.requests:
            return StepResult
        return self._begin(plan, self._inputs(plan))

    def _inputs(self, plan: StepPlan) -> StepInputs:
        with _errors_of(plan), torch.inference_mode():
            table, windows = self._page_table, self._window_table
            vocab_size = self._loaded.vocab_size
            return build_inputs(plan, table, self._page_size, vocab_size, self._loaded.device, windows)

    def _begin(self, plan: StepPlan, inputs: StepInputs) -> Callable[[], StepResult]:
        with _errors_of(plan):
            specs = [spec for r in plan.requests if r.sample is not None for spec in specs_to_sample(r.sample)]
            rows = _rows_to_sample(plan, inputs)
            sent_rows = self._send_order(plan, inputs, rows)
        return functools.partial(self._compute, plan, inputs, rows, StepMasks(self._bitmasks, specs), sent_rows)

    def _send_order(self, plan: StepPlan, inputs: StepInputs, sampled: Rows) -> Sequence[Rows] | None:
        """Send a step to the other ranks. Return the rows of each call of the head they will make.

        None: no other rank waits for them.
        """
        if self._send is None:
            return () if self._meets else None
        specs = ((i, r.input_logprobs) for i, r in enumerate(plan.requests))
        scored = [_rows_to_score(spec, inputs.offsets[i]) for i, spec in specs if spec is not None]
        head_rows = [rows[part] for rows in (*scored, sampled) for part in self._parts(rows)]
        order = step_order(self._num_sent, plan, inputs.batch, self._last_sampled_on_host, head_rows)
        self._num_sent += 1
        try:
            self._send(encode(order))
        except Exception as error:
            raise RanksLostError(
                f"The other ranks of this worker could not be sent a step: {type(error).__name__}: {clause(error)}. "
                "Start it again."
            ) from error
        return head_rows

    def _compute(
        self, plan: StepPlan, inputs: StepInputs, rows: Rows, masks: StepMasks, sent_rows: Sequence[Rows] | None
    ) -> StepResult:
        """Run a step and sample a token after each of `rows`."""
        calls = _StepCalls(self._head, sent_rows)
        kernels = self._loaded.kernels
        # During the step, this worker owns its home cores.
        cores = contextlib.nullcontext() if kernels is None else kernels.computing(has_prompts=plan.has_prompts)
        with _errors_of(plan), torch.inference_mode(), self._guard, cores:
            try:
                inputs.fill_in(self._last_sampled)
                calls.run_body(functools.partial(self._hidden_states, inputs, self._output_rows(plan, inputs, rows)))
                scored = self._score_inputs(plan, inputs, calls)
                sampled = self._sample(rows, masks, calls)
                if not sampled:
                    wait_for(self._loaded.device)
                results = _results_of(plan, scored, sampled)
                self._keep_sampled(plan, results)
            except Exception as error:
                # The other ranks wait in the next call.
                calls.make_up(error)
                raise
        return StepResult(tuple(results))

    def _keep_sampled(self, plan: StepPlan, results: Sequence[RequestResult]) -> None:
        """Store the sampled tokens for later steps with LAST_SAMPLED."""
        sampled = [
            (step.row, r.token_id) for step, r in zip(plan.requests, results, strict=True) if r.token_id is not None
        ]
        if sampled:
            on_host, device = np.array(sampled).T, self._last_sampled.device
            self._last_sampled_on_host[on_host[0]] = on_host[1]
            if device.type != "cpu":
                rows, tokens = to_device(on_host, device)
                self._last_sampled[rows] = tokens

    def warm_up(self, padding_page: int, window_padding_page: int | None = None) -> None:
        """Compile all that is compiled on first use, by steps of no request that write to the padding page."""
        for num_tokens in (2, 1):
            num_pages = -(-num_tokens // self._page_size)
            windows = None if window_padding_page is None else (np.full(num_pages, window_padding_page),)
            pages = (np.full(num_pages, padding_page),)
            batch = PagedBatch(np.array([0]), np.array([num_tokens]), pages, self._page_size, windows)
            token_ids = torch.zeros(1, num_tokens, dtype=torch.int64, device=self._loaded.device)
            with torch.inference_mode():
                hidden = self._hidden_states(StepInputs(token_ids, torch.zeros_like(token_ids), batch, batch.offsets))
                self._head(hidden[-1:]).argmax(-1).tolist()

    def _output_rows(self, plan: StepPlan, inputs: StepInputs, sampled: Rows) -> IntArray | None:
        """Return the rows of the step with logits, at least one. None: the body computes all rows."""
        specs = ((i, r.input_logprobs) for i, r in enumerate(plan.requests))
        scored = [_rows_to_score(spec, inputs.offsets[i]) for i, spec in specs if spec is not None]
        rows = sorted({*sampled, *itertools.chain.from_iterable(scored)}) or [0]
        is_for_all = self.computes_all_outputs or len(rows) > inputs.offsets[-1] // _FEW_OUTPUTS
        return None if is_for_all else np.array(rows)

    def _hidden_states(self, inputs: StepInputs, rows: IntArray | None = None) -> torch.Tensor:
        """Return the body's output for every token of the step, [T, hidden_size]. Stores their KV.

        With `rows`, only their outputs are defined.
        """
        if self.graphs is not None and (replayed := self.graphs.run(inputs)) is not None:
            return replayed
        batch = inputs.batch if rows is None else replace(inputs.batch, output_rows=rows)
        hidden = self._body(inputs.token_ids, inputs.positions, self._attention.plan(batch))
        # Tokens are sampled on the rank with the last layer.
        assert hidden is not None
        if rows is not None and len(hidden) == len(rows):
            outputs, hidden = hidden, hidden.new_empty(inputs.offsets[-1], hidden.shape[-1])
            hidden[rows] = outputs
        return hidden

    def _parts(self, rows: Sequence[int]) -> Iterator[slice]:
        """Split `rows` into parts: the logits of only one part exist at a time."""
        rows_at_a_time = max(1, _MAX_LOGITS // self._loaded.vocab_size)
        for begin in range(0, len(rows), rows_at_a_time):
            yield slice(begin, begin + rows_at_a_time)

    def _logits(self, calls: _StepCalls, rows: Rows) -> Iterator[tuple[slice, torch.Tensor]]:
        """Return part after part of `rows`, with the logits of that part [n, vocab_size]."""
        for part in self._parts(rows):
            yield part, calls.logits(rows[part])

    def _score_inputs(self, plan: StepPlan, inputs: StepInputs, calls: _StepCalls) -> dict[int, Scored]:
        """Return the logprobs of prompt tokens, by request number."""
        scored: dict[int, Scored] = {}
        for i, request in enumerate(plan.requests):
            if (spec := request.input_logprobs) is None:
                continue
            found: list[TokenLogprob] = []
            failure = ""
            for part, logits in self._logits(calls, _rows_to_score(spec, inputs.offsets[i])):
                try:
                    found += score(logits, spec.targets[part], [spec.num_top_logprobs] * len(logits))
                except EngineError as error:
                    failure = error.message
            scored[i] = failure or tuple(found)
        return scored

    def _sample(self, rows: Rows, masks: StepMasks, calls: _StepCalls) -> list[SampledToken]:
        """Return the token after each of the rows."""
        sampled: list[SampledToken] = []
        for part, logits in self._logits(calls, rows):
            specs = masks.specs[part]
            tokens = sample_tokens(logits, specs, self._loaded.eos_token_ids, masks.rows(part))
            errors = [
                NOT_NUMBERS if token == NO_TOKEN else masks.error(part.start + i) for i, token in enumerate(tokens)
            ]
            states = calls.states(rows[part], [spec.return_hidden_state for spec in specs])
            sampled += zip(tokens, score_sampled(logits, specs, tokens), states, errors, strict=True)
        return sampled


class _StepCalls:
    """The calls of the model in one step, on the driver.

    The ranks make them together: one of the body, then those of the head. In each call a rank waits for all others. So
    if a rank fails between two calls, it must still make the remaining ones. Only a failure within a call leaves the
    ranks out of step.
    """

    def __init__(self, head: Callable[[torch.Tensor], torch.Tensor], sent_rows: Sequence[Rows] | None) -> None:
        """`sent_rows`: rows of each call of the head, as sent to the other ranks. None: no rank waits in any call."""
        self._head = head
        self._is_shared = sent_rows is not None
        self._left = deque(sent_rows or ())
        # [T, hidden_size], once the body was called.
        self._hidden = torch.empty(0)
        # Whether the next call is not to be made: the body was not called, or a call has failed.
        self._is_broken = True

    def run_body(self, body: Callable[[], torch.Tensor]) -> None:
        """Call the body; first of all calls, and once."""
        self._hidden = body()
        self._is_broken = False

    def logits(self, rows: Rows) -> torch.Tensor:
        """Return the logits [n, vocab_size] after n distinct rows of the step, in rising order."""
        self._is_broken = True
        if self._left:
            self._left.popleft()
        is_all = len(rows) == len(self._hidden)
        logits = self._head(self._hidden if is_all else self._hidden[to_device(np.array(rows), self._hidden.device)])
        self._is_broken = False
        return logits

    def states(self, rows: Rows, wanted: Sequence[bool]) -> list[HiddenState | None]:
        """Return the hidden states of these rows of the step. None: not requested for the row."""
        found: list[HiddenState | None] = [None] * len(rows)
        chosen = [i for i, is_wanted in enumerate(wanted) if is_wanted]
        if chosen:
            states = self._hidden[to_device(np.array([rows[i] for i in chosen]), self._hidden.device)]
            for i, state in zip(chosen, states.float().cpu().numpy(), strict=True):
                found[i] = state.tobytes()
        return found

    def make_up(self, error: Exception) -> None:
        """Make the remaining calls after `error` of this rank. Raises RanksLostError if the ranks are out of step."""
        if not self._is_shared:
            return
        try:
            if self._is_broken:
                raise error
            while self._left:
                self.logits(self._left[0])
        except Exception as cause:
            raise RanksLostError(
                f"The ranks of this worker are out of step: {type(cause).__name__}: {clause(cause)}. Start it again."
            ) from cause


def _rows_to_score(spec: InputLogprobSpec, offset: int) -> range:
    """Return the rows of the step with logits that score prompt tokens of a request; `offset`: its first row."""
    first = int(offset) + spec.first
    return range(first, first + len(spec.targets))


def _rows_to_sample(plan: StepPlan, inputs: StepInputs) -> list[int]:
    """Return the rows to sample after: the last row of each sampled request, and the row before each proposal."""
    rows: list[int] = []
    for request, end in zip(plan.requests, inputs.offsets[1:].tolist(), strict=True):
        if request.sample is not None:
            rows += range(end - 1 - len(request.sample.proposals), end)
    return rows


@contextlib.contextmanager
def _errors_of(plan: StepPlan) -> Iterator[None]:
    """Turn errors of a step into an EngineError that names it, unless no step can be computed after it."""
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


def _results_of(plan: StepPlan, scored: Mapping[int, Scored], sampled: Sequence[SampledToken]) -> list[RequestResult]:
    """Return the result of each request. A failed row fails its own request only.

    `scored`: by request number. `sampled`: for each row that samples, in order.
    """
    rest = iter(sampled)
    results = []
    for i, request in enumerate(plan.requests):
        input_logprobs = scored.get(i, ())
        tokens, logprobs, states, errors = (), (), (), ()
        if (spec := request.sample) is not None:
            tokens, logprobs, states, errors = zip(*itertools.islice(rest, 1 + len(spec.proposals)), strict=True)
        if isinstance(input_logprobs, str):
            results.append(RequestResult(error=input_logprobs))
        elif NOT_READY in errors:
            results.append(RequestResult(input_logprobs=input_logprobs))
        elif any(errors):
            results.append(RequestResult(error=next(filter(None, errors))))
        elif spec is None:
            results.append(RequestResult(input_logprobs=input_logprobs))
        else:
            results.append(verified(spec, tokens, logprobs, input_logprobs, states))
    return results
