"""One client request becomes single-sample GenerateRequests: a batch has several prompts, `n` several samples of each.

Sample s of prompt p has number p x n + s. With one sample the request id is the client's; else numbers are appended.
Sample 0 of a prompt draws with the request's seed, the others with seeds derived from it.
"""

from __future__ import annotations

import dataclasses
import secrets
import uuid
from collections.abc import Sequence
from dataclasses import dataclass

from splitserve.core.request import BootstrapInfo
from splitserve.core.sampling import SamplingParams, sample_seed
from splitserve.messages import GenerateRequest, TokenOutput


@dataclass(frozen=True, slots=True)
class PromptSpec:
    """One prompt, resolved and checked."""

    token_ids: list[int]
    params: SamplingParams
    return_logprob: bool = False
    num_top_logprobs: int = 0
    # First prompt position to score; None: no input logprobs.
    logprob_start: int | None = None


@dataclass(frozen=True, slots=True)
class Sample:
    # Number over the whole request, and its prompt's.
    index: int
    prompt_index: int
    request: GenerateRequest
    # What the client calls it: the request's rid, but for the number of the try.
    id: str
    # What the client has been told of it by other workers; None: nothing.
    past: TokenOutput | None = None

    @property
    def is_over(self) -> bool:
        return self.past is not None and self.past.finish is not None


@dataclass(frozen=True, slots=True)
class FanOut:
    samples: tuple[Sample, ...]
    # What a client may abort by: its request ids, each with the rids of its samples.
    names: dict[str, tuple[str, ...]]
    # The data parallel rank of this worker that all samples go to; None: each to the one that is best for it.
    dp_rank: int | None = None
    # Each delta is followed by a line that says what it told the client; `dispatch.py`.
    has_journal: bool = False
    # Seconds that a router had the request before this try, and whether it is not the first.
    elapsed: float = 0.0
    is_again: bool = False


def fan_out(
    prompts: Sequence[PromptSpec], n: int, rid: str | list[str], bootstraps: Sequence[BootstrapInfo | None]
) -> FanOut:
    """`rid`: one for all, or one a prompt. `bootstraps`: one a sample."""
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
