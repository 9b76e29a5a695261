"""Load of `bench compare` on every server: decode, prefill, and decode beside long prompts. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from splitserve.tools.bench.isolation import IsolationFigures, IsolationPlan
from splitserve.tools.bench.stats import StreamRecord, StreamsFigures, median, prompt_tokens_per_second


@dataclass(frozen=True, slots=True)
class PromptBatch:
    """Number of prompts sent at once, each answered to its end."""

    num_prompts: int
    input_tokens: int
    output_tokens: int

    @property
    def is_prefill(self) -> bool:
        return self.output_tokens == 1

    @property
    def name(self) -> str:
        if self.is_prefill:
            return f"prefill {self.num_prompts} x {self.input_tokens:,}"
        return f"decode, {self.num_prompts} stream{'s' if self.num_prompts > 1 else ''}"


@dataclass(frozen=True, slots=True)
class PrefillFigures:
    num_prompts: int
    num_runs: int
    prompt_tokens_per_second: float

    @classmethod
    def of(cls, runs: Sequence[Sequence[StreamRecord]]) -> PrefillFigures:
        return cls(len(runs[0]), len(runs), median([prompt_tokens_per_second(run) for run in runs]))


# Result of a scenario. A string is the reason why there are no figures.
Outcome = StreamsFigures | PrefillFigures | IsolationFigures | str


@dataclass(frozen=True, slots=True)
class ComparePlan:
    batches: tuple[PromptBatch, ...]
    isolation: IsolationPlan

    @property
    def names(self) -> list[str]:
        """Return the names of the scenarios in order."""
        return [*(batch.name for batch in self.batches), ISOLATION]

    @property
    def pool_tokens(self) -> int:
        """Return the KV pool tokens of one of our workers. Decode keeps a reserve for each running request."""
        plan = self.isolation
        streams = plan.num_streams * (plan.stream_prompt_tokens + plan.stream_output_tokens)
        long_prompts = int(plan.window / plan.interval) * plan.long_prompt_tokens
        largest = max(b.num_prompts * (b.input_tokens + b.output_tokens) for b in self.batches)
        return max(2 * largest, streams + 2 * long_prompts)


ISOLATION = "isolation"
FULL = ComparePlan(
    (
        PromptBatch(1, 128, 128),
        PromptBatch(8, 128, 128),
        PromptBatch(32, 128, 128),
        PromptBatch(1, 1024, 1),
        PromptBatch(8, 1024, 1),
    ),
    IsolationPlan(),
)
QUICK = ComparePlan(
    (
        PromptBatch(1, 128, 32),
        PromptBatch(8, 128, 32),
        PromptBatch(32, 128, 32),
        PromptBatch(1, 1024, 1),
        PromptBatch(8, 1024, 1),
    ),
    IsolationPlan(window=5.0),
)
