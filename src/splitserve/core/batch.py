"""What the scheduler asks of the engine for one step, and what it gets back. Plain data, no behaviour.

A step computes, for every request in it, the KV of tokens [start, start + len(token_ids)) and, where `sample` is set,
the next token. There is no prefill batch and no decode batch: a decode is a step of one token.

Speculation: the last tokens of a step may be proposals, guesses of what will be drawn. A token is drawn after the last
real token and after each proposal; the proposals that equal what was drawn in their place are accepted, up to the
first that does not, and the token drawn there follows them. So a step yields what that many steps would have.

Steps run one after the other. One may be prepared while the step before it still runs: where it goes on from a token
which that one is still to draw, the plan says LAST_DRAWN, and the engine, which drew it, puts it there.

An engine of several pipeline stages has several steps under way, a stage each. They pass every stage in the order in
which they were begun, and end in it. None needs a token that another one is to draw.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from splitserve.core.grammar import GrammarMatcher
from splitserve.core.sampling import SamplingParams

# (token id, logprob), best first. Logprobs are of the model's own distribution, before penalties and temperature.
TopLogprobs = tuple[tuple[int, float], ...]

# Instead of a token id: the token that was drawn last for the same row of the page table, in the step before.
LAST_DRAWN = -1


# What is made for each request in each step is a struct that the garbage collector does not watch: a tenth of the time
# to make. None refers back to what holds it.
class SampleSpec(msgspec.Struct, frozen=True, gc=False):
    """How to draw the token that follows this step's last token."""

    params: SamplingParams
    # Absolute position of the token to draw: number of prompt and output tokens before it.
    position: int
    # The request's prompt and output so far, for penalties and min tokens. References, owned by the request: read only.
    prompt_ids: Sequence[int]
    output_ids: Sequence[int]
    # Return the chosen token's logprob, and the best `num_top_logprobs` beside it.
    return_logprob: bool = False
    num_top_logprobs: int = 0
    # Allows only some tokens. A reference, owned by the request: read only.
    grammar: GrammarMatcher | None = None
    # The step's last tokens, from `position` on, are these guesses. None where there is a grammar.
    proposals: Sequence[int] = ()

    @property
    def num_output_tokens(self) -> int:
        """Before the one to draw. `output_ids` may still miss the last."""
        return self.position - len(self.prompt_ids)


@dataclass(frozen=True, slots=True)
class InputLogprobSpec:
    """Score prompt tokens: the logits at step offset first+i are scored against targets[i]."""

    first: int
    targets: Sequence[int]
    num_top_logprobs: int = 0


class RequestStep(msgspec.Struct, frozen=True, gc=False):
    """One request's share of a step."""

    rid: str
    # Row of the page table that holds this request's page numbers; pages for all tokens of this step are in it.
    row: int
    # Tokens to compute, at positions [start, start + len(token_ids)). Never empty. Either ids or LAST_DRAWN alone.
    token_ids: Sequence[int]
    start: int
    # None while the prompt is not finished by this step: nothing is sampled.
    sample: SampleSpec | None = None
    input_logprobs: InputLogprobSpec | None = None

    @property
    def end(self) -> int:
        return self.start + len(self.token_ids)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """All the work of one forward pass."""

    requests: tuple[RequestStep, ...]

    @property
    def num_tokens(self) -> int:
        return sum([len(r.token_ids) for r in self.requests])


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    token_id: int
    logprob: float
    top: TopLogprobs = ()


class RequestResult(msgspec.Struct, frozen=True, gc=False):
    """One request's share of a step's outcome."""

    # The sampled token, which follows the accepted proposals. None: the step's `sample` was None, or the mask of the
    # request's grammar was not ready. In the second case the last token of the step must be computed again.
    token_id: int | None = None
    # Present where asked for.
    logprob: TokenLogprob | None = None
    input_logprobs: tuple[TokenLogprob, ...] = ()
    # Of the proposals, the first so many were accepted. The KV of the others is nobody's, and overwritten later.
    num_accepted: int = 0
    # Theirs, where asked for.
    accepted_logprobs: tuple[TokenLogprob, ...] = ()
    # Why this request has failed, and it alone: it has nothing else then, and the step of the others is whole.
    error: str = ""


@dataclass(frozen=True, slots=True)
class StepResult:
    # Same order and length as the plan's requests.
    requests: tuple[RequestResult, ...] = field(default_factory=tuple)


class Engine(Protocol):
    """The model as the scheduler knows it."""

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step. Raises EngineError; the KV of the step's tokens is then undefined."""
        ...

    def prepare(self, plan: StepPlan) -> Callable[[], StepResult]:
        """The first half of `execute`: read of the page table what the step needs; what is returned is the other half.

        This half may run while the step before it does, the other one not before that has ended, in any thread. It need
        not run at all. Both raise EngineError.
        """
        ...


class PipelinedEngine(Protocol):
    """An engine whose stages work at different steps."""

    def begin(self, plan: StepPlan) -> Callable[[], StepResult]:
        """Begin a step behind those under way: read of the page table what it needs, and tell the other stages.

        Called in the scheduler's thread, while what earlier calls returned runs in another: it must be cheap, and does
        not wait for any stage. What is returned is this process's share of the step. It runs exactly once, in one
        other thread, in the order of the calls, and returns when the step has ended in all stages.

        No plan has LAST_DRAWN in it. Steps under way together are of different requests, except that a prompt's chunks
        may follow each other: the later one finds the KV of the earlier one in each stage, which had it first.

        Both raise EngineError: here, nobody was told and the step is not under way; there, only this step has failed,
        and those behind it go on.
        """
        ...
