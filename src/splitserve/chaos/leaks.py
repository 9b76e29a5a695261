"""What a worker or a cluster still holds when nothing is under way."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def held(state: Mapping[str, Any]) -> str:
    """What is held by a scheduler with this state (of `/server_info`) beyond its prefix cache; empty: nothing."""
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
