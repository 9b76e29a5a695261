"""Dashboard and alert rules in examples/monitoring: every metric in them exists, and promtool accepts the queries."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

import pytest
import yaml
from prometheus_client import CollectorRegistry

from splitserve.core.messages import STEP_SECONDS, SchedulerState, StepTimeHistogram, TransferStats
from splitserve.core.timeline import Span, Stage
from splitserve.observe.worker_metrics import WorkerMetrics
from splitserve.router.metrics import RouterMetrics

FOLDER = Path(__file__).parents[3] / "examples" / "monitoring"
PROMTOOL = shutil.which("promtool")
# Suffixes of the samples of a family.
SUFFIXES = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count")}
METRIC = re.compile(r"splitserve(?:_router)?:\w+")


def dashboard_queries() -> list[str]:
    panels = json.loads((FOLDER / "grafana-dashboard.json").read_text())["panels"]
    return [target["expr"] for panel in panels for target in panel.get("targets", ())]


def alert_queries() -> list[str]:
    groups = yaml.safe_load((FOLDER / "alerts.yml").read_text())["groups"]
    return [rule["expr"] for group in groups for rule in group["rules"]]


def exported(registry: CollectorRegistry) -> Iterable[str]:
    for family in registry.collect():
        for suffix in SUFFIXES.get(family.type, ("",)):
            yield family.name + suffix


def test_every_metric_in_dashboard_and_alert_rules_is_exported() -> None:
    worker = WorkerMetrics("m")
    worker.states = [
        SchedulerState(
            page_size=16,
            pages_total=1,
            pages_free=1,
            pages_cached=0,
            rows_total=1,
            rows_free=1,
            queue_ages={"waiting": 0.0},
            step_times={"decode": StepTimeHistogram((1,) * (len(STEP_SECONDS) + 1), 1.0)},
        )
    ]
    # Metrics without samples are not exported.
    worker.count_rejection("invalid_request")
    transfer = TransferStats(num_bytes=1, num_writes=1, seconds=1.0, exposed_seconds=0.0, peer="p")
    worker.observe_finish("stop", 1.0, None, transfer, [Span(Stage.WAITING, 0.0, 1.0)])
    known = {*exported(worker.registry), *exported(RouterMetrics().registry)}
    for queries in (dashboard_queries(), alert_queries()):
        used = {name for query in queries for name in METRIC.findall(query)}
        assert len(used) > 10
        assert used <= known, used - known


def test_every_panel_says_what_it_shows() -> None:
    panels = json.loads((FOLDER / "grafana-dashboard.json").read_text())["panels"]
    shown = [panel for panel in panels if panel["type"] != "row"]
    assert all(panel["description"].endswith(".") and panel["targets"] for panel in shown)
    assert len({panel["id"] for panel in panels}) == len(panels)


@pytest.mark.skipif(PROMTOOL is None, reason="promtool is missing: apt-get install prometheus")
def test_promtool_accepts_rules_config_and_queries(tmp_path: Path) -> None:
    rules = [
        {"record": f"panel:{number}", "expr": query.replace("$__rate_interval", "5m")}
        for number, query in enumerate(dashboard_queries())
    ]
    panels = tmp_path / "panels.yml"
    panels.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}))
    for command, path in (("rules", FOLDER / "alerts.yml"), ("rules", panels), ("config", FOLDER / "prometheus.yml")):
        checked = subprocess.run([str(PROMTOOL), "check", command, path], capture_output=True, text=True)
        assert checked.returncode == 0, checked.stdout + checked.stderr
