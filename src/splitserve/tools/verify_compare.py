"""Comparison of colocated and disaggregated output: answers, what counts as equal, and differences. Pure.

1. The reference of a prompt is the colocated worker's first answer, with a cold prefix cache. Every other answer is
   compared with it token by token, up to the position where they diverge: those of the pair in all rounds, and those of
   the colocated worker in later rounds.
2. The logprobs of this common prefix are compared. Both have the same tokens before the divergence, so each answer's
   likeliest token there is looked up in the other's ranking. This finds a KV transfer that corrupts even the first
   token, and distinguishes it from a near tie.
3. Every token must be equal. If our kernels compute the model, logprobs must be equal bit for bit. Otherwise they may
   differ a little, because the last bits depend on the batch. With --near-ties tokens may differ, too, if the logprobs
   agree. An answer that is a proper prefix of the other is always wrong.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import msgspec

from splitserve.core.errors import SplitserveError

# dtype -> largest difference of logprobs (natural logarithms) by rounding, if a token depends on its batch.
MAX_LOGPROB_DELTA = {"float32": 0.001, "bfloat16": 0.05, "float16": 0.05}
SIDES = ("colocated", "disaggregated")
# Logprob, token id and text of a token.
_Scored = tuple[float, int, Any]


class VerifyError(SplitserveError):
    """The comparison failed: a worker answered with an error or in an unexpected form."""

    reason = "verify_failed"


class AnswerMeta(msgspec.Struct, frozen=True):
    prompt_tokens: int
    # Prompt tokens found in a prefix cache.
    cached_tokens: int
    output_token_logprobs: list[_Scored]
    # The likeliest tokens of each position.
    output_top_logprobs: list[list[_Scored]]


class VerifiedAnswer(msgspec.Struct, frozen=True):
    """Answer of one side to one prompt, as /generate gives it with return_logprob and top_logprobs_num."""

    output_ids: list[int]
    meta_info: AnswerMeta

    @classmethod
    def of(cls, body: dict[str, Any]) -> VerifiedAnswer:
        """Parse the body. Raises VerifyError."""
        try:
            answer = msgspec.convert(body, cls)
        except msgspec.ValidationError as error:
            raise VerifyError(f"the answer is not in /generate's form with logprobs: {error}") from error
        ids, meta = answer.output_ids, answer.meta_info
        tops = meta.output_top_logprobs
        if not ids or [token for _, token, _ in meta.output_token_logprobs] != ids or len(tops) != len(ids):
            raise VerifyError(f"the answer does not have logprobs for each of its {len(ids)} tokens")
        if not all(tops):
            raise VerifyError("the answer does not have the likeliest tokens of each position")
        return answer

    def top(self, position: int) -> dict[int, float]:
        """Return the likeliest tokens at a position, each with its logprob."""
        return {token: logprob for logprob, token, _ in self.meta_info.output_top_logprobs[position]}

    def token_at(self, position: int) -> int | None:
        return self.output_ids[position] if position < len(self.output_ids) else None


@dataclass(frozen=True, slots=True)
class Numerics:
    """Dtype and kernels of all workers, and the tolerances of the comparison that follow from them."""

    dtype: str
    # Whether our kernels compute the model: then a token's logits depend on its own sequence only, bit for bit.
    is_exact: bool
    # Whether different tokens are accepted if their logprobs agree; not in float32.
    near_ties: bool = False

    @classmethod
    def of(cls, infos: Sequence[dict[str, Any]], *, near_ties: bool = False) -> Numerics:
        """Return the numerics of workers with these answers of `/server_info`. Raises VerifyError if dtypes differ."""
        dtypes = sorted({info["dtype"] for info in infos})
        if len(dtypes) > 1:
            raise VerifyError(f"the workers compute in different dtypes ({', '.join(dtypes)}): give one with --dtype")
        return cls(dtypes[0], all(info["batch_invariant"] for info in infos) and not near_ties, near_ties)

    @property
    def max_logprob_delta(self) -> float:
        """Return the largest allowed difference of logprobs."""
        return 0.0 if self.is_exact else MAX_LOGPROB_DELTA[self.dtype]

    @property
    def allows_near_ties(self) -> bool:
        return self.near_ties and self.dtype != "float32"

    @property
    def rule(self) -> str:
        if self.is_exact:
            return "every token and every logprob equal"
        within = f"logprobs within {self.max_logprob_delta:g}"
        return f"{within} (near ties may fall either way)" if self.allows_near_ties else f"every token equal, {within}"


@dataclass(frozen=True)
class Comparison:
    """An answer to one prompt in one round, and the reference."""

    # Index of the prompt, from 0.
    prompt: int
    # "greedy" or "seeded".
    pass_name: str
    # Cache state and concurrency of the request, e.g. "cold, 8 at a time".
    setting: str
    # "colocated" or "disaggregated".
    side: str
    reference: VerifiedAnswer
    answer: VerifiedAnswer

    @cached_property
    def position(self) -> int | None:
        """Return the first output position with different tokens, or with a token in one answer only. None: equal."""
        longest = max(len(self.reference.output_ids), len(self.answer.output_ids))
        return next((i for i in range(longest) if self.reference.token_at(i) != self.answer.token_at(i)), None)

    @property
    def logprob_position(self) -> int | None:
        """Return the first output position with equal tokens and different logprobs. None: there is none."""
        return next((i for i, delta in enumerate(self.equal_deltas) if delta != 0.0), None)

    @property
    def is_cut_short(self) -> bool:
        """Return whether one answer is a proper prefix of the other. The end is a token, so that is no near tie."""
        return self.position == min(len(self.reference.output_ids), len(self.answer.output_ids))

    @cached_property
    def equal_deltas(self) -> list[float]:
        """Return the differences of logprobs over the equal tokens before `position`."""
        expected, found = self.reference.meta_info, self.answer.meta_info
        pairs = zip(expected.output_token_logprobs, found.output_token_logprobs, strict=False)
        return [abs(ours - theirs) for (ours, _, _), (theirs, _, _) in pairs][: self.position]

    @cached_property
    def max_logprob_delta(self) -> float:
        """Return the largest difference over the common prefix and at the position where the answers diverge."""
        deltas = list(self.equal_deltas)
        if self.position is not None and not self.is_cut_short:
            ours, theirs = self.reference.top(self.position), self.answer.top(self.position)
            deltas += [_likeliest_delta(ours, theirs), _likeliest_delta(theirs, ours)]
        # max() ignores a NaN that is not its first argument.
        return math.inf if any(map(math.isnan, deltas)) else max(deltas, default=0.0)

    def is_equal(self, numerics: Numerics) -> bool:
        if self.is_cut_short or self.max_logprob_delta > numerics.max_logprob_delta:
            return False
        return self.position is None or numerics.allows_near_ties

    def mismatch(self) -> dict[str, Any]:
        """Return the JSON form of a difference. A token id is null after the end of an answer, and for equal tokens."""
        position = self.position
        return {
            "prompt": self.prompt,
            "pass": self.pass_name,
            "setting": self.setting,
            "side": self.side,
            "position": position,
            "expected": None if position is None else self.reference.token_at(position),
            "found": None if position is None else self.answer.token_at(position),
            "logprob_position": self.logprob_position,
            "max_logprob_delta": finite(self.max_logprob_delta),
        }


def finite(number: float) -> float | None:
    return number if math.isfinite(number) else None


def _likeliest_delta(top: dict[int, float], other: dict[int, float]) -> float:
    """Return the logprob difference of one ranking's likeliest token in the other ranking.

    If the other ranking lacks the token, the difference to its last entry is a lower bound.
    """
    token = max(top, key=lambda t: top[t])
    return abs(top[token] - other.get(token, min(other.values())))
