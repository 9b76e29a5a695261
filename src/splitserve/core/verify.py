"""Verification of proposals against sampled tokens: the rule of speculation for every engine.

At each position a token is sampled with its own parameters and variate, as if it were the only one. A proposal is
accepted while it equals the token sampled in its place. So proposals never change an output, only the number of steps.
This module does not depend on the proposer.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from splitserve.core.batch import RequestResult, SampleSpec, TokenLogprob


def specs_to_draw(spec: SampleSpec) -> list[SampleSpec]:
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
    drawn: Sequence[int],
    logprobs: Sequence[TokenLogprob | None],
    input_logprobs: tuple[TokenLogprob, ...] = (),
) -> RequestResult:
    """Return the result of a step with the sampled tokens `drawn`, in the order of `specs_to_draw`."""
    count = 0
    while count < len(spec.proposals) and spec.proposals[count] == drawn[count]:
        count += 1
    accepted = tuple(logprob for logprob in logprobs[:count] if logprob is not None)
    return RequestResult(drawn[count], logprobs[count], input_logprobs, count, accepted)
