"""What a router says of a request that it may have to dispatch more than once, in the body's field `dispatch`.

1. Every try of a request has a number. Its samples have rids of their own, so that a try may follow another on the same
   worker before that has heard of the first one's end. The client sees none of this.
2. A router that could go on with the stream elsewhere asks for a journal: after the events of every delta comes a line
   (an SSE comment) with what they told the client, tokens above all. Events count from their line on; the router
   forwards whole deltas and keeps the lines.
3. Where the stream breaks, the next try brings the lines as `told`. Here they become the samples' past: `output_ids` of
   the requests, and outputs that the answers have taken in already. So stop strings, penalties, grammars, usage and
   logprobs go on as if nothing had happened, and only what is new is sent. Samples whose end is told are not run.

Pure: no HTTP, no tokenizer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import msgspec

from splitserve.core.batch import TokenLogprob
from splitserve.core.request import FinishReason
from splitserve.errors import InvalidRequestError
from splitserve.messages import TokenOutput
from splitserve.server.answer import Answer, Delta
from splitserve.server.fanout import FanOut, Sample

# The header of a request that says for which role it is meant.
ROLE_HEADER = "x-splitserve-role"
# The header of a stream that has a journal.
JOURNAL_HEADER = "x-splitserve-journal"


class Told(msgspec.Struct, frozen=True, omit_defaults=True):
    """One line of the journal: what the events before it told the client of one sample."""

    # The sample's number over the whole request.
    index: int
    token_ids: list[int] = []
    # Of these tokens, where asked for.
    logprobs: list[TokenLogprob] = []
    num_cached_tokens: int = 0
    finish: FinishReason | None = None


class Dispatch(msgspec.Struct, frozen=True):
    """One try of a request."""

    # Counts the tries, from 0.
    attempt: int = 0
    # When the client's request came to the router, in seconds since 1970, and how long before this try that was.
    created: int | None = None
    elapsed: float = 0.0
    # Write a journal, where the answer is streamed.
    journal: bool = False
    # The lines of earlier tries, in order.
    told: list[Told] = []


def journal_line(answer: Answer, delta: Delta) -> bytes:
    told = Told(answer.sample.index, delta.token_ids, delta.logprobs, answer.num_cached_tokens, answer.finish)
    return b": " + msgspec.json.encode(told) + b"\n\n"


def with_dispatch(fanout: FanOut, dispatch: Dispatch | None, vocab_size: int) -> FanOut:
    """The samples with their past. Raises InvalidRequestError where that cannot be theirs."""
    if dispatch is None:
        return fanout
    lines: dict[int, list[Told]] = {}
    for told in dispatch.told:
        if not 0 <= told.index < len(fanout.samples):
            raise _refusal(f"there is no sample {told.index}")
        lines.setdefault(told.index, []).append(told)
    samples = tuple(_with_past(s, dispatch.attempt, lines.get(s.index, ()), vocab_size) for s in fanout.samples)
    new_rid = {old.request.rid: new.request.rid for old, new in zip(fanout.samples, samples, strict=True)}
    names = {name: tuple(new_rid[rid] for rid in rids) for name, rids in fanout.names.items()}
    return dataclasses.replace(
        fanout,
        samples=samples,
        names=names,
        has_journal=dispatch.journal,
        elapsed=dispatch.elapsed,
        is_again=dispatch.attempt > 0,
    )


def _with_past(sample: Sample, attempt: int, lines: Sequence[Told], vocab_size: int) -> Sample:
    request = sample.request
    rid = f"{request.rid}~{attempt}" if attempt else request.rid
    output_ids = [token_id for told in lines for token_id in told.token_ids]
    logprobs = [logprob for told in lines for logprob in told.logprobs]
    request = msgspec.structs.replace(request, rid=rid, output_ids=output_ids)
    if not lines:
        return dataclasses.replace(sample, request=request)
    finish = lines[-1].finish
    if not all(0 <= token_id < vocab_size for token_id in output_ids):
        raise _refusal(f"the token ids of sample {sample.index} must be in [0, {vocab_size})")
    if finish is None and len(output_ids) >= request.params.max_new_tokens:
        raise _refusal(f"sample {sample.index} has {len(output_ids)} tokens, which is all that it may have, and no end")
    if len(logprobs) != (len(output_ids) if request.return_logprob else 0):
        raise _refusal(f"sample {sample.index} has {len(logprobs)} logprobs of {len(output_ids)} tokens")
    past = TokenOutput(
        rid=rid,
        token_ids=output_ids,
        logprobs=logprobs,
        num_cached_tokens=lines[0].num_cached_tokens,
        finish=finish,
    )
    return dataclasses.replace(sample, request=request, past=past)


def _refusal(problem: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"dispatch.told does not belong to this request: {problem}; send back the journal's lines as they came",
        param="dispatch",
    )
