"""Traces of requests with usual values, of which a test states those that it is about."""

from __future__ import annotations

from typing import Any

from splitserve.observe.trace import TraceReport, TraceSummary


def trace_summary(rid: str = "r", **changes: Any) -> TraceSummary:
    """Return the summary of a request that has ended well."""
    return TraceSummary(**(_values(rid) | changes))


def trace_report(rid: str = "r", **changes: Any) -> TraceReport:
    """Return the trace of a streamed request that has ended well, without stages."""
    own = {"stream": True, "attempts": 1, "unaccounted_ms": 0.0, "clocks": [], "silent_workers": [], "stages": []}
    return TraceReport(**(_values(rid) | own | changes))


def _values(rid: str) -> dict[str, Any]:
    return {
        "rid": rid,
        "request_id": "",
        "trace_id": "0" * 32,
        "route": "/generate",
        "status": 200,
        "error": "",
        "state": "done",
        "started_at": 0.0,
        "ttft_ms": 12.5,
        "e2e_ms": 250.0,
        "prompt_tokens": None,
        "output_tokens": 7,
        "num_cached_tokens": None,
        "retries": 0,
        "migrations": 0,
        "workers": {},
    }
