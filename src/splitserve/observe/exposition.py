"""Text of `/metrics`: the format that a scraper accepts, and the merged text of several processes.

OpenMetrics is written if the scraper accepts it, as Prometheus does. Only this format has exemplars.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from prometheus_client.openmetrics import exposition as openmetrics

# Last line of OpenMetrics.
_EOF = "# EOF"
_OPEN_METRICS = "application/openmetrics-text"


@dataclass(frozen=True, slots=True)
class MetricsText:
    content: bytes
    content_type: str


def render(registry: CollectorRegistry, accept: str | None) -> MetricsText:
    """Return the metrics of a registry in the format that the header `accept` requests."""
    encode, content_type = choose_encoder(accept or "")
    if not content_type.startswith(_OPEN_METRICS):
        return MetricsText(encode(registry), content_type)
    # Other escaping schemes of prometheus_client 0.26 replace the colons in names of samples.
    content: bytes = openmetrics.generate_latest(registry, openmetrics.ALLOWUTF8)  # type: ignore[no-untyped-call]
    return MetricsText(content, openmetrics.CONTENT_TYPE_LATEST)


@dataclass(slots=True)
class _Family:
    """Lines of one metric: its descriptions, once, and the samples of all processes."""

    descriptions: list[str] = field(default_factory=list)
    samples: list[str] = field(default_factory=list)


def merged(own: MetricsText, workers: Mapping[str, bytes]) -> MetricsText:
    """Return the text of this process with that of workers, which get a label `worker` with their URL.

    All texts have the same format. The samples of one metric follow each other, as both formats require.
    """
    families: dict[str, _Family] = {}
    _add(families, own.content, "")
    for url, text in workers.items():
        _add(families, text, url)
    lines = [line for family in families.values() for line in (*family.descriptions, *family.samples)]
    if own.content_type.startswith(_OPEN_METRICS):
        lines.append(_EOF)
    return MetricsText(("\n".join(lines) + "\n").encode(), own.content_type)


def _add(families: dict[str, _Family], text: bytes, worker: str) -> None:
    label = 'worker="' + worker.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'
    family, is_new = _Family(), True
    for line in text.decode(errors="replace").splitlines():
        if line.startswith("# HELP "):
            name = line.split(" ", 3)[2]
            is_new = name not in families
            family = families.setdefault(name, _Family())
        if not line.startswith("#"):
            family.samples.append(_labelled(line, label) if worker else line)
        elif is_new and line != _EOF:
            family.descriptions.append(line)


def _labelled(sample: str, label: str) -> str:
    """Return a sample line with one more label. The first brace before a space opens its labels."""
    name, brace, rest = sample.partition("{")
    if brace and " " not in name:
        return f"{name}{{{label},{rest}"
    name, _, value = sample.partition(" ")
    return f"{name}{{{label}}} {value}"
