"""Conversion of one client request to single-sample GenerateRequests: one per prompt of a batch and per sample of `n`.

Sample s of prompt p has index p x n + s. With one sample the request id is the client's; otherwise indexes are
appended. Sample 0 of a prompt uses the request's seed, the others use seeds derived from it.
"""

from __future__ import annotations

import dataclasses
import secrets
import uuid
from collections.abc import Sequence
from dataclasses import dataclass

from splitserve.core.messages import GenerateRequest, TokenOutput
from splitserve.core.request import BootstrapInfo
from splitserve.core.sampling import ResolvedSampling, sample_seed


@dataclass(frozen=True, slots=True)
class PromptSpec:
    """One prompt, resolved and checked."""

    token_ids: list[int]
    params: ResolvedSampling
    return_logprob: bool = False
    num_top_logprobs: int = 0
    # First prompt position to score. None: no input logprobs.
    logprob_start: int | None = None


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
    def is_over(self) -> bool:
        return self.past is not None and self.past.finish is not None


@dataclass(frozen=True, slots=True)
class FanOut:
    samples: tuple[Sample, ...]
    # Request ids that a client may abort, each with the rids of its samples.
    names: dict[str, tuple[str, ...]]
    # Data parallel rank of this worker for all samples. None: the best one for each sample.
    dp_rank: int | None = None
    # Whether each delta is followed by a journal line, see `dispatch.py`.
    has_journal: bool = False
    # Seconds for which a router had the request before this attempt; whether it is not the first attempt.
    elapsed: float = 0.0
    is_again: bool = False


def fan_out(
    prompts: Sequence[PromptSpec], n: int, rid: str | list[str], bootstraps: Sequence[BootstrapInfo | None]
) -> FanOut:
    """Return the samples. `rid`: one for all, or one per prompt. `bootstraps`: one per sample."""
    samples = []
    names: dict[str, tuple[str, ...]] = {}
    for p, prompt in enumerate(prompts):
        for s in range(n):
            index = p * n + s
            if isinstance(rid, str):
                name, number, is_alone = rid, index, len(prompts) * n == 1
            else:
                name, number, is_alone = rid[p], s, n == 1
            sample_rid = name if is_alone else f"{name}-{number}"
            names[name] = (*names.get(name, ()), sample_rid)
            samples.append(Sample(index, p, _request(prompt, s, sample_rid, bootstraps[index]), sample_rid))
    return FanOut(tuple(samples), names)


def draw_rid() -> str:
    return uuid.uuid4().hex


def draw_seed() -> int:
    return secrets.randbits(63)


def _request(prompt: PromptSpec, number: int, rid: str, bootstrap: BootstrapInfo | None) -> GenerateRequest:
    params = dataclasses.replace(prompt.params, seed=sample_seed(prompt.params.seed, number))
    return GenerateRequest(
        rid=rid,
        prompt_ids=prompt.token_ids,
        params=params,
        bootstrap=bootstrap,
        return_logprob=prompt.return_logprob,
        num_top_logprobs=prompt.num_top_logprobs,
        logprob_start=prompt.logprob_start,
    )
