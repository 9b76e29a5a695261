"""Rings of the last hour: what they return, what they forget, and that their memory is bounded."""

from __future__ import annotations

import json
import math
from typing import Any

from splitserve.router import charts
from splitserve.router.charts import ChartRings


async def render(rings: ChartRings, since: float = -math.inf) -> Any:
    return json.loads(await rings.render(since))


async def test_a_series_has_a_value_for_each_second_and_null_where_there_was_none() -> None:
    rings = ChartRings(size=4)
    rings.record(100.0, {"running": 1, "ttft_p50_ms": None})
    rings.record(101.0, {"running": 2, "ttft_p50_ms": 3.25})
    found = await render(rings)
    assert found == {
        "interval_s": 1,
        "time": [100.0, 101.0],
        "series": {"running": [1.0, 2.0], "ttft_p50_ms": [None, 3.25]},
    }


async def test_only_the_latest_points_are_kept_in_order() -> None:
    rings = ChartRings(size=3)
    for second in range(8):
        rings.record(second, {"running": second})
    found = await render(rings)
    assert found["time"] == found["series"]["running"] == [5, 6, 7]


async def test_since_returns_later_points_only() -> None:
    rings = ChartRings(size=3)
    for second in range(3):
        rings.record(second, {"running": second})
    assert (await render(rings, 1.0))["series"] == {"running": [2]}
    assert (await render(rings, 2.0))["time"] == []


async def test_the_series_of_a_worker_goes_when_its_last_value_goes() -> None:
    rings = ChartRings(size=3)
    rings.record(0, {"kv_usage:http://a:1": 0.5, "running": 0})
    for second in range(1, 3):
        rings.record(second, {"running": 0})
    assert (await render(rings))["series"]["kv_usage:http://a:1"] == [0.5, None, None]
    rings.record(3, {"running": 0})
    assert list((await render(rings))["series"]) == ["running"]


async def test_clients_see_names_in_place_of_addresses() -> None:
    rings = ChartRings(size=3)
    rings.record(0, {"kv_usage:http://a:1": 0.5, "running": 0})
    found = json.loads(await rings.render(rename=lambda url: {"http://a:1": "worker-1"}[url]))
    assert set(found["series"]) == {"kv_usage:worker-1", "running"}


async def test_the_number_of_series_is_bounded(monkeypatch) -> None:
    monkeypatch.setattr(charts, "MAX_SERIES", 5)
    rings = ChartRings(size=3)
    rings.record(0, {f"queue:http://w:{n}": n for n in range(50)})
    assert len((await render(rings))["series"]) == 5
