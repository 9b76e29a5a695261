"""Reader of the metrics page of a worker or a router, and of the KV transfers that a prefill worker counts there."""

from __future__ import annotations

from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

from splitserve.tools.client import read_text

_PREFIX = "splitserve:kv_transfer_"


def sum_samples(url: str, **labels: str) -> dict[str, float]:
    """Return sums by sample name over all samples with these labels. Raises RequestFailedError."""
    sums: dict[str, float] = {}
    for family in text_string_to_metric_families(read_text(f"{url}/metrics")):
        for sample in family.samples:
            if labels.items() <= sample.labels.items():
                sums[sample.name] = sums.get(sample.name, 0.0) + sample.value
    return sums


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
    """Return the figures of a prefill worker. Raises RequestFailedError."""
    sums = sum_samples(prefill_url)
    return Transfers(
        count=int(sums.get(f"{_PREFIX}bytes_count", 0)),
        num_bytes=sums.get(f"{_PREFIX}bytes_sum", 0.0),
        seconds=sums.get(f"{_PREFIX}latency_seconds_sum", 0.0),
        exposed_seconds=sums.get(f"{_PREFIX}exposed_seconds_sum", 0.0),
    )
