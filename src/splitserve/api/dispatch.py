"""Dispatch information of a request that a router may send more than once, in the body's field `dispatch`.

1. Every attempt of a request has a number, and its samples have rids of their own. So an attempt may reach a worker
   that has not yet processed the end of the previous attempt. The client does not see these rids.
2. A router that could continue the stream elsewhere requests a journal. After the events of every delta follows a line
   (an SSE comment) with their content, mainly tokens. Events count once their line has arrived; the router forwards
   whole deltas and keeps the lines.
3. If the stream breaks, the next attempt sends the lines as `told`. Here they become the samples' past: `output_ids`
   of the requests, and outputs already contained in the answers. So stop strings, penalties, grammars, usage and
   logprobs continue without a gap, and only new output is sent. Samples that had already ended are not run.

Pure: no HTTP, no tokenizer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import msgspec

from splitserve.api.fanout import FanOut, Sample
from splitserve.core.batch import TokenLogprob
from splitserve.core.errors import InvalidRequestError
from splitserve.core.messages import TokenOutput
from splitserve.core.request import FinishReason

# Request header with the worker role that the request is for.
ROLE_HEADER = "x-splitserve-role"
# Response header of a stream that has a journal.
JOURNAL_HEADER = "x-splitserve-journal"


class JournalEntry(msgspec.Struct, frozen=True, omit_defaults=True):
    """One line of the journal: content of the preceding events, for one sample."""

    # Index of the sample over the whole request.
    index: int
    token_ids: list[int] = []
    # Logprobs of these tokens, if requested.
    logprobs: list[TokenLogprob] = []
    num_cached_tokens: int = 0
    finish: FinishReason | None = None


class Dispatch(msgspec.Struct, frozen=True):
    """One attempt of a request."""

    # Number of the attempt, from 0.
    attempt: int = 0
    # Time at which the client's request reached the router, seconds since 1970; seconds from then to this attempt.
    created: int | None = None
    elapsed: float = 0.0
    # Whether to write a journal if the answer is streamed.
    journal: bool = False
    # Lines of earlier attempts, in order.
    told: list[JournalEntry] = []


def with_dispatch(fanout: FanOut, dispatch: Dispatch | None, vocab_size: int) -> FanOut:
    """Return the samples with their past. Raises InvalidRequestError if the past does not fit them."""
    if dispatch is None:
        return fanout
    lines: dict[int, list[JournalEntry]] = {}
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


def _with_past(sample: Sample, attempt: int, lines: Sequence[JournalEntry], vocab_size: int) -> Sample:
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
