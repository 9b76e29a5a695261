"""Input and output of the engine for one step. Plain data, no behaviour.

A step computes, for every request in it, the KV of tokens [start, start + len(token_ids)) and, if `sample` is set, the
next token. There is no prefill batch and no decode batch: a decode is a step of one token.

Speculation: the last tokens of a step may be proposals (draft tokens). A token is sampled after the last real token and
after each proposal. Proposals are accepted up to the first that differs from the token sampled in its place; that
sampled token follows the accepted ones. So a step yields the same tokens as that many steps without speculation.

Steps run one after the other. A step may be prepared while the step before it still runs. If it continues from a token
that the earlier step is still to sample, the plan has LAST_SAMPLED, which the engine replaces by that token.

An engine of several pipeline stages has several steps in flight, one in each stage. They pass every stage in the order
in which they were begun, and end in it. None needs a token that another one is still to sample.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import msgspec
from msgspec.structs import replace

from splitserve.core.grammar import GrammarMatcher
from splitserve.core.sampling import ResolvedSampling

# (token id, logprob), best first. Logprobs are of the model's own distribution, before penalties and temperature.
TopLogprobs = tuple[tuple[int, float], ...]

# State of one token behind the model's last layer and final norm, the input of the language head: [hidden_size] float32
# numbers in this host's byte order.
HiddenState = bytes

# State of a draft head behind a request's tokens, the input of its next proposal: [size] float32 numbers in this host's
# byte order.
DraftState = bytes

# Stands for a token id: the last token sampled for the same row of the page table, in the step before.
LAST_SAMPLED = -1


# Objects made for each request in each step are structs that the garbage collector does not track: creating them takes
# a tenth of the time. None refers back to its holder.
class SampleSpec(msgspec.Struct, frozen=True, gc=False):
    """How to sample the token that follows this step's last token."""

    params: ResolvedSampling
    # Absolute position of the token to sample: number of prompt and output tokens before it.
    position: int
    # The request's prompt and output so far, for penalties and min tokens. References, owned by the request: read only.
    prompt_ids: Sequence[int]
    output_ids: Sequence[int]
    # Return the chosen token's logprob, and the best `num_top_logprobs` beside it.
    return_logprob: bool = False
    num_top_logprobs: int = 0
    # Return the hidden state of the token before the one to sample.
    return_hidden_state: bool = False
    # Restricts the allowed tokens. A reference, owned by the request: read only.
    grammar: GrammarMatcher | None = None
    # Draft tokens that the step checks; the first is at `position`. Empty if there is a grammar.
    proposals: Sequence[int] = ()

    @property
    def num_output_tokens(self) -> int:
        """Output tokens before the one to sample. `output_ids` may still miss the last."""
        return self.position - len(self.prompt_ids)


@dataclass(frozen=True, slots=True)
class InputLogprobSpec:
    """Request to score prompt tokens: the logits at step offset first+i are scored against targets[i]."""

    first: int
    targets: Sequence[int]
    num_top_logprobs: int = 0


class RequestStep(msgspec.Struct, frozen=True, gc=False):
    """One request's share of a step."""

    rid: str
    # Row of the page table that holds this request's page numbers; pages for all tokens of this step are in it.
    row: int
    # Tokens to compute, at positions [start, start + len(token_ids)). Never empty. Either ids or LAST_SAMPLED alone.
    token_ids: Sequence[int]
    start: int
    # None if the prompt is not finished by this step: nothing is sampled.
    sample: SampleSpec | None = None
    input_logprobs: InputLogprobSpec | None = None
    # Token after this step's last one. None: it is not known yet, because this step samples it.
    following: int | None = None
    # State of the draft head behind the tokens before this step. None: there is none, so it proposes nothing.
    draft_state: DraftState | None = None

    @property
    def end(self) -> int:
        return self.start + len(self.token_ids)

    @property
    def is_decode(self) -> bool:
        """Return whether it computes the last token and its draft tokens only."""
        return self.sample is not None and len(self.token_ids) == 1 + len(self.sample.proposals)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The work of one forward pass."""

    requests: tuple[RequestStep, ...]

    @property
    def num_tokens(self) -> int:
        return sum([len(r.token_ids) for r in self.requests])

    @property
    def has_prompts(self) -> bool:
        return not all(r.is_decode for r in self.requests)


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    token_id: int
    logprob: float
    top: TopLogprobs = ()


class RequestResult(msgspec.Struct, frozen=True, gc=False):
    """One request's share of a step's result."""

    # The sampled token, which follows the accepted proposals. None: the step's `sample` was None, or the mask of the
    # request's grammar was not ready. In the second case the last token of the step must be computed again.
    token_id: int | None = None
    # None or empty unless requested.
    logprob: TokenLogprob | None = None
    input_logprobs: tuple[TokenLogprob, ...] = ()
    # Number of accepted proposals, from the first one on. The KV of the others is overwritten later.
    num_accepted: int = 0
    # Logprobs of the accepted proposals; empty unless requested.
    accepted_logprobs: tuple[TokenLogprob, ...] = ()
    # Hidden states that the accepted proposals and then the token were sampled from; empty unless requested.
    hidden_states: tuple[HiddenState, ...] = ()
    # State of the draft head behind the sampled token. None: there is no draft head, or no sampled token.
    draft_state: DraftState | None = None
    # Why this request alone has failed: it has no other results then, and the other requests of the step are complete.
    error: str = ""


@dataclass(frozen=True, slots=True)
class StepResult:
    # Same order and length as the plan's requests.
    requests: tuple[RequestResult, ...] = field(default_factory=tuple)


class ModelEngine(Protocol):
    """The model's interface to the scheduler."""

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step. Raises EngineError; the KV of the step's tokens is then undefined."""
        ...

    def prepare(self, plan: StepPlan) -> Callable[[], StepResult]:
        """Do the first half of `execute`: read the page table. Return the second half.

        The first half may run while the step before it runs. The second half runs after that step has ended, in any
        thread; it need not run at all. Both raise EngineError.
        """
        ...


@runtime_checkable
class PipelinedEngine(Protocol):
    """An engine in which stages compute different steps at the same time."""

    def begin(self, plan: StepPlan) -> Callable[[], StepResult]:
        """Begin a step behind those in flight: read from the page table what it needs, and notify the other stages.

        Called in the scheduler's thread, while the results of earlier calls run in another: it must be cheap, and waits
        for no stage. Returns this process's share of the step as a function. It runs exactly once, in one other thread,
        in the order of the calls, and returns when the step has ended in all stages.

        No plan contains LAST_SAMPLED. Steps in flight are of different requests, except that chunks of a prompt may
        follow each other: the later chunk finds the KV of the earlier one in each stage, because the stages keep the
        order.

        Both raise EngineError. If `begin` raises, no other stage was notified and the step is not in flight. If the
        returned function raises, only this step has failed, and the steps behind it continue.
        """
        ...


def specs_to_sample(spec: SampleSpec) -> list[SampleSpec]:
    """Return how to sample after the last real token, and after each proposal if those before it are accepted."""
    proposals = spec.proposals
    if not proposals:
        return [spec]
    specs = [replace(spec, proposals=())]
    for n in range(1, len(proposals) + 1):
        output_ids = [*spec.output_ids, *proposals[:n]]
        specs.append(replace(spec, position=spec.position + n, output_ids=output_ids, proposals=()))
    return specs


def verified(
    spec: SampleSpec,
    sampled: Sequence[int],
    logprobs: Sequence[TokenLogprob | None],
    input_logprobs: tuple[TokenLogprob, ...] = (),
    hidden_states: Sequence[HiddenState | None] = (),
) -> RequestResult:
    """Return the result of a step with the sampled tokens `sampled`, in the order of `specs_to_sample`.

    Each token is sampled with its own parameters and variate, as if it were the only one. So proposals never change an
    output, only the number of steps.
    """
    count = 0
    while count < len(spec.proposals) and spec.proposals[count] == sampled[count]:
        count += 1
    accepted = tuple(logprob for logprob in logprobs[:count] if logprob is not None)
    states = tuple(state for state in hidden_states[: count + 1] if state is not None)
    return RequestResult(sampled[count], logprobs[count], input_logprobs, count, accepted, states)
