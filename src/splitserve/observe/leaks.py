"""Check for resources that a worker or a cluster still holds without any request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def held(state: Mapping[str, Any]) -> str:
    """Return the `/server_info` state of a scheduler as text if it holds more than its prefix cache, else ""."""
    balanced = (
        state["num_running_reqs"] == state["num_waiting_reqs"] == state["pages_leased"] == 0
        and state["pages_free"] + state["pages_cached"] == state["pages_total"]
        and state.get("window_pages_free") == state.get("window_pages_total")
        and state["rows_free"] == state["rows_total"]
        and state["num_retracted_reqs"] == state["retraction_host_bytes"] == 0
        and state["metadata_slots_free"] == state["metadata_slots_total"]
        and state["num_invariant_violations_total"] == 0
    )
    return "" if balanced else str(dict(state))
