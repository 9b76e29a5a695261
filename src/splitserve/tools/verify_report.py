"""Output of `splitserve verify`: a table with a verdict for people, one JSON object for programs."""

from __future__ import annotations

import math
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from splitserve.tools.verify_compare import EXACT_DTYPES, Comparison, VerifiedAnswer, VerifyReport

# Maximum number of mismatches listed below the table.
_MAX_LISTED = 10


def report_object(report: VerifyReport) -> dict[str, Any]:
    """Return the JSON form. A token id is null after the end of an answer; a delta is null if it is not finite."""
    delta = report.max_logprob_delta
    return {
        "equal": report.equal,
        "prompts": report.num_prompts,
        "mismatches": [_mismatch_object(c) for c in report.mismatches],
        "max_logprob_delta": delta if math.isfinite(delta) else None,
        "model": report.model,
        "dtype": report.dtype,
        "transfer_backend": report.transfer_backend,
        "quantization": report.quantization,
        "pair": report.pair or None,
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
    if report.quantization is not None:
        return _accuracy(report)
    rule = (
        f"every token equal and logprobs within {report.tolerance:g}"
        if report.dtype in EXACT_DTYPES
        else f"logprobs within {report.tolerance:g} (near ties may fall either way in {report.dtype})"
    )
    way = f"{report.transfer_backend}, {report.pair}" if report.pair else report.transfer_backend
    return Text(
        f"{'EQUAL' if report.equal else 'NOT EQUAL'}: {report.model} in {report.dtype} over {way}, "
        f"{report.num_prompts} prompts, {total - mismatches} of {total} answers equal token for token, max logprob "
        f"delta {report.max_logprob_delta:.1e}; the rule: {rule}",
        style="bold green" if report.equal else "bold red",
    )


def _accuracy(report: VerifyReport) -> Text:
    total = len(report.comparisons)
    return Text(
        f"ACCURACY of {report.quantization}: {report.model} in {report.dtype}, the pair's weights quantized, the "
        f"colocated worker's not: {total - len(report.mismatches)} of {total} answers equal token for token, "
        f"{report.share_of_equal_tokens:.1%} of tokens before answers part, logprob delta of these "
        f"{report.mean_logprob_delta:.1e} on average, at most {report.max_logprob_delta:.1e}",
        style="bold",
    )
