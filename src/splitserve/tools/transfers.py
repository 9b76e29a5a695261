"""Figures of a prefill worker's KV transfers, read from its metrics."""

from __future__ import annotations

from dataclasses import dataclass

from splitserve.tools.metrics_page import sum_samples

_PREFIX = "splitserve:kv_transfer_"


@dataclass(frozen=True, slots=True)
class Transfers:
    """Sums over all KV transfers of a worker so far."""

    count: int
    num_bytes: float
    # Seconds from the first write to the confirmation of the last, and the part after the last forward pass.
    seconds: float
    exposed_seconds: float

    def __sub__(self, earlier: Transfers) -> Transfers:
        return Transfers(
            self.count - earlier.count,
            self.num_bytes - earlier.num_bytes,
            self.seconds - earlier.seconds,
            self.exposed_seconds - earlier.exposed_seconds,
        )

    @property
    def gb_per_s(self) -> float:
        """Return 10^9 bytes per second. The time includes compute if compute hides the transfer."""
        return self.num_bytes / self.seconds / 1e9 if self.seconds > 0 else 0.0

    @property
    def hidden(self) -> float:
        """Return the share of the transfer time that overlaps with prompt computation, in [0, 1]."""
        return 1.0 - self.exposed_seconds / self.seconds if self.seconds > 0 else 0.0


def read_transfers(prefill_url: str) -> Transfers:
    """Return the figures of a prefill worker. Raises OSError if it does not answer."""
    sums = sum_samples(prefill_url)
    return Transfers(
        count=int(sums.get(f"{_PREFIX}bytes_count", 0)),
        num_bytes=sums.get(f"{_PREFIX}bytes_sum", 0.0),
        seconds=sums.get(f"{_PREFIX}latency_seconds_sum", 0.0),
        exposed_seconds=sums.get(f"{_PREFIX}exposed_seconds_sum", 0.0),
    )
