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
from functools import cached_property
from typing import Any

import msgspec
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


@dataclass(frozen=True)
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

    @cached_property
    def position(self) -> int | None:
        """Return the first output position with different tokens, or with a token on one side only. None: all equal."""
        longest = max(len(self.colocated.output_ids), len(self.disaggregated.output_ids))
        return next((i for i in range(longest) if self.colocated.token_at(i) != self.disaggregated.token_at(i)), None)

    @property
    def is_cut_short(self) -> bool:
        """Return whether one answer is a proper prefix of the other. The end is a token, so that is no near tie."""
        return self.position == min(len(self.colocated.output_ids), len(self.disaggregated.output_ids))

    @cached_property
    def equal_deltas(self) -> list[float]:
        """Return the differences of logprobs over the equal tokens before `position`."""
        pairs = zip(
            self.colocated.meta_info.output_token_logprobs,
            self.disaggregated.meta_info.output_token_logprobs,
            strict=False,
        )
        return [abs(ours - theirs) for (ours, _, _), (theirs, _, _) in pairs][: self.position]

    @cached_property
    def max_logprob_delta(self) -> float:
        """Return the largest difference over the common prefix and at the position where the answers diverge."""
        deltas = list(self.equal_deltas)
        if self.position is not None and not self.is_cut_short:
            ours, theirs = self.colocated.top(self.position), self.disaggregated.top(self.position)
            deltas += [_likeliest_delta(ours, theirs), _likeliest_delta(theirs, ours)]
        # max() ignores a NaN that is not its first argument.
        return math.inf if any(map(math.isnan, deltas)) else max(deltas, default=0.0)

    def mismatch(self) -> dict[str, Any]:
        """Return the JSON form of a divergence. A token id is null after the end of an answer."""
        assert self.position is not None
        return {
            "prompt": self.prompt,
            "pass": self.pass_name,
            "setting": self.setting,
            "position": self.position,
            "colocated": self.colocated.token_at(self.position),
            "disaggregated": self.disaggregated.token_at(self.position),
        }


def _likeliest_delta(top: dict[int, float], other: dict[int, float]) -> float:
    """Return the logprob difference of one ranking's likeliest token in the other ranking.

    If the other ranking lacks the token, the difference to its last entry is a lower bound.
    """
    token = max(top, key=lambda t: top[t])
    return abs(top[token] - other.get(token, min(other.values())))


@dataclass(frozen=True)
class VerifyReport:
    options: VerifyOptions
    # As the colocated worker reports it.
    dtype: str
    comparisons: Sequence[Comparison]

    @property
    def share_of_equal_tokens(self) -> float:
        """Return the share of all colocated output tokens that precede the divergence of their answers."""
        total = sum(len(c.colocated.output_ids) for c in self.comparisons)
        return sum(len(c.equal_deltas) for c in self.comparisons) / max(1, total)

    @property
    def mean_logprob_delta(self) -> float:
        """Return the mean difference of logprobs over the equal tokens."""
        deltas = [delta for c in self.comparisons for delta in c.equal_deltas]
        return sum(deltas) / max(1, len(deltas))

    @cached_property
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
    def equal(self) -> bool:
        if not self.comparisons or self.max_logprob_delta > MAX_LOGPROB_DELTA[self.dtype]:
            return False
        if any(c.is_cut_short for c in self.comparisons):
            return False
        return self.dtype not in EXACT_DTYPES or not self.mismatches


def report_object(report: VerifyReport) -> dict[str, Any]:
    """Return the JSON form. A delta is null if it is not finite."""
    largest, mean = report.max_logprob_delta, report.mean_logprob_delta
    return {
        "equal": report.equal,
        "prompts": report.num_prompts,
        "mismatches": [c.mismatch() for c in report.mismatches],
        "max_logprob_delta": largest if math.isfinite(largest) else None,
        "model": report.options.model,
        "dtype": report.dtype,
        "transfer_backend": report.options.transfer_backend,
        "quantization": report.options.quantization,
        "pair": report.options.pair or None,
        "share_of_equal_tokens": report.share_of_equal_tokens,
        "mean_logprob_delta": mean if math.isfinite(mean) else None,
    }


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
    return Group(table, *lines, _verdict(report) if report.options.quantization is None else _accuracy(report))


def _row(rounds: list[Comparison]) -> tuple[str, ...]:
    num_equal = sum(c.position is None for c in rounds)
    lengths = sorted({len(c.colocated.output_ids) for c in rounds})
    return (
        str(rounds[0].prompt),
        f"{rounds[0].colocated.meta_info.prompt_tokens:,}",
        "-".join(str(n) for n in dict.fromkeys((lengths[0], lengths[-1]))),
        "yes" if num_equal == len(rounds) else f"{num_equal} of {len(rounds)}",
        f"{max(c.max_logprob_delta for c in rounds):.1e}",
        str(max(c.colocated.meta_info.cached_tokens for c in rounds)),
        str(max(c.disaggregated.meta_info.cached_tokens for c in rounds)),
    )


def _describe(comparison: Comparison) -> str:
    found = comparison.mismatch()
    ours, theirs = (
        "ended" if found[side] is None else f"token {found[side]}" for side in ("colocated", "disaggregated")
    )
    return (
        f"prompt {found['prompt']} ({found['pass']}, {found['setting']}): at output position {found['position']} "
        f"colocated has {ours}, disaggregated {theirs}"
    )


def _verdict(report: VerifyReport) -> Text:
    options, total, tolerance = report.options, len(report.comparisons), MAX_LOGPROB_DELTA[report.dtype]
    rule = (
        f"every token equal and logprobs within {tolerance:g}"
        if report.dtype in EXACT_DTYPES
        else f"logprobs within {tolerance:g} (near ties may fall either way in {report.dtype})"
    )
    return Text(
        f"{'EQUAL' if report.equal else 'NOT EQUAL'}: {options.model} in {report.dtype} over "
        f"{', '.join(filter(None, (options.transfer_backend, options.pair)))}, {report.num_prompts} prompts, "
        f"{total - len(report.mismatches)} of {total} answers equal token for token, max logprob delta "
        f"{report.max_logprob_delta:.1e}; the rule: {rule}",
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
