"""What a prefill worker says of the KV caches it has handed over, read from its metrics."""

from __future__ import annotations

from dataclasses import dataclass

from splitserve.launch.metrics_page import sum_samples

_PREFIX = "splitserve:kv_transfer_"


@dataclass(frozen=True, slots=True)
class Transfers:
    """Sums over all hand-overs of a worker so far."""

    count: int
    num_bytes: float
    # From the first write to the proof of the last, seconds; and what of it came after the last forward pass.
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
        """10^9 bytes a second. Compute is in that time where it hides the transfer."""
        return self.num_bytes / self.seconds / 1e9 if self.seconds > 0 else 0.0

    @property
    def hidden(self) -> float:
        """The share of the time in which the prompt was still computed, in [0, 1]."""
        return 1.0 - self.exposed_seconds / self.seconds if self.seconds > 0 else 0.0


def read_transfers(prefill_url: str) -> Transfers:
    """Raises OSError where the worker does not answer."""
    sums = sum_samples(prefill_url)
    return Transfers(
        count=int(sums.get(f"{_PREFIX}bytes_count", 0)),
        num_bytes=sums.get(f"{_PREFIX}bytes_sum", 0.0),
        seconds=sums.get(f"{_PREFIX}latency_seconds_sum", 0.0),
        exposed_seconds=sums.get(f"{_PREFIX}exposed_seconds_sum", 0.0),
    )
