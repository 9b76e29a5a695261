"""The model as the scheduler knows it: a step plan in, a step result out.

A step: (1) flatten the plan to tensors, which `prepare` does, perhaps while the step before it still runs, (2) fill in
tokens that one has drawn, plan the attention, (3) one pass through the model's body, which stores the KV of every
token, (4) logits for the few rows that are scored or sampled, some at a time, (5) logprobs of prompt tokens, (6) draw
the next tokens, by bitmasks that were filled during (3) where requests have grammars.

The runner keeps nothing between steps but the token it drew last for each row of the page table. Which request owns
which page, who runs next and when a request ends, it does not know.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch

from splitserve.core.batch import InputLogprobSpec, RequestResult, SampleSpec, StepPlan, StepResult, TokenLogprob
from splitserve.engine.attention.base import AttentionBackend
from splitserve.engine.bitmask import BitmaskFiller, FilledBitmask
from splitserve.engine.head import LanguageHead
from splitserve.engine.inputs import PageTable, StepInputs, build_inputs
from splitserve.engine.loader import LoadedModel
from splitserve.engine.logprobs import score
from splitserve.engine.sampler import draw
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
        allowed = self._bitmasks.begin([r.sample for r in plan.requests if r.sample is not None])
        hidden = self._hidden_states(inputs)
        scored = self._score_inputs(plan, inputs, hidden)
        sampled = self._sample(plan, inputs, hidden, allowed)
        results = []
        for i in range(len(plan.requests)):
            token_id, logprob = sampled.get(i, (None, None))
            results.append(RequestResult(token_id, logprob, scored.get(i, ())))
        return StepResult(tuple(results))

    def _hidden_states(self, inputs: StepInputs) -> torch.Tensor:
        """The body's output for every token of the step, [T, hidden_size]. Stores their KV on the way."""
        out = self._body(
            input_ids=inputs.token_ids,
            position_ids=inputs.positions,
            use_cache=False,
            step_attention=self._attention.plan(inputs.batch),
        )
        hidden: torch.Tensor = out.last_hidden_state[0]
        return hidden

    def _logits(self, hidden: torch.Tensor, rows: Sequence[int]) -> Iterator[tuple[slice, torch.Tensor]]:
        """Part after part of `rows`, with the logits of that part [n, vocab_size]. Raises EngineError on NaN."""
        rows_at_a_time = max(1, _MAX_LOGITS // self._loaded.vocab_size)
        for begin in range(0, len(rows), rows_at_a_time):
            part = slice(begin, begin + rows_at_a_time)
            logits = self._head(hidden[torch.tensor(rows[part], device=hidden.device)])
            if bool(logits.amax(-1).isnan().any()):
                raise EngineError("the logits are not numbers. Serve the model with dtype bfloat16 or float32")
            yield part, logits

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
        self, plan: StepPlan, inputs: StepInputs, hidden: torch.Tensor, allowed: FilledBitmask
    ) -> dict[int, tuple[int, TokenLogprob | None]]:
        """The next token, and its logprob where asked for, by request number."""
        wanted = [(i, r.sample) for i, r in enumerate(plan.requests) if r.sample is not None]
        last_rows = (inputs.offsets[[i + 1 for i, _ in wanted]] - 1).tolist() if wanted else []
        sampled: dict[int, tuple[int, TokenLogprob | None]] = {}
        for part, logits in self._logits(hidden, last_rows):
            specs = [spec for _, spec in wanted[part]]
            tokens = draw(logits, specs, self._loaded.eos_token_ids, allowed.rows(part))
            rows = [plan.requests[i].row for i, _ in wanted[part]]
            self._drawn[rows] = torch.tensor(tokens, device=self._drawn.device)
            logprobs = _score_sampled(logits, specs, tokens)
            sampled |= {
                i: (token, logprob) for (i, _), token, logprob in zip(wanted[part], tokens, logprobs, strict=True)
            }
        return sampled


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
        rows = logits[torch.tensor(asked, device=logits.device)]
        for i, logprob in zip(
            asked, score(rows, [tokens[i] for i in asked], [specs[i].num_top_logprobs for i in asked]), strict=True
        ):
            found[i] = logprob
    return found
