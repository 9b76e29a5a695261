"""What a step found after each of its rows, as the outcome of each request. A row that failed fails its own alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice

from splitserve.core.batch import RequestResult, StepPlan, TokenLogprob
from splitserve.core.verify import verified
from splitserve.engine.bitmask import NOT_READY

# A drawn token, its logprob where asked for, and what is wrong with it.
Drawn = tuple[int, TokenLogprob | None, str]
# Logprobs of a request's prompt tokens, or what is wrong with them.
Scored = tuple[TokenLogprob, ...] | str


def results_of(plan: StepPlan, scored: Mapping[int, Scored], drawn: Sequence[Drawn]) -> list[RequestResult]:
    """Of each request of the plan. `scored`: by request number. `drawn`: after each row that draws, in their order."""
    rest = iter(drawn)
    results = []
    for i, request in enumerate(plan.requests):
        input_logprobs = scored.get(i, ())
        tokens, logprobs, errors = (), (), ()
        if (spec := request.sample) is not None:
            tokens, logprobs, errors = zip(*islice(rest, 1 + len(spec.proposals)), strict=True)
        if isinstance(input_logprobs, str):
            results.append(RequestResult(error=input_logprobs))
        elif NOT_READY in errors:
            results.append(RequestResult(input_logprobs=input_logprobs))
        elif any(errors):
            results.append(RequestResult(error=next(filter(None, errors))))
        elif spec is None:
            results.append(RequestResult(input_logprobs=input_logprobs))
        else:
            results.append(verified(spec, tokens, logprobs, input_logprobs))
    return results
