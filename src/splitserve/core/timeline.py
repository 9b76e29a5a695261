"""Timeline of one sample: the spans of time that a process spends on it, by stage.

All times are seconds of the recording process's monotonic clock. `observe/trace.py` joins the spans of router and
workers to one trace per request.
"""

from __future__ import annotations

import enum
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import msgspec

Attribute = str | int | float | bool
# Maximum number of spans in a timeline. Later spans extend the last one of their name.
MAX_SPANS = 64


class Stage(enum.StrEnum):
    """Stages of a request. `observe/trace.py` has their precedence, docs/tracing.md their descriptions."""

    # Router.
    CLIENT_NETWORK = "client_network"
    ROUTER_RECEIVE = "router_receive"
    ROUTER_QUEUE = "router_queue"
    ROUTER_CHOOSE = "router_choose"
    ROUTER_DISPATCH = "router_dispatch"
    UNREPORTED = "unreported"
    FAILED_ATTEMPT = "failed_attempt"
    REQUEST_NETWORK = "request_network"
    RESPONSE_NETWORK = "response_network"
    ROUTER_FORWARD = "router_forward"
    # Front end of a worker.
    TOKENIZE = "tokenize"
    TO_SCHEDULER = "to_scheduler"
    TO_FRONT_END = "to_front_end"
    DETOKENIZE = "detokenize"
    # Scheduler of any worker.
    GRAMMAR = "grammar"
    WAITING = "waiting"
    PREFILL_CHUNK = "prefill_chunk"
    BETWEEN_STEPS = "between_steps"
    DECODE = "decode"
    RETRACTED = "retracted"
    # Scheduler of a prefill worker.
    BOOTSTRAP = "bootstrap"
    TRANSFER = "transfer"
    TRANSFER_DONE = "transfer_done"
    # Scheduler of a decode worker.
    HANDSHAKE = "handshake"
    PREALLOC = "prealloc"
    KV_WAIT = "kv_wait"
    METADATA = "metadata"
    PREBUILT = "prebuilt"


# Stage of a scheduler -> name of the span that is open while a sample is in this stage.
_SPANS = {
    "grammar": Stage.GRAMMAR,
    "waiting": Stage.WAITING,
    "running": Stage.BETWEEN_STEPS,
    "retracted": Stage.RETRACTED,
    "bootstrap": Stage.BOOTSTRAP,
    "handshake": Stage.HANDSHAKE,
    "prealloc": Stage.PREALLOC,
}


class Span(msgspec.Struct, array_like=True):
    """Time in one stage: [start, end)."""

    name: str
    start: float
    end: float
    attributes: dict[str, Attribute] = {}


class StageReport(msgspec.Struct, array_like=True):
    """Stages of a sample in one scheduler so far."""

    # Clock time at which the sample first entered each stage.
    entered: dict[str, float] = {}
    spans: list[Span] = []

    @property
    def seconds(self) -> dict[str, float]:
        """Return the time of each stage's beginning, in seconds since the first one."""
        first = min(self.entered.values(), default=0.0)
        return {stage: at - first for stage, at in self.entered.items()}

    def ended(self, at: float) -> StageReport:
        """Return the stages of a sample that generated until `at`, after this report. DECODE loses its figures."""
        return StageReport({**self.entered, "finished": at}, [_continued(span, at) for span in self.spans])


def _continued(span: Span, at: float) -> Span:
    if span.name != Stage.DECODE:
        return span
    return Span(span.name, span.start, max(span.end, at), {"first_step": span.attributes["first_step"]})


@dataclass(slots=True)
class Timeline:
    """Stages of a sample in one scheduler. It is in one stage at a time. Steps and KV transfers add spans inside it."""

    # Clock time at which the sample first entered each stage.
    entered: dict[str, float] = field(default_factory=dict)
    # Current stage. A retracted request re-enters earlier stages.
    stage: str = "received"
    # Clock time at which the sample entered the current stage.
    since: float = 0.0
    # Why it waits in that stage; an attribute of the span. Empty: it does not wait, or the reason is unknown.
    reason: str = ""
    spans: list[Span] = field(default_factory=list)
    # One span over all steps that generated tokens of the sample. None: no such step yet.
    decode: Span | None = None
    # Name of the open span, which began with the current stage. Empty: the stage has no span.
    _span: str = ""
    # Number of spans in the last report.
    _num_reported: int = 0

    def enter(self, stage: str, now: float, span: str | None = None) -> None:
        """Enter a stage. `span`: name of the span that begins. None: the usual one of the stage."""
        self.entered.setdefault(stage, now)
        if self._span and now > self.since:
            self.add(Span(self._span, self.since, now, {"reason": self.reason} if self.reason else {}))
        self.stage, self.since, self.reason = stage, now, ""
        self._span = _SPANS.get(stage, "") if span is None else span

    def add(self, span: Span) -> None:
        """Add a span. Beyond MAX_SPANS, extend the last span of the same name instead."""
        if len(self.spans) < MAX_SPANS:
            self.spans.append(span)
            return
        same = next((known for known in reversed(self.spans) if known.name == span.name), None)
        if same is not None:
            same.end = span.end
            same.attributes = {**same.attributes, "merged": int(same.attributes.get("merged", 1)) + 1}

    def add_decode_step(self, number: int, start: float, end: float, share: float) -> None:
        """Add a step that generated a token. `share`: this sample's share of the step's time, in [0, 1]."""
        seconds = end - start
        if self.decode is None:
            self.decode = Span(
                Stage.DECODE,
                start,
                end,
                {"steps": 1, "step_seconds": seconds, "share_seconds": seconds * share, "first_step": number},
            )
            self.spans.append(self.decode)
        else:
            values = self.decode.attributes
            values["steps"] = int(values["steps"]) + 1
            values["step_seconds"] = float(values["step_seconds"]) + seconds
            values["share_seconds"] = float(values["share_seconds"]) + seconds * share
            self.decode.end = end
        self.decode.attributes["last_step"] = number

    def report(self, *, is_last: bool) -> StageReport | None:
        """Return the stages so far. None: it is not the last report, and no span was added since the one before."""
        if not is_last and len(self.spans) == self._num_reported:
            return None
        self._num_reported = len(self.spans)
        return StageReport(dict(self.entered), list(self.spans))


# Names of stages and attributes. A report contains their indices, because the names are half of its bytes.
_ATTRIBUTES = "reason tokens batch_tokens step bytes writes gb_s exposed_ms merged steps step_seconds share_seconds"
_WORDS = (*map(str, Stage), *_ATTRIBUTES.split(), "first_step", "last_step", "backend", "path")
_INDICES = {word: index for index, word in enumerate(_WORDS)}


class SampleTrace(msgspec.Struct, array_like=True):
    """Spans of one sample in the front end and the scheduler of one worker."""

    # Index of the sample over the whole request.
    index: int
    # Name, start, end, then names and values of attributes. Times: microseconds since `WorkerTrace.received_at`.
    rows: list[list[Attribute]]

    @property
    def spans(self) -> list[Span]:
        return [
            Span(_word(name), float(start), float(end), dict(zip(map(_word, values[::2]), values[1::2], strict=True)))
            for name, start, end, *values in self.rows
        ]


class WorkerTrace(msgspec.Struct, array_like=True, tag=zlib.crc32(" ".join(_WORDS).encode())):
    """Report of a worker to the router, sent with the end of its answer. Releases with other words have other tags."""

    # Role of the worker: "prefill", "decode" or "null".
    mode: str
    # Name of the clock (`clock_name`). Processes with the same name share a clock.
    clock: str
    # Clock time at which the request arrived, and microseconds from there to the first byte of the answer.
    received_at: float
    response_time: int
    samples: list[SampleTrace]


def encode_trace(mode: str, clock: str, times: tuple[float, float], samples: Iterable[tuple[int, list[Span]]]) -> bytes:
    """Return the JSON of a WorkerTrace. `times`: clock times of the arrival and of the first byte of the answer."""

    def since(at: float) -> int:
        return round((at - times[0]) * 1e6)

    def row_of(span: Span) -> list[Attribute]:
        row: list[Attribute] = [_INDICES.get(span.name, span.name), since(span.start), since(span.end)]
        for name, value in span.attributes.items():
            # Four digits are enough, and all digits would make the report far longer.
            row += _INDICES.get(name, name), float(f"{value:.4g}") if isinstance(value, float) else value
        return row

    encoded = [SampleTrace(index, [row_of(span) for span in spans]) for index, spans in samples]
    return msgspec.json.encode(WorkerTrace(mode, clock, round(times[0], 6), since(times[1]), encoded))


def _word(value: Attribute) -> str:
    return value if isinstance(value, str) else _WORDS[int(value)]


@lru_cache(maxsize=1)
def clock_name() -> str:
    """Return the name of this host's monotonic clock: the boot id. Empty: unknown, so the clock equals no other."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
