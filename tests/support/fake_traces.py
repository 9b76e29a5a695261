"""Generated records of requests in the shapes of the router's GET /v1/traces and GET /v1/trace/{rid}."""

from __future__ import annotations

from typing import Any

Json = dict[str, Any]


def summary_of(number: int, pair: tuple[str, str], started_at: float, **changes: Any) -> Json:
    """Return the summary of a finished request. Every fiftieth one failed, others are slow."""
    ttft = 120.0 + number % 97 + (900.0 if number % 40 == 0 else 0.0)
    failed = number % 50 == 7
    about = {"rid": f"request-{number:06d}", "request_id": "", "trace_id": f"{number:032x}"}
    outcome = {
        "route": "/v1/chat/completions",
        "status": 502 if failed else 200,
        "error": "worker lost" if failed else "",
        "state": "done",
    }
    times = {"started_at": started_at, "ttft_ms": ttft, "e2e_ms": ttft + 2100.0}
    tokens = {"prompt_tokens": 640, "output_tokens": 100, "num_cached_tokens": 256}
    moves = {"retries": int(failed), "migrations": 0, "workers": {"prefill": pair[0], "decode": pair[1]}}
    return {**about, **outcome, **times, **tokens, **moves, **changes}


# Name, place, milliseconds, attributes.
_BEFORE: tuple[tuple[str, str, float, Json], ...] = (
    ("router_receive", "router", 0.4, {}),
    ("router_queue", "router", 2.0, {}),
    ("router_choose", "router", 0.2, {}),
    ("request_network", "network", 0.8, {}),
    ("tokenize", "prefill", 1.6, {}),
    ("bootstrap", "prefill", 3.0, {}),
    ("waiting", "prefill", 9.0, {}),
    ("prefill_chunk", "prefill", 40.0, {"tokens": 512, "batch_tokens": 512, "step": 41}),
    ("prefill_chunk", "prefill", 30.0, {"tokens": 128, "batch_tokens": 300, "step": 42}),
    ("transfer", "prefill", 12.0, {"bytes": 25165824, "writes": 12, "gb_s": 2.1, "exposed": True}),
    ("metadata", "decode", 0.3, {}),
    ("prebuilt", "decode", 4.0, {}),
)


def report_of(summary: Json, silent_workers: list[str]) -> Json:
    """Return a record with stages. Their exclusive times and the unaccounted time add up to the TTFT."""
    stages, now, unaccounted = [], 0.0, 0.6
    scale = (summary["ttft_ms"] - unaccounted) / sum(row[2] for row in _BEFORE)
    end = summary["e2e_ms"]
    steps = {"steps": 100, "step_seconds": 2.1, "share_seconds": 0.4, "first_step": 1000, "last_step": 1030}
    after = (("decode", "decode", end - summary["ttft_ms"], steps),)
    rows = [(name, where, length * scale, more, True) for name, where, length, more in _BEFORE]
    for name, where, length, more, before in rows + [(*row, False) for row in after]:
        own = length if before else 0.0
        times = {"start_ms": now, "end_ms": now + length, "exclusive_ms": own, "before_first_token": before}
        worker = summary["workers"].get(where, "")
        stages.append({"name": name, "where": where, "worker": worker, **times, "attributes": more})
        now += length
    clocks = [{"worker": url, "offset_ms": 0.012, "error_ms": 0.08} for url in summary["workers"].values()]
    shared = {name: value for name, value in summary.items() if name != "state"}
    extra = {
        "stream": True,
        "silent_workers": silent_workers,
        "unaccounted_ms": unaccounted,
        "attempts": 1 + summary["retries"],
        "error_message": "the decode worker went away: try again" if summary["error"] else "",
    }
    return {**shared, **extra, "clocks": clocks, "stages": stages}
