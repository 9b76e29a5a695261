"""Native Perfetto traces of requests and steps, for ui.perfetto.dev and trace_processor.

A trace is a list of TracePacket messages: descriptions of tracks, and events on them. Tracks form a tree:

    requests
      RID                 one slice: the whole request, with its figures
        router            a slice per stage
        prefill URL       ...
        decode URL        ...
    prefill URL           a worker
      steps               a slice per step: batch, tokens, chunk limit, why requests waited
      running, waiting    counters
    decode URL
      ...

Slices of one track must nest, so stages that overlap are on several tracks with the same name, which the UI shows as
one. A flow leads from the last KV transfer of a request to its first stage on the decode worker after that.
Times are nanoseconds since 1970 in the router's clock. Numbers of fields: protos/perfetto/trace/ in Perfetto's source.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import count
from typing import NamedTuple

from splitserve.core.steps import StepPage
from splitserve.core.timeline import Attribute, Stage
from splitserve.observe.protobuf import bytes_field, double_field, fixed64_field, number_field
from splitserve.observe.trace import TraceReport, TraceStage

# TrackEvent.Type.
_SLICE_BEGIN, _SLICE_END, _COUNTER = 1, 2, 4
# All packets are of one sequence. The first one has SEQ_INCREMENTAL_STATE_CLEARED.
_SEQUENCE_ID, _STATE_CLEARED = 1, 1
# Builtin clocks: wall time, and the default clock of events.
_REALTIME, _BOOTTIME = 1, 6
# A flow starts at the beginning of one of these prefill stages, and ends at one of these decode stages.
_FLOW_FROM = (Stage.TRANSFER, Stage.TRANSFER_DONE, Stage.PREFILL_CHUNK)
_FLOW_TO = (Stage.METADATA, Stage.PREBUILT, Stage.DECODE)
# Fields of a report that are attributes of its request.
_FIGURES = (
    *("rid", "trace_id", "route", "status", "error", "error_message", "ttft_ms", "unaccounted_ms"),
    *("prompt_tokens", "output_tokens", "num_cached_tokens", "retries", "migrations"),
)


class Slice(NamedTuple):
    """An interval on a track, in nanoseconds."""

    start: int
    end: int
    name: str
    attributes: Mapping[str, Attribute]
    flow: int | None = None
    ends_flow: bool = False


class TraceWriter:
    """Encoder of one trace."""

    def __init__(self) -> None:
        self._ids = count(1)
        self._descriptions: list[bytes] = []
        # Time and encoded packet of each event.
        self._events: list[tuple[int, bytes]] = []

    def add_track(self, name: str, parent: int | None = None, *, is_counter: bool = False) -> int:
        """Describe a track, and return its id."""
        track = next(self._ids)
        description = number_field(1, track) + bytes_field(2, name)
        if parent is not None:
            description += number_field(5, parent)
        if is_counter:
            description += bytes_field(8, b"")
        self._descriptions.append(_packet(bytes_field(60, description)))
        return track

    def add_slices(self, name: str, parent: int, slices: Iterable[Slice]) -> None:
        """Add slices to as few tracks of this name as possible."""
        for lane in lanes_of(slices):
            track = self.add_track(name, parent)
            open_: list[Slice] = []
            for item in lane:
                while open_ and open_[-1].end <= item.start:
                    self._end(track, open_.pop())
                self._begin(track, item)
                open_.append(item)
            while open_:
                self._end(track, open_.pop())

    def add_counter(self, track: int, at: int, value: int) -> None:
        self._add(at, number_field(9, _COUNTER) + number_field(11, track) + number_field(30, value))

    def encoded(self) -> bytes:
        """Return the trace."""
        events = sorted(self._events, key=lambda event: event[0])
        first = events[0][0] if events else 0
        # Both clocks have the same time, so that the UI can show wall time.
        clocks = b"".join(
            bytes_field(1, number_field(1, clock) + number_field(2, first)) for clock in (_REALTIME, _BOOTTIME)
        )
        begin = _packet(bytes_field(6, clocks) + number_field(13, _STATE_CLEARED))
        return b"".join([begin, *self._descriptions, *(packet for _, packet in events)])

    def _begin(self, track: int, item: Slice) -> None:
        event = number_field(9, _SLICE_BEGIN) + number_field(11, track) + bytes_field(23, item.name)
        event += b"".join(bytes_field(4, _annotation(name, value)) for name, value in item.attributes.items())
        if item.flow is not None:
            event += fixed64_field(48 if item.ends_flow else 47, item.flow)
        self._add(item.start, event)

    def _end(self, track: int, item: Slice) -> None:
        self._add(item.end, number_field(9, _SLICE_END) + number_field(11, track))

    def _add(self, at: int, event: bytes) -> None:
        self._events.append((at, _packet(number_field(8, at) + bytes_field(11, event))))


def _packet(fields: bytes) -> bytes:
    return bytes_field(1, fields + number_field(10, _SEQUENCE_ID))


def _annotation(name: str, value: Attribute) -> bytes:
    named = bytes_field(10, name)
    if isinstance(value, bool):
        return named + number_field(2, value)
    if isinstance(value, int):
        return named + number_field(4, value)
    return named + (double_field(5, value) if isinstance(value, float) else bytes_field(6, value))


def lanes_of(slices: Iterable[Slice]) -> list[list[Slice]]:
    """Divide slices among lanes so that the slices of a lane nest. Each lane is sorted by start."""
    # Lanes, each with the ends of its open slices. The innermost end is last.
    lanes: list[tuple[list[Slice], list[int]]] = []
    for item in sorted(slices, key=lambda item: (item.start, -item.end)):
        for _, ends in lanes:
            while ends and ends[-1] <= item.start:
                ends.pop()
        lane, ends = next((lane for lane in lanes if not lane[1] or item.end <= lane[1][-1]), ([], []))
        if not lane:
            lanes.append((lane, ends))
        lane.append(item)
        ends.append(item.end)
    return [lane for lane, _ in lanes]


def perfetto_trace(reports: Sequence[TraceReport], steps: Mapping[str, StepPage]) -> bytes:
    """Return the trace of these requests. `steps`: steps of their workers, by URL."""
    writer = TraceWriter()
    requests = writer.add_track("requests")
    for flow, report in enumerate(sorted(reports, key=lambda report: report.started_at), start=1):
        _add_request(writer, requests, report, flow)
    roles = {url: role for report in reports for role, url in report.workers.items()}
    for url, page in steps.items():
        _add_steps(writer, f"{roles.get(url, 'worker')} {url}", page, shift_of(reports, url, page))
    return writer.encoded()


def _add_request(writer: TraceWriter, parent: int, report: TraceReport, flow: int) -> None:
    start = _ns(report.started_at)
    known = {name: value for name in _FIGURES if (value := getattr(report, name)) is not None}
    group = writer.add_track(report.rid, parent)
    writer.add_slices(report.rid, group, [Slice(start, start + _ns(report.e2e_ms / 1e3), report.rid, known)])
    source, target = _ends_of_flow(report.stages)
    places: dict[str, list[Slice]] = {}
    for stage in report.stages:
        values: dict[str, Attribute] = {"rid": report.rid, "exclusive_ms": stage.exclusive_ms, **stage.attributes}
        begin, end = (start + _ns(ms / 1e3) for ms in (stage.start_ms, stage.end_ms))
        is_end = stage is target
        own_flow = flow if target is not None and (is_end or stage is source) else None
        place = f"{stage.where} {stage.worker}".strip()
        places.setdefault(place, []).append(Slice(begin, max(begin, end), stage.name, values, own_flow, is_end))
    for place, slices in places.items():
        writer.add_slices(place, group, slices)


def _ends_of_flow(stages: Sequence[TraceStage]) -> tuple[TraceStage | None, TraceStage | None]:
    """Return the stages at which the flow from prefill to decode begins and ends. None: there is no such flow."""
    sources = [stage for stage in stages if stage.where == "prefill" and stage.name in _FLOW_FROM]
    source = max(sources, key=lambda stage: (stage.name == Stage.TRANSFER, stage.start_ms), default=None)
    if source is None:
        return None, None
    targets = (stage for stage in stages if stage.where == "decode" and stage.name in _FLOW_TO)
    return source, next((stage for stage in targets if stage.start_ms >= source.start_ms), None)


def shift_of(reports: Sequence[TraceReport], url: str, page: StepPage) -> float:
    """Return the seconds to add to a worker's clock, from a step in one of the traces, else from its wall clock."""
    records = {step.number: step for step in page.steps}
    for report in reports:
        for stage in report.stages:
            number = stage.attributes.get("step", stage.attributes.get("first_step"))
            step = records.get(number) if stage.worker == url and isinstance(number, int) else None
            if step is not None and any(rid.startswith(report.rid) for rid in step.rids):
                return report.started_at + stage.start_ms / 1e3 - step.start
    return page.clock.unix - page.clock.monotonic


def _add_steps(writer: TraceWriter, name: str, page: StepPage, shift: float) -> None:
    """Add a worker. `shift`: seconds from its clock to the router's time since 1970."""
    group = writer.add_track(name)
    running, waiting = (writer.add_track(title, group, is_counter=True) for title in ("running", "waiting"))
    slices = []
    for step in page.steps:
        values: dict[str, Attribute] = {
            "step": step.number,
            "batch_size": step.num_requests,
            "decodes": step.num_decodes,
            "prompt_tokens": step.num_prompt_tokens,
            "chunk_limit": step.chunk_limit,
            "running": step.num_running,
            "waiting": step.num_waiting,
            "waiting_reason": step.reason.value,
            "rids": " ".join(step.rids),
        }
        end = _ns(step.end + shift)
        slices.append(Slice(_ns(step.start + shift), end, step.kind, values))
        writer.add_counter(running, end, step.num_running)
        writer.add_counter(waiting, end, step.num_waiting)
    writer.add_slices("steps", group, slices)


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)
