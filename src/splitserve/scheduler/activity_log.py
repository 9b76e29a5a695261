"""Log lines about the load of a scheduler, every 10 s unless it was idle.

    decode batch: running 12, queue 3, retracted 0, 412 tok/s, KV 61 %, transfer queue 2
    prefill batch: new tokens 819, cached tokens 51, running 2, queue 1, bootstrap queue 0, inflight queue 3, 82 tok/s
    colocated batch: new tokens 120, cached tokens 16, running 5, queue 0, retracted 0, 98 tok/s, KV 12 %

Rates and token counts cover the time since the previous line. In decode and colocated lines tok/s counts output
tokens, in prefill lines computed prompt tokens.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from splitserve.core.messages import SchedulerState
from splitserve.core.request import DisaggregationMode

logger = logging.getLogger(__name__)

# Seconds between two lines.
INTERVAL = 10.0


@dataclass(frozen=True, slots=True)
class Totals:
    """Counters of a scheduler since its start."""

    num_steps: int = 0
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    num_finished: int = 0

    @classmethod
    def of(cls, state: SchedulerState, num_output_tokens: int) -> Totals:
        return cls(
            num_steps=state.num_steps_total,
            num_computed_tokens=state.num_computed_tokens_total,
            num_cached_tokens=state.prefix_cache_hits,
            num_output_tokens=num_output_tokens,
            num_finished=state.num_finished_reqs_total,
        )


class ActivityLog:
    """Writer of the lines of one scheduler. `now`: clock time of its start."""

    def __init__(self, now: float) -> None:
        self._since = now
        self._before = Totals()

    def poll(self, now: float, mode: DisaggregationMode, read_state: Callable[[], tuple[SchedulerState, int]]) -> None:
        """Write the line if it is due. `read_state`: returns the state and the output tokens since the start."""
        if now - self._since < INTERVAL:
            return
        state, num_output_tokens = read_state()
        totals = Totals.of(state, num_output_tokens)
        if totals != self._before or state.num_running_reqs or state.num_waiting_reqs:
            values = values_of(mode, state, self._before, totals, now - self._since)
            title = "colocated" if mode is DisaggregationMode.NULL else mode.value
            logger.info("%s batch: %s", title, text_of(values), extra={"values": values})
        self._since, self._before = now, totals


def values_of(
    mode: DisaggregationMode, state: SchedulerState, before: Totals, after: Totals, seconds: float
) -> dict[str, int]:
    """Return the figures of a line in its order. `before`, `after`: counters `seconds` apart."""
    new_tokens = after.num_computed_tokens - before.num_computed_tokens
    output_tokens = after.num_output_tokens - before.num_output_tokens
    values: dict[str, int] = {}
    if mode is not DisaggregationMode.DECODE:
        values["new_tokens"] = new_tokens
        values["cached_tokens"] = after.num_cached_tokens - before.num_cached_tokens
    values["running"] = state.num_running_reqs
    # Requests in the bootstrap and the transfer queue have their own figures.
    values["queue"] = (
        state.num_waiting_reqs - state.num_prefill_bootstrap_queue_reqs - state.num_decode_transfer_queue_reqs
    )
    if mode is DisaggregationMode.PREFILL:
        values["bootstrap_queue"] = state.num_prefill_bootstrap_queue_reqs
        values["inflight_queue"] = state.num_prefill_inflight_queue_reqs
        values["tokens_per_s"] = round(new_tokens / seconds)
        return values
    values["retracted"] = state.num_retracted_reqs
    values["tokens_per_s"] = round(output_tokens / seconds)
    values["kv_percent"] = round(100 * state.kv_usage)
    if mode is DisaggregationMode.DECODE:
        values["transfer_queue"] = state.num_decode_transfer_queue_reqs
    return values


# Name of a value -> format of its text. Other values are written as name and number.
_PHRASES = {"tokens_per_s": "{} tok/s", "kv_percent": "KV {} %"}


def text_of(values: Mapping[str, int]) -> str:
    """Return the values as the text of a line."""
    return ", ".join(_PHRASES.get(name, name.replace("_", " ") + " {}").format(n) for name, n in values.items())
