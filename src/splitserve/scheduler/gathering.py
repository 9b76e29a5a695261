"""Short wait of an idle prefill worker for more prompts, so that the first step computes a burst together.

Without it, the first prompt of a burst is computed alone. Its stream then decodes alone while the others are computed:
a decode step for one stream costs nearly as much as one for eight, and takes a core from them if both workers share a
host. The wait ends when no prompt has arrived for `GAP` seconds. While decode has not announced new requests, it lasts
up to `ANNOUNCEMENTS` seconds. It is at most `SHARE` of the time that all these prompts will take. Tokens in the prefix
cache take no time. A prompt of `LONG_TOKENS` does not wait: the others would hardly make its step faster per token.
"""

from __future__ import annotations

import statistics
from collections import deque

# Seconds without a new prompt that end a wait. Requests of a burst arrive at a worker some milliseconds apart.
GAP = 0.01
# Seconds in which decode announces a burst. It has no room for a request that waits longer.
ANNOUNCEMENTS = 0.1
# Largest wait, as a share of the time of the step.
SHARE = 0.1
# Tokens of a prompt that begins a step at once.
LONG_TOKENS = 512
# Steps in the median of the time of a prompt token. A step with fewer tokens than `_LEAST_TOKENS` measures no such
# time.
_NUM_VALUES = 5
_LEAST_TOKENS = 16


class PromptGathering:
    """Times of arriving prompts and of steps, and the end of the wait that follows from them. Pure."""

    def __init__(self) -> None:
        self._token_times: deque[float] = deque(maxlen=_NUM_VALUES)
        self._first = self._last = 0.0

    @property
    def latest_end(self) -> float:
        """Time at which a wait ends however long the prompts are, if no other arrives."""
        return max(self._last + GAP, self._first + ANNOUNCEMENTS)

    def arrived(self, now: float, *, is_first: bool) -> None:
        """Record the arrival of a prompt. `is_first`: no other prompt waits."""
        self._last = now
        if is_first:
            self._first = now

    def observe(self, num_tokens: int, seconds: float) -> None:
        """Add the measured time of a step."""
        if num_tokens >= _LEAST_TOKENS:
            self._token_times.append(seconds / num_tokens)

    def ends_at(self, num_tokens: int, num_coming: int = 0) -> float:
        """Return the time at which a step that computes `num_tokens` should begin. It may be over.

        `num_coming`: those of them that decode has not announced yet.
        """
        if not self._token_times:
            return self._first
        longest = SHARE * num_tokens * statistics.median(self._token_times)
        return min(self.latest_end if num_coming else self._last + GAP, self._first + longest)
