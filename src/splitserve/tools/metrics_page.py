"""Reader of the metrics page of a worker or a router."""

from __future__ import annotations

import urllib.request

from prometheus_client.parser import text_string_to_metric_families

_TIMEOUT = 10.0


def sum_samples(url: str, **labels: str) -> dict[str, float]:
    """Return sums by sample name over all samples with these labels. Raises OSError if the server does not answer."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=_TIMEOUT) as response:
        text = response.read().decode()
    sums: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if labels.items() <= sample.labels.items():
                sums[sample.name] = sums.get(sample.name, 0.0) + sample.value
    return sums
