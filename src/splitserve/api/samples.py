"""Conversion of one client request to single-sample GenerateRequests: one per prompt of a batch and per sample of `n`.

Sample s of prompt p has index p x n + s. With one sample the request id is the client's; otherwise indexes are
appended. Sample 0 of a prompt uses the request's seed, the others use seeds derived from it.

A router may send a request more than once, with the body's field `dispatch`:

1. Every attempt gets a number of the worker, and its samples have rids of their own. So an attempt may reach a worker
   that has not yet processed the end of the previous attempt, or of an earlier request of the same id. The client does
   not see these rids.
2. A router that could continue the stream elsewhere requests a journal. After the events of every delta follows a line
   (an SSE comment) with their content, mainly tokens. Events count once their line has arrived; the router forwards
   whole deltas and keeps the lines.
3. If the stream breaks, the next attempt sends the lines as `told`. Here they become the samples' past: `output_ids`
   of the requests, and outputs already contained in the answers. So stop strings, penalties, grammars, usage and
   logprobs continue without a gap, and only new output is sent. Samples that had already ended are not run. A worker
   with other weights refuses them, so that no answer has tokens of two models.

Pure: no HTTP, no tokenizer.
"""

from __future__ import annotations

import dataclasses
import math
import secrets
import uuid
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from splitserve.api.schemas import Dispatch, GenerationFields, JournalEntry
from splitserve.core.errors import InvalidRequestError, OtherModelError
from splitserve.core.messages import GenerateRequest, TokenOutput
from splitserve.core.request import PROBE_PRIORITY, BootstrapInfo
from splitserve.core.sampling import prompt_seed, sample_seed

# Header with the timeout of a request, for clients that cannot change the body.
TIMEOUT_HEADER = "x-request-timeout"
# Largest absolute value.
_LARGEST_PRIORITY = 1 << 31
# Most tokens of a probe, prompts and outputs.
_MAX_PROBE_TOKENS = 4


@dataclass(frozen=True, slots=True)
class Sample:
    # Index over the whole request, and that of its prompt.
    index: int
    prompt_index: int
    request: GenerateRequest
    # Id for the client: the request's rid, without the number of the attempt.
    id: str
    # Output that other workers have sent to the client. None: none.
    past: TokenOutput | None = None

    @property
    def is_fake(self) -> bool:
        """Return whether a worker of a pair serves it without a peer."""
        return self.request.bootstrap is not None and self.request.bootstrap.is_fake


@dataclass(frozen=True, slots=True)
class Urgency:
    """Priority and timeout of every sample of a request."""

    # Larger ones go first, if the worker uses priorities.
    priority: int = 0
    # Seconds until the answer must be finished. None: the worker's default.
    timeout: float | None = None


@dataclass(frozen=True, slots=True)
class FanOut:
    samples: tuple[Sample, ...]
    # Request ids that a client may abort, each with the rids of its samples.
    names: dict[str, tuple[str, ...]]
    # Attempt of a router.
    dispatch: Dispatch
    # Data parallel rank of this worker for all samples. None: the best one for each sample.
    dp_rank: int | None = None


def fan_out(
    prompts: Sequence[GenerateRequest],
    n: int,
    rid: str | list[str],
    bootstraps: Sequence[BootstrapInfo | None],
    urgency: Urgency | None = None,
    dispatch: Dispatch | None = None,
    vocab_size: int = 0,
    model: str = "",
) -> FanOut:
    """Return the samples.

    `prompts`: requests without the fields of single samples. `rid`: one for all, or one per prompt. `bootstraps`: one
    per sample. `vocab_size`: bound of the tokens in the past. `model`: fingerprint of this worker's. Empty: any.
    Raises InvalidRequestError if the past in `dispatch` does not belong to these samples, or if a probe is too long;
    OtherModelError if the past is another model's.
    """
    dispatch, urgency = dispatch or Dispatch(), urgency or Urgency()
    if dispatch.probe:
        num_tokens = n * sum(len(prompt.prompt_ids) + prompt.params.max_new_tokens for prompt in prompts)
        if num_tokens > _MAX_PROBE_TOKENS:
            raise InvalidRequestError(f"a probe has {num_tokens} tokens, above {_MAX_PROBE_TOKENS}", param="dispatch")
        urgency = dataclasses.replace(urgency, priority=PROBE_PRIORITY)
    past = _past_lines(dispatch, len(prompts) * n)
    if model and any(line.model not in ("", model) for line in dispatch.told):
        raise OtherModelError("its stream began with other weights than this worker's: send it again for a new answer")
    samples = []
    names: dict[str, tuple[str, ...]] = {}
    for p, prompt in enumerate(prompts):
        seed = prompt_seed(prompt.params.seed, p) if dispatch.has_drawn_seed else prompt.params.seed
        for s in range(n):
            index = p * n + s
            if isinstance(rid, str):
                name, number, is_alone = rid, index, len(prompts) * n == 1
            else:
                name, number, is_alone = rid[p], s, n == 1
            sample_id = name if is_alone else f"{name}-{number}"
            sample_rid = f"{sample_id}~{dispatch.attempt}" if dispatch.attempt else sample_id
            names[name] = (*names.get(name, ()), sample_rid)
            request = msgspec.structs.replace(
                prompt,
                rid=sample_rid,
                params=dataclasses.replace(prompt.params, seed=sample_seed(seed, s)),
                bootstrap=bootstraps[index],
                output_ids=[token_id for line in past.get(index, ()) for token_id in line.token_ids],
                priority=urgency.priority,
                timeout=urgency.timeout,
            )
            samples.append(Sample(index, p, request, sample_id, _past_output(request, index, past, vocab_size)))
    return FanOut(tuple(samples), names, dispatch)


def random_rid() -> str:
    return uuid.uuid4().hex


def random_seed() -> int:
    return secrets.randbits(63)


def urgency_of(fields: GenerationFields, timeout_header: str | None) -> Urgency:
    """Return the priority and timeout that the client gave. The field wins. Raises InvalidRequestError."""
    priority = fields.priority or 0
    if abs(priority) > _LARGEST_PRIORITY:
        raise InvalidRequestError(f"priority is {priority}: it must be in [-2^31, 2^31]", param="priority")
    name, value = ("timeout", fields.timeout) if fields.timeout is not None else (TIMEOUT_HEADER, timeout_header)
    if value is None:
        return Urgency(priority)
    try:
        seconds = float(value)
    except ValueError:
        seconds = math.nan
    if not (math.isfinite(seconds) and seconds > 0):
        raise InvalidRequestError(f"{name} is {value!r}: give a number of seconds above 0", param=name)
    return Urgency(priority, seconds)


def _past_lines(dispatch: Dispatch, num_samples: int) -> dict[int, list[JournalEntry]]:
    """Return the lines of earlier attempts by index of their sample."""
    lines: dict[int, list[JournalEntry]] = {}
    for line in dispatch.told:
        if not 0 <= line.index < num_samples:
            raise _refusal(f"there is no sample {line.index}")
        lines.setdefault(line.index, []).append(line)
    return lines


def _past_output(
    request: GenerateRequest, index: int, past: dict[int, list[JournalEntry]], vocab_size: int
) -> TokenOutput | None:
    lines = past.get(index)
    if lines is None:
        return None
    finish, output_ids = lines[-1].finish, request.output_ids
    logprobs = [logprob for line in lines for logprob in line.logprobs]
    if not all(0 <= token_id < vocab_size for token_id in output_ids):
        raise _refusal(f"the token ids of sample {index} must be in [0, {vocab_size})")
    if finish is None and len(output_ids) >= request.params.max_new_tokens:
        raise _refusal(f"sample {index} has {len(output_ids)} tokens, which is all that it may have, and no end")
    if len(logprobs) != (len(output_ids) if request.return_logprob else 0):
        raise _refusal(f"sample {index} has {len(logprobs)} logprobs of {len(output_ids)} tokens")
    return TokenOutput(
        rid=request.rid,
        token_ids=output_ids,
        logprobs=logprobs,
        num_cached_tokens=lines[0].num_cached_tokens,
        finish=finish,
    )


def _refusal(problem: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"dispatch.told does not belong to this request: {problem}; send back the journal's lines as they came",
        param="dispatch",
    )
