"""Metrics of a worker: latencies measured by its front end, queues and counters reported by its schedulers.

Latencies are observed as they happen. When Prometheus scrapes, the schedulers' numbers are read from `states`, their
last snapshots (`scheduler_metrics.py`); the label `dp_rank` distinguishes them. Each app has its own registry. This
module contains no HTTP and does not fetch snapshots.

The number of series is bounded (`labels.py`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from splitserve.core.config import DisaggregationConfig
from splitserve.core.messages import SchedulerState, TransferStats
from splitserve.core.request import DisaggregationMode
from splitserve.core.timeline import Span
from splitserve.observe.compat import compat_families
from splitserve.observe.exposition import MetricsText, render
from splitserve.observe.histogram import LabelledHistogram
from splitserve.observe.labels import LabelValues, RecentSeries
from splitserve.observe.loop_lag import LoopLag
from splitserve.observe.scheduler_metrics import PREFIX, scheduler_families

# Seconds.
_FAST = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0)
_SLOW = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0)
_STAGE_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 120.0)
_BYTES = tuple(float(4**i) for i in range(5, 18))
_GB_S = (0.01, 0.03, 0.1, 0.3, 1.0, 2.0, 3.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0)
_TOKENS = tuple(float(2**i) for i in range(18))

# Stages of the scheduler's timeline that begin when a request leaves the queue: the first that it entered counts.
_FIRST_SCHEDULED = ("running", "decoding")
# Stages of which the first begins when the prompt is computed.
_PREFILLED = ("transfer", "decoding")


@dataclass(slots=True)
class WorkerTotals:
    """Totals since the start of a worker, for readers that compute rates."""

    output_tokens: int = 0
    transfer_bytes: int = 0


class WorkerMetrics(Collector):
    """Metrics of one worker. `states`: the schedulers' last snapshots, by data parallel rank, set by their fetcher.

    `compat`: systems with more names for the metrics (`compat.py`). `disaggregation`: the worker's current role
    and transfer backend, set by the front end.
    """

    def __init__(self, model_name: str, compat: Sequence[str] = ()) -> None:
        self.states: Sequence[SchedulerState] = ()
        self.totals = WorkerTotals()
        self.disaggregation = DisaggregationConfig()
        self.registry = CollectorRegistry()
        # Metrics measured by this object. `registry` has all metrics.
        self._measured = CollectorRegistry()
        self._label = model_name
        self._compat = tuple(compat)
        self.loop_lag = LoopLag(self.registry, PREFIX)
        self._add_latencies()
        self._add_sizes()
        self._add_transfers()
        self._finished = self._labelled_counter("request_finished", "Samples by the way they ended.", "finished_reason")
        self._rejected = self._labelled_counter(
            "requests_rejected", "Requests that ended with an error before their answer began, by code.", "reason"
        )
        self._reasons = LabelValues()
        self.registry.register(self)

    def observe_first_token(self, seconds: float, num_prompt_tokens: int, trace_id: str | None = None) -> None:
        self._ttft.observe(seconds, exemplar_of(trace_id))
        self._prompt_tokens.inc(num_prompt_tokens)

    def observe_tokens(self, count: int, seconds: float | None) -> None:
        """Observe `count` tokens that arrived together, `seconds` after the previous ones. None: they are the first."""
        self._output_tokens.inc(count)
        self.totals.output_tokens += count
        if seconds is not None:
            for _ in range(count):
                self._itl.observe(seconds / count)

    def observe_finish(
        self,
        reason: str,
        seconds: float,
        timeline: Mapping[str, float] | None,
        transfer: TransferStats | None,
        spans: Sequence[Span] = (),
        trace_id: str | None = None,
    ) -> None:
        """Observe the end of a sample, `seconds` after its arrival.

        `timeline`: stage -> seconds since the scheduler received the sample. `spans`: its time by stage. A stage that
        the sample entered several times counts once, with the sum.
        """
        self._finished.labels(self._label, reason).inc()
        self._e2e.observe(seconds, exemplar_of(trace_id))
        self._observe_timeline(timeline or {})
        sums: dict[str, float] = defaultdict(float)
        for span in spans:
            sums[span.name] += span.end - span.start
        for stage, total in sums.items():
            self._stages.observe(self._stage_names.bounded(stage), total, trace_id or "")
        if transfer is not None:
            self._observe_transfer(transfer)

    def observe_sizes(self, num_prompt_tokens: int, num_output_tokens: int, decode_seconds: float | None) -> None:
        """Observe the tokens of a finished sample. `decode_seconds`: first to last token. None: fewer than two tokens.

        Not called on a prefill worker, which generates only one token per request.
        """
        self._prompt_lengths.observe(num_prompt_tokens)
        self._output_lengths.observe(num_output_tokens)
        if decode_seconds is not None:
            self._decode_time.observe(decode_seconds)

    def observe_request(self, max_num_output_tokens: int) -> None:
        """Observe a finished request. `max_num_output_tokens`: output tokens of its longest sample."""
        self._max_output_lengths.observe(max_num_output_tokens)

    def count_rejection(self, reason: str) -> None:
        """Count a request that ended with an error of this code before its answer began."""
        self._rejected.labels(self._label, self._reasons.bounded(reason)).inc()

    def render(self, accept: str | None = None) -> MetricsText:
        """Return the metrics in the format that the header `accept` requests."""
        return render(self.registry, accept)

    def collect(self) -> Iterable[Metric]:
        """Yield all metrics. Those of the schedulers follow their first snapshots."""
        families = [*self._measured.collect(), *scheduler_families(self._label, self.states)]
        # Readers that merge the metrics of workers reject a family without samples beside one with labels.
        families = [family for family in families if family.samples]
        yield from families
        is_prefill = self.disaggregation.mode is DisaggregationMode.PREFILL
        by_name = {family.name: family for family in families}
        yield from compat_families(self._compat, by_name, self.states, self._label, is_prefill=is_prefill)

    def _add_latencies(self) -> None:
        self._ttft = self._histogram("time_to_first_token_seconds", "Arrival to first token, seconds.", _SLOW)
        self._itl = self._histogram("inter_token_latency_seconds", "Gap between two tokens, seconds.", _FAST)
        self._e2e = self._histogram("e2e_request_latency_seconds", "Arrival to last token, seconds.", _SLOW)
        self._queue = self._histogram(
            "request_queue_time_seconds", "Scheduler's receipt to first scheduling, seconds.", _SLOW
        )
        self._prefill_time = self._histogram(
            "request_prefill_time_seconds", "First scheduling to the end of the prompt's computation, seconds.", _SLOW
        )
        self._decode_time = self._histogram("request_decode_time_seconds", "First to last token, seconds.", _SLOW)
        self._stages = LabelledHistogram(
            self._measured,
            f"{PREFIX}request_stage_seconds",
            "Time of a sample in one stage of its timeline on this worker, seconds.",
            "stage",
            _STAGE_SECONDS,
            {"model_name": self._label},
        )
        self._stage_names = LabelValues()

    def _add_sizes(self) -> None:
        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of samples that got a token.")
        self._output_tokens = self._counter("generation_tokens", "Output tokens.")
        self._prompt_lengths = self._histogram("request_prompt_tokens", "Prompt tokens of a finished sample.", _TOKENS)
        self._output_lengths = self._histogram(
            "request_generation_tokens", "Output tokens of a finished sample.", _TOKENS
        )
        self._max_output_lengths = self._histogram(
            "request_max_num_generation_tokens", "Output tokens of the longest sample of a finished request.", _TOKENS
        )

    def _add_transfers(self) -> None:
        self._kv_bytes = self._histogram(
            "kv_transfer_bytes", "Bytes copied by one hand-over; pages that change owner are not copied.", _BYTES
        )
        self._kv_writes = self._histogram(
            "kv_transfer_bytes_per_write", "Mean length of the pieces a hand-over went in, bytes.", _BYTES
        )
        self._kv_seconds = self._histogram(
            "kv_transfer_latency_seconds", "First write to proof of the last in a hand-over, seconds.", _FAST
        )
        self._kv_exposed = self._histogram(
            "kv_transfer_exposed_seconds", "Of a hand-over, after the prompt's last forward pass, seconds.", _FAST
        )
        self._kv_speed = self._histogram("kv_transfer_speed_gb_s", "Speed of a hand-over, 10^9 bytes a second.", _GB_S)
        self._kv_pages_exchanged = self._counter(
            "kv_pages_exchanged", "KV pages that changed owner instead of being copied."
        )
        peer = ("peer", "backend")
        self._kv_peers = RecentSeries(
            (
                self._labelled_counter("kv_transfer_peer_requests", "KV transfers to a decode worker.", *peer),
                self._labelled_counter("kv_transfer_peer_bytes", "Bytes copied to a decode worker.", *peer),
                self._labelled_counter(
                    "kv_transfer_peer_seconds", "Sum of the times of KV transfers to a decode worker, seconds.", *peer
                ),
            )
        )

    def _observe_timeline(self, timeline: Mapping[str, float]) -> None:
        scheduled = [timeline[stage] for stage in _FIRST_SCHEDULED if stage in timeline]
        if not scheduled:
            return
        self._queue.observe(min(scheduled))
        # If another worker computed the prompt, the sample enters the running batch after its KV transfer.
        began = timeline.get("running")
        ended = [timeline[stage] for stage in _PREFILLED if stage in timeline]
        if began is not None and ended and began <= min(ended):
            self._prefill_time.observe(min(ended) - began)

    def _observe_transfer(self, transfer: TransferStats) -> None:
        self.totals.transfer_bytes += transfer.num_bytes
        self._kv_bytes.observe(transfer.num_bytes)
        self._kv_pages_exchanged.inc(transfer.num_pages_exchanged)
        if transfer.num_writes:
            self._kv_writes.observe(transfer.num_bytes / transfer.num_writes)
        self._kv_seconds.observe(transfer.seconds)
        self._kv_exposed.observe(transfer.exposed_seconds)
        self._kv_speed.observe(gb_per_s(transfer))
        labels = (self._label, transfer.peer, self.disaggregation.transfer_backend)
        self._kv_peers.count(labels, 1, transfer.num_bytes, transfer.seconds)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        histogram = Histogram(PREFIX + name, text, ["model_name"], registry=self._measured, buckets=buckets)
        return histogram.labels(self._label)

    def _counter(self, name: str, text: str) -> Counter:
        return self._labelled_counter(name, text).labels(self._label)

    def _labelled_counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(PREFIX + name, text, ["model_name", *labels], registry=self._measured)


def exemplar_of(trace_id: str | None) -> dict[str, str] | None:
    """Return the exemplar that links an observation to its trace. None: there is no trace."""
    return {"trace_id": trace_id} if trace_id else None


def gb_per_s(transfer: TransferStats) -> float:
    """Return a rate in 10^9 bytes per second."""
    return transfer.num_bytes / transfer.seconds / 1e9 if transfer.seconds > 0 else 0.0
