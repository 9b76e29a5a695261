"""How often one caller may come: a token bucket each, full at first.

A bucket is kept as one number, the time at which it will be full again (the generic cell rate algorithm, ITU-T I.371):
each request moves that on by what one token takes to come, and is refused where the bucket is empty.

It knows names of callers, of which there are as many as were given keys.
"""

from __future__ import annotations

from splitserve.clock import Clock, SystemClock
from splitserve.errors import RateLimitError


class RateLimit:
    """`rate`: requests a second in the long run, `burst`: at once; of each caller."""

    def __init__(self, rate: float, burst: int, clock: Clock | None = None) -> None:
        self._rate = rate
        self._burst = burst
        self._clock = clock or SystemClock()
        self._full_at: dict[str, float] = {}

    def take(self, caller: str) -> None:
        """Count a request. Raises RateLimitError, and then it does not count."""
        now = self._clock.now()
        full_at = max(now, self._full_at.get(caller, now))
        too_early = full_at - now - (self._burst - 1) / self._rate
        # Less is rounding, where the machine's clock counts months.
        if too_early > 1e-6:
            raise RateLimitError(
                f"{caller} sent more than {self._rate:g} requests a second (--rate-limit) and {self._burst} at once: "
                f"come again in {too_early:.3g} s",
                retry_after=too_early,
            )
        self._full_at[caller] = full_at + 1 / self._rate
