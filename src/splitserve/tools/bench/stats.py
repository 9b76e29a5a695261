"""Definitions of the figures of benchmarks. All times are in seconds.

TTFT              From sending a request to its first token; in an open loop from the time at which it was due.
ITL               Each gap between two arrivals of tokens at the client.
TPOT              (E2E - TTFT) / (n - 1) of a request with n output tokens.
output tokens/s   All output tokens of a run, over the time from its first request to its last token.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

mean = statistics.fmean
median: Callable[[Sequence[float]], float] = statistics.median
# Tokens closer than this (seconds) count as arrived together; a share above the second value gets a remark.
_TOGETHER, _TOGETHER_SHARE = 1e-4, 0.1
# Figures of a measurement by their JSON keys. Times are in seconds.
Figures = dict[str, float]


@dataclass(slots=True)
class StreamRecord:
    """One request, measured at its client. It may be read while it runs. All records of a run have the same clock."""

    sent_at: float
    # Arrival times of tokens, in order. Several tokens may arrive at once.
    arrived_at: list[float] = field(default_factory=list)
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    # Number of tokens that arrived at arrived_at[i].
    arrived: list[int] = field(default_factory=list)

    @property
    def ttft(self) -> float:
        return self.arrived_at[0] - self.sent_at

    @property
    def e2e(self) -> float:
        return self.arrived_at[-1] - self.sent_at

    @property
    def itls(self) -> list[float]:
        """Return the gaps between arrivals. Empty: all tokens arrived at once."""
        return [later - earlier for earlier, later in zip(self.arrived_at, self.arrived_at[1:], strict=False)]

    @property
    def tpot(self) -> float | None:
        """Return the time per output token. None: there is only one token."""
        n = self.num_output_tokens
        return None if n < 2 else (self.e2e - self.ttft) / (n - 1)


def share_together(records: Sequence[StreamRecord]) -> float | None:
    """Return the share of tokens after the first that arrived with the one before. None: there are no such tokens."""
    num_later = sum(record.num_output_tokens - 1 for record in records)
    num_apart = sum(gap >= _TOGETHER for record in records for gap in record.itls)
    return 1.0 - num_apart / num_later if num_later else None


def together_remarks(shares: Mapping[str, float | None]) -> list[str]:
    """Return a remark for each name with a share of tokens that makes ITL and TPOT misleading."""
    return [
        f"{name}: {share:.0%} of the tokens arrived within 0.1 ms of the one before, in its frame or read together "
        "with it: ITL is not the time of a token, and an answer in one frame has a TPOT of 0"
        for name, share in shares.items()
        if share is not None and share > _TOGETHER_SHARE
    ]


def seconds_of(run: Callable[[], object]) -> float:
    """Call a function and return the seconds that it took."""
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def percentile(values: Sequence[float], q: float) -> float:
    """Return the smallest value that at least q percent of the values do not exceed, 0 < q <= 100."""
    if not values:
        raise ValueError("no values to take a percentile of")
    return sorted(values)[max(0, math.ceil(q / 100 * len(values)) - 1)]


def tokens_per_second(run: Sequence[StreamRecord], num_tokens: int) -> float:
    """Return a number of tokens over the time from the first request to the last token."""
    return num_tokens / (max(r.arrived_at[-1] for r in run) - min(r.sent_at for r in run))


def output_tokens_per_second(run: Sequence[StreamRecord]) -> float:
    return tokens_per_second(run, sum(r.num_output_tokens for r in run))


def prompt_tokens_per_second(run: Sequence[StreamRecord]) -> float:
    return tokens_per_second(run, sum(r.num_prompt_tokens for r in run))


def all_tokens_per_second(run: Sequence[StreamRecord]) -> float:
    return tokens_per_second(run, sum(r.num_prompt_tokens + r.num_output_tokens for r in run))


def streams_figures(runs: Sequence[Sequence[StreamRecord]]) -> Figures:
    """Return the figures of several streams at once. Throughput is the median of the runs; the rest is over all.

    Raises ValueError if a stream has fewer than two tokens.
    """
    records = [record for run in runs for record in run]
    # Without any gap, all answers came in one frame each.
    itls = [gap for record in records for gap in record.itls] or [0.0]
    tpots = [record.tpot for record in records if record.tpot is not None]
    if len(tpots) != len(records):
        raise ValueError("streams of at least two tokens are needed")
    return {
        "num_streams": len(runs[0]),
        "num_runs": len(runs),
        "output_tokens_per_second": median([output_tokens_per_second(run) for run in runs]),
        "itl_mean": mean(itls),
        "itl_p50": percentile(itls, 50),
        "itl_p99": percentile(itls, 99),
        "tpot_median": median(tpots),
        "tokens_together": share_together(records) or 0.0,
    }


def ttft_figures(runs: Sequence[Sequence[StreamRecord]]) -> Figures:
    """Return the figures of runs of one prompt each on an idle system, all of the same length."""
    ttfts = [run[0].ttft for run in runs]
    spread = {"ttft_median": median(ttfts), "ttft_min": min(ttfts), "ttft_max": max(ttfts)}
    return {"num_prompt_tokens": runs[0][0].num_prompt_tokens, "num_runs": len(ttfts), **spread}


def prefill_figures(runs: Sequence[Sequence[StreamRecord]]) -> Figures:
    """Return the figures of several prompts at once, each answered with one token."""
    rate = median([prompt_tokens_per_second(run) for run in runs])
    return {"num_prompts": len(runs[0]), "num_runs": len(runs), "prompt_tokens_per_second": rate}
