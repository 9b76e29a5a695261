"""The merged text of several processes, in both formats."""

import pytest
from prometheus_client import CollectorRegistry, Counter
from prometheus_client.openmetrics.parser import text_string_to_metric_families as open_metrics_families
from prometheus_client.parser import text_string_to_metric_families

from splitserve.observe.exposition import merged, render
from splitserve.observe.histogram import LabelledHistogram

OPEN_METRICS = "application/openmetrics-text; version=1.0.0"
PLAIN = "text/plain; version=0.0.4"


def process(number: int) -> CollectorRegistry:
    registry = CollectorRegistry()
    Counter("work", "Work.", registry=registry).inc(number)
    LabelledHistogram(registry, "delay", "Delay.", "stage", (0.1, 1.0)).observe("a{b", number, "ab" * 16)
    return registry


@pytest.mark.parametrize(
    ("accept", "parse"), [(OPEN_METRICS, open_metrics_families), (PLAIN, text_string_to_metric_families)]
)
def test_samples_of_all_processes_are_one_family_with_the_label_worker(accept, parse):
    own = render(process(1), accept)
    urls = ["http://w:1", 'http://w:2"\\']
    text = merged(own, {url: render(process(n), accept).content for n, url in enumerate(urls, 2)})
    assert text.content_type == own.content_type
    families = list(parse(text.content.decode()))
    assert len({family.name for family in families}) == len(families)
    samples = [sample for family in families for sample in family.samples]
    work = {s.labels.get("worker"): s.value for s in samples if s.name == "work_total"}
    assert work == {None: 1.0, urls[0]: 2.0, urls[1]: 3.0}
    buckets = [s for s in samples if s.name == "delay_bucket" and s.labels["le"] == "+Inf"]
    assert [s.labels["stage"] for s in buckets] == ["a{b"] * 3
    assert [s.exemplar is not None for s in buckets] == [False, accept == OPEN_METRICS, accept == OPEN_METRICS]


def test_without_workers_the_text_stays_the_same():
    own = render(process(1), OPEN_METRICS)
    assert merged(own, {}) == own


def test_a_histogram_counts_values_up_to_and_including_a_bound():
    registry = CollectorRegistry()
    histogram = LabelledHistogram(registry, "delay", "Delay.", "stage", (0.1, 1.0), {"model_name": "m"})
    for value in (0.1, 0.5, 7.0):
        histogram.observe("s", value)
    labels = {"model_name": "m", "stage": "s"}
    counts = [registry.get_sample_value("delay_bucket", {**labels, "le": le}) for le in ("0.1", "1.0", "+Inf")]
    assert counts == [1, 2, 3]
    assert registry.get_sample_value("delay_sum", labels) == pytest.approx(7.6)
