"""Comparison of colocated and disaggregated output, and its report for people and for programs. Pure.

1. Two answers to one prompt are compared token by token up to the position where they diverge.
2. The logprobs of this common prefix are compared. Both sides have the same tokens before the divergence, so each
   side's likeliest token there is looked up in the other side's ranking. This finds a KV transfer that corrupts even
   the first token, also in a dtype where near ties may resolve either way.
3. float32: every token must be equal. bfloat16, float16: the logprobs must agree, and different tokens are only listed.
   In every dtype, an answer that is a proper prefix of the other is wrong.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from splitserve.core.errors import SplitserveError
from splitserve.tools.options import VerifyOptions

# dtype -> largest allowed difference of logprobs (natural logarithms).
MAX_LOGPROB_DELTA = {"float32": 0.001, "bfloat16": 0.05, "float16": 0.05}
# Dtypes in which every token must be equal.
EXACT_DTYPES = frozenset({"float32"})
# Maximum number of mismatches listed below the table.
_MAX_LISTED = 10


class VerifyError(SplitserveError):
    """The comparison failed: a worker answered with an error or in an unexpected form."""

    reason = "verify_failed"


@dataclass(frozen=True, slots=True)
class VerifiedAnswer:
    """Answer of one side to one prompt."""

    output_ids: tuple[int, ...]
    # Logprob of each token in output_ids.
    logprobs: tuple[float, ...]
    # For each position, token id -> logprob of the likeliest tokens.
    tops: tuple[dict[int, float], ...]
    num_prompt_tokens: int
    # Prompt tokens found in a prefix cache.
    num_cached_tokens: int

    @classmethod
    def of(cls, body: dict[str, Any]) -> VerifiedAnswer:
        """Parse the body of /generate with return_logprob and top_logprobs_num. Raises VerifyError."""
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
    # Cache state and concurrency of the request, e.g. "cold, 8 at a time".
    setting: str
    colocated: VerifiedAnswer
    disaggregated: VerifiedAnswer

    @property
    def position(self) -> int | None:
        """Return the first output position with different tokens, or with a token on one side only.

        None: all are equal.
        """
        ours, theirs = self.colocated.output_ids, self.disaggregated.output_ids
        shorter = min(len(ours), len(theirs))
        parted = (i for i in range(shorter) if ours[i] != theirs[i])
        return next(parted, None if len(ours) == len(theirs) else shorter)

    @property
    def num_equal(self) -> int:
        """Return the number of equal tokens before that position."""
        return len(self.colocated.output_ids) if self.position is None else self.position

    @property
    def is_cut_short(self) -> bool:
        """Return whether one answer is a proper prefix of the other.

        The end is a token too, so no near tie explains it.
        """
        return self.position == min(len(self.colocated.output_ids), len(self.disaggregated.output_ids))

    @property
    def max_logprob_delta(self) -> float:
        """Return the largest difference over the common prefix and at the position where the answers diverge."""
        ours, theirs, parted = self.colocated, self.disaggregated, self.position
        count = len(ours.output_ids) if parted is None else parted
        deltas = [abs(ours.logprobs[i] - theirs.logprobs[i]) for i in range(count)]
        if parted is not None and not self.is_cut_short:
            deltas += [_likeliest_delta(ours.tops[parted], theirs.tops[parted])]
            deltas += [_likeliest_delta(theirs.tops[parted], ours.tops[parted])]
        # max() ignores a NaN that is not its first argument.
        return math.inf if any(map(math.isnan, deltas)) else max(deltas, default=0.0)


def _likeliest_delta(top: dict[int, float], other: dict[int, float]) -> float:
    """Return the logprob difference of one ranking's likeliest token in the other ranking.

    If the other ranking lacks the token, the difference to its last entry is a lower bound.
    """
    token = max(top, key=lambda t: top[t])
    return abs(top[token] - other.get(token, min(other.values())))


@dataclass(frozen=True, slots=True)
class VerifyReport:
    options: VerifyOptions
    # As the colocated worker reports it.
    dtype: str
    comparisons: Sequence[Comparison]

    @property
    def share_of_equal_tokens(self) -> float:
        """Return the share of all colocated output tokens that precede the divergence of their answers."""
        total = sum(len(c.colocated.output_ids) for c in self.comparisons)
        return sum(c.num_equal for c in self.comparisons) / max(1, total)

    @property
    def mean_logprob_delta(self) -> float:
        """Return the mean difference of logprobs over the equal tokens."""
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
        """Return the comparisons with a divergence."""
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


def report_object(report: VerifyReport) -> dict[str, Any]:
    """Return the JSON form. A token id is null after the end of an answer; a delta is null if it is not finite."""
    delta = report.max_logprob_delta
    return {
        "equal": report.equal,
        "prompts": report.num_prompts,
        "mismatches": [_mismatch_object(c) for c in report.mismatches],
        "max_logprob_delta": delta if math.isfinite(delta) else None,
        "model": report.options.model,
        "dtype": report.dtype,
        "transfer_backend": report.options.transfer_backend,
        "quantization": report.options.quantization,
        "pair": report.options.pair or None,
        "share_of_equal_tokens": report.share_of_equal_tokens,
        "mean_logprob_delta": mean if math.isfinite(mean := report.mean_logprob_delta) else None,
    }


def _mismatch_object(comparison: Comparison) -> dict[str, Any]:
    position = comparison.position
    assert position is not None
    return {
        "prompt": comparison.prompt,
        "pass": comparison.pass_name,
        "setting": comparison.setting,
        "position": position,
        "colocated": _token_at(comparison.colocated, position),
        "disaggregated": _token_at(comparison.disaggregated, position),
    }


def _token_at(answer: VerifiedAnswer, position: int) -> int | None:
    return answer.output_ids[position] if position < len(answer.output_ids) else None


def render(report: VerifyReport) -> RenderableType:
    """Return one row per prompt over all its rounds, the mismatches, and the verdict."""
    table = Table(
        "prompt", "tokens in", "tokens out", "equal", "max logprob delta", "cached, colocated", "cached, apart"
    )
    for prompt in sorted({c.prompt for c in report.comparisons}):
        table.add_row(*_row([c for c in report.comparisons if c.prompt == prompt]))
    lines = [Text(_describe(c)) for c in report.mismatches[:_MAX_LISTED]]
    hidden = len(report.mismatches) - len(lines)
    if hidden > 0:
        lines.append(Text(f"... and {hidden} more mismatches (--json lists all)"))
    return Group(table, *lines, _verdict(report))


def _row(rounds: list[Comparison]) -> tuple[str, ...]:
    num_equal = sum(c.position is None for c in rounds)
    lengths = sorted({len(c.colocated.output_ids) for c in rounds})
    return (
        str(rounds[0].prompt),
        f"{rounds[0].colocated.num_prompt_tokens:,}",
        "-".join(str(n) for n in dict.fromkeys((lengths[0], lengths[-1]))),
        "yes" if num_equal == len(rounds) else f"{num_equal} of {len(rounds)}",
        f"{max(c.max_logprob_delta for c in rounds):.1e}",
        str(max(c.colocated.num_cached_tokens for c in rounds)),
        str(max(c.disaggregated.num_cached_tokens for c in rounds)),
    )


def _describe(comparison: Comparison) -> str:
    found = _mismatch_object(comparison)
    return (
        f"prompt {found['prompt']} ({found['pass']}, {found['setting']}): at output position {found['position']} "
        f"colocated has {_name(found['colocated'])}, disaggregated {_name(found['disaggregated'])}"
    )


def _name(token: int | None) -> str:
    return "ended" if token is None else f"token {token}"


def _verdict(report: VerifyReport) -> Text:
    total, mismatches = len(report.comparisons), len(report.mismatches)
    if report.options.quantization is not None:
        return _accuracy(report)
    rule = (
        f"every token equal and logprobs within {report.tolerance:g}"
        if report.dtype in EXACT_DTYPES
        else f"logprobs within {report.tolerance:g} (near ties may fall either way in {report.dtype})"
    )
    way = (
        f"{report.options.transfer_backend}, {report.options.pair}"
        if report.options.pair
        else report.options.transfer_backend
    )
    return Text(
        f"{'EQUAL' if report.equal else 'NOT EQUAL'}: {report.options.model} in {report.dtype} over {way}, "
        f"{report.num_prompts} prompts, {total - mismatches} of {total} answers equal token for token, max logprob "
        f"delta {report.max_logprob_delta:.1e}; the rule: {rule}",
        style="bold green" if report.equal else "bold red",
    )


def _accuracy(report: VerifyReport) -> Text:
    total, options = len(report.comparisons), report.options
    return Text(
        f"ACCURACY of {options.quantization}: {options.model} in {report.dtype}, the pair's weights quantized, "
        f"the colocated worker's not: {total - len(report.mismatches)} of {total} answers equal token for token, "
        f"{report.share_of_equal_tokens:.1%} of tokens before answers part, logprob delta of these "
        f"{report.mean_logprob_delta:.1e} on average, at most {report.max_logprob_delta:.1e}",
        style="bold",
    )
