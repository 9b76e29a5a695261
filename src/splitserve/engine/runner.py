"""The model as the scheduler knows it: a step plan in, a step result out.

A step: (1) flatten the plan to tensors, which `prepare` does, perhaps while the step before it still runs, (2) fill in
tokens that one has drawn, plan the attention, (3) one pass through the model's body, which stores the KV of every
token, (4) logits for the few rows that are scored or sampled, some at a time, (5) logprobs of prompt tokens, (6) draw
the next tokens, by bitmasks that were filled during (3) where requests have grammars; where a request brings
proposals, one token after each of them, and so many count as were foreseen (`core/verify.py`).

The runner keeps nothing between steps but the token it drew last for each row of the page table. Which request owns
which page, who runs next and when a request ends, it does not know.
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
from splitserve.engine.inputs import PageTable, StepInputs, build_inputs
from splitserve.engine.loader import LoadedModel
from splitserve.engine.logprobs import score
from splitserve.engine.sampler import draw
from splitserve.engine.upload import to_device
from splitserve.errors import EngineError

# Logits that exist at one time at most (float32, so four times as many bytes), rounded down to whole rows.
_MAX_LOGITS = 1 << 24


class ModelRunner:
    """Engine over one model and one pool."""

    def __init__(self, loaded: LoadedModel, attention: AttentionBackend, page_size: int, page_table: PageTable) -> None:
        self._loaded = loaded
        self._attention = attention
        self._page_size = page_size
        # Owned and written by the scheduler; read at the start of a step.
        self._page_table = page_table
        self._body = loaded.model.base_model
        self._head = LanguageHead(loaded.model)
        # [rows of the page table], on the device.
        self._drawn = torch.zeros(len(page_table), dtype=torch.int64, device=loaded.device)
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
        with _errors_of(plan), torch.inference_mode():
            inputs = build_inputs(plan, self._page_table, self._page_size, self._loaded.device)
        return functools.partial(self._run, plan, inputs)

    def _run(self, plan: StepPlan, inputs: StepInputs) -> StepResult:
        with _errors_of(plan), torch.inference_mode():
            return self._step(plan, inputs)

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
            rows, tokens = to_device(np.array(drawn).T, self._drawn.device)
            self._drawn[rows] = tokens

    def _finish(self) -> None:
        """Wait for the device, where nothing else has: who hands the step's KV over reads it outside torch's order."""
        if self._loaded.device.type == "cuda":
            torch.cuda.current_stream(self._loaded.device).synchronize()

    def warm_up(self, padding_page: int) -> None:
        """Have everything compiled that is compiled on first use, by steps of nobody that write to the padding page."""
        for num_tokens in (2, 1):
            pages = np.full(-(-num_tokens // self._page_size), padding_page)
            batch = PagedBatch(np.array([0]), np.array([num_tokens]), (pages,), self._page_size)
            token_ids = torch.zeros(1, num_tokens, dtype=torch.int64, device=self._loaded.device)
            with torch.inference_mode():
                hidden = self._hidden_states(StepInputs(token_ids, torch.zeros_like(token_ids), batch, batch.offsets))
                self._head(hidden[-1:]).argmax(-1).tolist()

    def _hidden_states(self, inputs: StepInputs) -> torch.Tensor:
        """The body's output for every token of the step, [T, hidden_size]. Stores their KV on the way."""
        if self.graphs is not None and (replayed := self.graphs.run(inputs)) is not None:
            return replayed
        out = self._body(
            input_ids=inputs.token_ids,
            position_ids=inputs.positions,
            use_cache=False,
            step_attention=self._attention.plan(inputs.batch),
        )
        hidden: torch.Tensor = out.last_hidden_state[0]
        return hidden

    def _logits(self, hidden: torch.Tensor, rows: Sequence[int]) -> Iterator[tuple[slice, torch.Tensor]]:
        """Part after part of `rows`, with the logits of that part [n, vocab_size]."""
        rows_at_a_time = max(1, _MAX_LOGITS // self._loaded.vocab_size)
        for begin in range(0, len(rows), rows_at_a_time):
            part = slice(begin, begin + rows_at_a_time)
            yield part, self._head(hidden[to_device(np.array(rows[part]), hidden.device)])

    def _score_inputs(
        self, plan: StepPlan, inputs: StepInputs, hidden: torch.Tensor
    ) -> dict[int, tuple[TokenLogprob, ...]]:
        """Logprobs of prompt tokens, by request number."""
        scored: dict[int, tuple[TokenLogprob, ...]] = {}
        for i, request in enumerate(plan.requests):
            if request.input_logprobs is not None:
                first = int(inputs.offsets[i]) + request.input_logprobs.first
                scored[i] = self._score_rows(request.input_logprobs, hidden, first)
        return scored

    def _score_rows(self, spec: InputLogprobSpec, hidden: torch.Tensor, first: int) -> tuple[TokenLogprob, ...]:
        found: list[TokenLogprob] = []
        for part, logits in self._logits(hidden, range(first, first + len(spec.targets))):
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


def _rows_to_draw(plan: StepPlan, inputs: StepInputs) -> list[int]:
    """Rows of the step after which a token is drawn: of each sampled request the last, and one before each proposal."""
    rows: list[int] = []
    for request, end in zip(plan.requests, inputs.offsets[1:].tolist(), strict=True):
        if request.sample is not None:
            rows += range(end - 1 - len(request.sample.proposals), end)
    return rows


@contextlib.contextmanager
def _errors_of(plan: StepPlan) -> Iterator[None]:
    """Whatever goes wrong in a step is an EngineError that says which."""
    try:
        yield
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
