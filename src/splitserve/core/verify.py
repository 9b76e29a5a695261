"""Proposals against what is drawn: the rule of speculation, which every engine follows.

A token is drawn at each position by its own parameters and variate, as if it were the only one; a proposal is accepted
while it equals what was drawn in its place. So nothing that is proposed can change an output, only how many steps it
takes. Which guesses are made, and by whom, is not known here.
"""

from __future__ import annotations

from collections.abc import Sequence

from splitserve.core.batch import RequestResult, SampleSpec, TokenLogprob


def specs_to_draw(spec: SampleSpec) -> list[SampleSpec]:
    """How to draw after the last real token, then after each proposal, given that those before it are accepted."""
    proposals = spec.proposals
    if not proposals:
        return [spec]
    specs = [spec._replace(proposals=())]
    for n in range(1, len(proposals) + 1):
        output_ids = [*spec.output_ids, *proposals[:n]]
        specs.append(spec._replace(position=spec.position + n, output_ids=output_ids, proposals=()))
    return specs


def verified(
    spec: SampleSpec,
    drawn: Sequence[int],
    logprobs: Sequence[TokenLogprob | None],
    input_logprobs: tuple[TokenLogprob, ...] = (),
) -> RequestResult:
    """The outcome of a step for which these were drawn, in the order of `specs_to_draw`."""
    count = 0
    while count < len(spec.proposals) and spec.proposals[count] == drawn[count]:
        count += 1
    accepted = tuple(logprob for logprob in logprobs[:count] if logprob is not None)
    return RequestResult(drawn[count], logprobs[count], input_logprobs, count, accepted)
