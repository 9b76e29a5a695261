"""Report of `splitserve verify` for people and for programs. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from splitserve.tools.options import VerifyOptions
from splitserve.tools.verify_compare import MAX_LOGPROB_DELTA, SIDES, Comparison, Numerics, finite

# Maximum number of differences listed below the table, per transport.
_MAX_LISTED = 10


@dataclass(frozen=True)
class TransportReport:
    """All comparisons over one transport."""

    transport: str
    numerics: Numerics
    comparisons: Sequence[Comparison]

    def of(self, side: str) -> list[Comparison]:
        return [c for c in self.comparisons if c.side == side]

    def num_equal(self, side: str) -> int:
        """Return the number of answers that have all tokens of their reference."""
        return sum(c.position is None for c in self.of(side))

    @cached_property
    def differences(self) -> list[Comparison]:
        """Return the comparisons with different tokens, or with logprobs that differ too much."""
        return [c for c in self.comparisons if c.position is not None or not c.is_equal(self.numerics)]

    @property
    def max_logprob_delta(self) -> float:
        return max((c.max_logprob_delta for c in self.comparisons), default=0.0)

    @property
    def equal(self) -> bool:
        return bool(self.comparisons) and all(c.is_equal(self.numerics) for c in self.comparisons)

    @property
    def share_of_equal_tokens(self) -> float:
        """Return the share of the pair's reference tokens that precede the divergence of their answers."""
        pairs = self.of("disaggregated")
        return sum(len(c.equal_deltas) for c in pairs) / max(1, sum(len(c.reference.output_ids) for c in pairs))

    @property
    def mean_logprob_delta(self) -> float:
        """Return the mean difference of the pair's logprobs over the equal tokens."""
        deltas = [delta for c in self.of("disaggregated") for delta in c.equal_deltas]
        return sum(deltas) / max(1, len(deltas))


@dataclass(frozen=True)
class VerifyReport:
    options: VerifyOptions
    transports: Sequence[TransportReport]

    @property
    def equal(self) -> bool:
        return bool(self.transports) and all(t.equal for t in self.transports)


def report_object(report: VerifyReport) -> dict[str, Any]:
    """Return the JSON form. A delta is null if it is not finite."""
    transports = report.transports
    return {
        "equal": report.equal,
        "prompts": len({c.prompt for t in transports for c in t.comparisons}),
        "mismatches": [{"transfer_backend": t.transport, **c.mismatch()} for t in transports for c in t.differences],
        "max_logprob_delta": finite(max((t.max_logprob_delta for t in transports), default=0.0)),
        "model": report.options.model,
        "dtype": transports[0].numerics.dtype if transports else None,
        "quantization": report.options.quantization,
        "pair": report.options.pair or None,
        "transports": [_transport_object(t) for t in transports],
    }


def _transport_object(transport: TransportReport) -> dict[str, Any]:
    return {
        "transfer_backend": transport.transport,
        "equal": transport.equal,
        "rule": transport.numerics.rule,
        "answers": {side: len(transport.of(side)) for side in SIDES},
        "equal_answers": {side: transport.num_equal(side) for side in SIDES},
        "max_logprob_delta": finite(transport.max_logprob_delta),
        "share_of_equal_tokens": transport.share_of_equal_tokens,
        "mean_logprob_delta": finite(transport.mean_logprob_delta),
    }


def render(report: VerifyReport) -> RenderableType:
    """Return one row per prompt over all rounds and transports, the differences, and a verdict per transport."""
    table = Table(
        "prompt", "tokens in", "tokens out", "equal", "max logprob delta", "cached, colocated", "cached, apart"
    )
    comparisons = [c for t in report.transports for c in t.comparisons]
    for prompt in sorted({c.prompt for c in comparisons}):
        table.add_row(*_row([c for c in comparisons if c.prompt == prompt]))
    lines = [Text(_describe(t, c)) for t in report.transports for c in t.differences[:_MAX_LISTED]]
    hidden = sum(len(t.differences) for t in report.transports) - len(lines)
    if hidden > 0:
        lines.append(Text(f"... and {hidden} more mismatches (--json lists all)"))
    verdict = _verdict if report.options.quantization is None else _accuracy
    return Group(table, *lines, *(verdict(report.options, t) for t in report.transports))


def _row(rounds: list[Comparison]) -> tuple[str, ...]:
    num_equal = sum(c.position is None for c in rounds)
    lengths = sorted({len(c.reference.output_ids) for c in rounds})
    return (
        str(rounds[0].prompt),
        f"{rounds[0].reference.meta_info.prompt_tokens:,}",
        "-".join(str(n) for n in dict.fromkeys((lengths[0], lengths[-1]))),
        "yes" if num_equal == len(rounds) else f"{num_equal} of {len(rounds)}",
        f"{max(c.max_logprob_delta for c in rounds):.1e}",
        *(str(max((c.answer.meta_info.cached_tokens for c in rounds if c.side == side), default=0)) for side in SIDES),
    )


def _describe(transport: TransportReport, comparison: Comparison) -> str:
    found = comparison.mismatch()
    parts = []
    if comparison.position is not None:
        token, expected = ("ended" if found[key] is None else f"token {found[key]}" for key in ("found", "expected"))
        parts.append(f"at output position {comparison.position} {token}, expected {expected}")
    if comparison.logprob_position is not None:
        parts.append(f"logprobs differ from output position {comparison.logprob_position}")
    setting = f"{comparison.side} over {transport.transport}, {comparison.pass_name}, {comparison.setting}"
    largest = f"max logprob delta {comparison.max_logprob_delta:.1e}"
    return f"prompt {comparison.prompt} ({setting}): {'; '.join((*parts, largest))}"


def _verdict(options: VerifyOptions, transport: TransportReport) -> Text:
    numerics = transport.numerics
    over = ", ".join(filter(None, (transport.transport, options.pair)))
    colocated, pair = (f"{transport.num_equal(side)} of {len(transport.of(side))}" for side in SIDES)
    rounding = MAX_LOGPROB_DELTA[numerics.dtype]
    is_rounding = not transport.equal and transport.max_logprob_delta <= rounding
    hint = f". All logprobs agree within {rounding:g}: rounding differs, the KV arrived" if is_rounding else ""
    return Text(
        f"{'EQUAL' if transport.equal else 'NOT EQUAL'}: {options.model} in {numerics.dtype} over {over}, {pair} "
        f"answers of the pair and {colocated} later ones of the colocated worker equal token for token, max logprob "
        f"delta {transport.max_logprob_delta:.1e}; the rule: {numerics.rule}{hint}",
        style="bold green" if transport.equal else "bold red",
    )


def _accuracy(options: VerifyOptions, transport: TransportReport) -> Text:
    pairs = transport.of("disaggregated")
    largest = max((c.max_logprob_delta for c in pairs), default=0.0)
    return Text(
        f"ACCURACY of {options.quantization}: {options.model} in {transport.numerics.dtype}, the pair's weights "
        f"quantized, the colocated worker's not: {transport.num_equal('disaggregated')} of {len(pairs)} answers equal "
        f"token for token, {transport.share_of_equal_tokens:.1%} of tokens before answers part, logprob delta of these "
        f"{transport.mean_logprob_delta:.1e} on average, at most {largest:.1e}",
        style="bold",
    )
