"""A Perfetto trace, read by the messages of Perfetto's own package."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest


def perfetto_protos() -> Any:
    """Return the module with the messages. Skips the test if the package is not installed."""
    reason = "needs Perfetto's messages: pip install perfetto"
    return pytest.importorskip("perfetto.protos.perfetto.trace.perfetto_trace_pb2", reason=reason)


class ReadTrace:
    """A trace as Perfetto's protos read it. Slices: (path of the track, name, begin, end, annotations)."""

    def __init__(self, protos: Any, data: bytes) -> None:
        trace = protos.Trace.FromString(data)
        kinds = protos.TrackEvent
        self.descriptions = {
            p.track_descriptor.uuid: p.track_descriptor for p in trace.packet if p.HasField("track_descriptor")
        }
        self.slices: list[tuple[str, str, int, int, dict[str, Any]]] = []
        self.counters: dict[str, list[int]] = defaultdict(list)
        self.flows: dict[int, list[str]] = defaultdict(list)
        open_: dict[int, list[Any]] = defaultdict(list)
        times = [p.timestamp for p in trace.packet if p.HasField("track_event")]
        assert times == sorted(times)
        assert trace.packet[0].sequence_flags == protos.TracePacket.SEQ_INCREMENTAL_STATE_CLEARED
        for packet in trace.packet:
            assert packet.trusted_packet_sequence_id
            event = packet.track_event
            if event.type == kinds.TYPE_SLICE_BEGIN:
                open_[event.track_uuid].append((packet.timestamp, event))
                for flow in (*event.flow_ids, *event.terminating_flow_ids):
                    self.flows[flow].append(f"{self.path(event.track_uuid)} {event.name}")
            elif event.type == kinds.TYPE_SLICE_END:
                begin, opened = open_[event.track_uuid].pop()
                values = {a.name: getattr(a, a.WhichOneof("value")) for a in opened.debug_annotations}
                self.slices.append((self.path(event.track_uuid), opened.name, begin, packet.timestamp, values))
            elif event.type == kinds.TYPE_COUNTER:
                self.counters[self.path(event.track_uuid)].append(event.counter_value)
        assert not any(open_.values())

    def path(self, uuid: int) -> str:
        track = self.descriptions[uuid]
        parent = f"{self.path(track.parent_uuid)}/" if track.HasField("parent_uuid") else ""
        return f"{parent}{track.name}"
