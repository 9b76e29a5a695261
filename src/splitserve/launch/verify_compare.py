"""When colocated and disaggregated output count as equal. Pure: answers in, a report out.

1. Two answers to one prompt are compared token by token up to where they part.
2. Over this common prefix the logprobs of the tokens are compared. Where the answers part, both still had the same
   tokens before them, so there each side's likeliest token is looked up in the other's ranking: a hand-over that
   corrupts the first token already is found even in a dtype in which near ties may fall either way.
3. float32: every token must be equal. bfloat16, float16: the logprobs must agree, and tokens that differ are only
   listed. An answer that stops short of the other, with the same tokens so far, is wrong in every dtype.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from splitserve.errors import SplitserveError

# dtype -> how far logprobs may differ (natural logarithms).
MAX_LOGPROB_DELTA = {"float32": 0.001, "bfloat16": 0.05, "float16": 0.05}
# Those in which every token must be equal.
EXACT_DTYPES = frozenset({"float32"})


class VerifyError(SplitserveError):
    """The comparison could not be made: a worker answered with an error, or not as it should."""

    reason = "verify_failed"


@dataclass(frozen=True, slots=True)
class Answer:
    """What one side gave for one prompt."""

    output_ids: tuple[int, ...]
    # Of output_ids[i].
    logprobs: tuple[float, ...]
    # Token id -> logprob of the likeliest tokens at position i.
    tops: tuple[dict[int, float], ...]
    num_prompt_tokens: int
    # Of the prompt, found in a prefix cache.
    num_cached_tokens: int

    @classmethod
    def of(cls, body: dict[str, Any]) -> Answer:
        """From the body of /generate with return_logprob and top_logprobs_num. Raises VerifyError."""
        try:
            meta, ids = body["meta_info"], tuple(body["output_ids"])
            scored = meta["output_token_logprobs"]
            tops = tuple({token: float(logprob) for logprob, token, _ in top} for top in meta["output_top_logprobs"])
            answer = cls(
                output_ids=ids,
                logprobs=tuple(float(logprob) for logprob, _, _ in scored),
                tops=tops,
                num_prompt_tokens=meta["prompt_tokens"],
                num_cached_tokens=meta["cached_tokens"],
            )
        except (KeyError, TypeError, ValueError) as error:
            raise VerifyError(f"the answer is not in /generate's form with logprobs: {error!r}") from error
        if not ids or [token for _, token, _ in scored] != list(ids) or len(tops) != len(ids) or not all(tops):
            raise VerifyError(f"the answer does not have logprobs for each of its {len(ids)} tokens")
        return answer


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two answers to one prompt in one round."""

    # Index of the prompt, from 0.
    prompt: int
    # "greedy" or "seeded".
    pass_name: str
    # Of the cache and the company in which it was asked, e.g. "cold, 8 at a time".
    setting: str
    colocated: Answer
    disaggregated: Answer

    @property
    def position(self) -> int | None:
        """First output position where the tokens differ, or where only one side has one. None: all are equal."""
        ours, theirs = self.colocated.output_ids, self.disaggregated.output_ids
        shorter = min(len(ours), len(theirs))
        parted = (i for i in range(shorter) if ours[i] != theirs[i])
        return next(parted, None if len(ours) == len(theirs) else shorter)

    @property
    def num_equal(self) -> int:
        """Tokens up to there."""
        return len(self.colocated.output_ids) if self.position is None else self.position

    @property
    def is_cut_short(self) -> bool:
        """Whether one answer is only the beginning of the other: an end is a token too, so no near tie explains it."""
        return self.position == min(len(self.colocated.output_ids), len(self.disaggregated.output_ids))

    @property
    def max_logprob_delta(self) -> float:
        """Largest difference over the common prefix and at the position where the answers part."""
        ours, theirs, parted = self.colocated, self.disaggregated, self.position
        count = len(ours.output_ids) if parted is None else parted
        deltas = [abs(ours.logprobs[i] - theirs.logprobs[i]) for i in range(count)]
        if parted is not None and not self.is_cut_short:
            deltas += [_likeliest_delta(ours.tops[parted], theirs.tops[parted])]
            deltas += [_likeliest_delta(theirs.tops[parted], ours.tops[parted])]
        # max() would pass over a NaN that is not its first argument.
        return math.inf if any(map(math.isnan, deltas)) else max(deltas, default=0.0)


def _likeliest_delta(top: dict[int, float], other: dict[int, float]) -> float:
    """How much the likeliest token of one ranking differs in the other, where at the least it is below its last."""
    token = max(top, key=lambda t: top[t])
    return abs(top[token] - other.get(token, min(other.values())))


@dataclass(frozen=True, slots=True)
class VerifyReport:
    model: str
    dtype: str
    transfer_backend: str
    comparisons: Sequence[Comparison]
    # Of the disaggregated side's weights alone; None: both sides have the same.
    quantization: str | None = None
    # How the pair is cut over ranks; "": each of the two has one.
    pair: str = ""

    @property
    def share_of_equal_tokens(self) -> float:
        """Of all tokens of the colocated answers, those before the place where the two answers part."""
        total = sum(len(c.colocated.output_ids) for c in self.comparisons)
        return sum(c.num_equal for c in self.comparisons) / max(1, total)

    @property
    def mean_logprob_delta(self) -> float:
        """Over the tokens that are equal."""
        deltas = [
            abs(ours - theirs)
            for c in self.comparisons
            for ours, theirs in zip(
                c.colocated.logprobs[: c.num_equal], c.disaggregated.logprobs[: c.num_equal], strict=True
            )
        ]
        return sum(deltas) / max(1, len(deltas))

    @property
    def mismatches(self) -> list[Comparison]:
        """Answers that part somewhere."""
        return [c for c in self.comparisons if c.position is not None]

    @property
    def num_prompts(self) -> int:
        return len({c.prompt for c in self.comparisons})

    @property
    def max_logprob_delta(self) -> float:
        return max((c.max_logprob_delta for c in self.comparisons), default=0.0)

    @property
    def tolerance(self) -> float:
        return MAX_LOGPROB_DELTA[self.dtype]

    @property
    def equal(self) -> bool:
        if not self.comparisons or self.max_logprob_delta > self.tolerance:
            return False
        if any(c.is_cut_short for c in self.comparisons):
            return False
        return self.dtype not in EXACT_DTYPES or not self.mismatches
