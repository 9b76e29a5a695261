"""A real Prometheus scrapes a live `up`: the metrics of dashboard and alert rules are there, with exemplars."""

from __future__ import annotations

import json
import re
import shutil
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from splitserve.process.child import POLL_INTERVAL
from support.commands import DEADLINE, RunningCommand, running_command
from support.tiny_models import make_tiny_model

PROMETHEUS = shutil.which("prometheus")
pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(PROMETHEUS is None, reason="prometheus is missing: apt-get install prometheus"),
]
FOLDER = Path(__file__).parents[2] / "examples" / "monitoring"
METRIC = re.compile(r"splitserve(?:_router)?:\w+")
# Series that exist only after an event that this test does not cause: a label value appears with the first event.
RARE = re.compile(r".*(errors|retries|rejections|requests_rejected)_total")


def monitoring_config(folder: Path, router: str) -> Path:
    """Return a copy of the example's configuration that scrapes this router every second."""
    config = yaml.safe_load((FOLDER / "prometheus.yml").read_text())
    config["global"]["scrape_interval"] = "1s"
    config["rule_files"] = [str(FOLDER / "alerts.yml")]
    config["scrape_configs"] = config["scrape_configs"][:1]
    config["scrape_configs"][0]["static_configs"] = [{"targets": [router.removeprefix("http://")]}]
    path = folder / "prometheus.yml"
    path.write_text(yaml.safe_dump(config))
    return path


def prometheus_command(folder: Path, router: str) -> list[str]:
    return [
        str(PROMETHEUS),
        f"--config.file={monitoring_config(folder, router)}",
        f"--storage.tsdb.path={folder / 'data'}",
        "--web.listen-address=127.0.0.1:0",
        "--enable-feature=exemplar-storage",
    ]


def query(prometheus: RunningCommand, path: str, **params: str) -> Any:
    port = re.findall(r'msg="Listening on" address=127\.0\.0\.1:(\d+)', prometheus.output)[-1]
    answer = httpx.get(f"http://127.0.0.1:{port}/api/v1/{path}", params=params, timeout=DEADLINE).json()
    assert answer["status"] == "success", answer
    return answer["data"]


def queries() -> list[str]:
    panels = json.loads((FOLDER / "grafana-dashboard.json").read_text())["panels"]
    groups = yaml.safe_load((FOLDER / "alerts.yml").read_text())["groups"]
    shown = [target["expr"] for panel in panels for target in panel.get("targets", ())]
    return shown + [rule["expr"] for group in groups for rule in group["rules"]]


def test_prometheus_stores_what_dashboard_and_alert_rules_query(tmp_path):
    model = make_tiny_model("llama", tmp_path / "llama")
    options = ["--port", "0", "--dtype", "float32", "--threads", "1", "--max-total-tokens", "4096"]
    options += ["--metrics-include-workers", "--metrics-compat", "vllm,sglang"]
    up, scraper = tmp_path / "up", tmp_path / "prometheus"
    up.mkdir()
    scraper.mkdir()
    with running_command("up", str(model), *options, folder=up) as command:
        command.wait_for("ready at ")
        router = re.findall(r"^ready at (\S+) ", command.output, re.MULTILINE)[0]
        body = {"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 8, "ignore_eos": True}}
        for _ in range(3):
            httpx.post(f"{router}/generate", json=body, timeout=DEADLINE).raise_for_status()
        program = prometheus_command(scraper, router)
        with running_command(folder=scraper, program=program) as prometheus:
            prometheus.wait_for('msg="Listening on"')
            check_names(prometheus)
            check_exemplars(prometheus)
            for expression in queries():
                text = (
                    expression.replace("$__rate_interval", "5m").replace("$model_name", ".*").replace("$instance", ".*")
                )
                query(prometheus, "query", query=text)
            rules = query(prometheus, "rules")["groups"][0]["rules"]
            assert {rule["health"] for rule in rules} <= {"ok", "unknown"}
        command.children()


def check_names(prometheus: RunningCommand) -> None:
    used = {name for text in queries() for name in METRIC.findall(text) if not RARE.fullmatch(name)}
    used |= {"vllm:num_requests_running", "sglang:num_running_reqs", "vllm:e2e_request_latency_seconds_bucket"}
    deadline = time.monotonic() + DEADLINE
    while missing := used - set(query(prometheus, "label/__name__/values")):
        assert time.monotonic() < deadline, missing
        time.sleep(POLL_INTERVAL)
    workers = query(prometheus, "query", query="count by (worker) (splitserve:num_requests_running)")["result"]
    assert len({series["metric"]["worker"] for series in workers}) == 2
    assert query(prometheus, "query", query='up{job="splitserve-router"}')["result"][0]["value"][1] == "1"


def check_exemplars(prometheus: RunningCommand) -> None:
    now = time.time()
    for name in (
        "splitserve_router:time_to_first_token_seconds_bucket",
        "splitserve:e2e_request_latency_seconds_bucket",
    ):
        found = query(prometheus, "query_exemplars", query=name, start=str(now - 600), end=str(now + 60))
        exemplars = [exemplar for series in found for exemplar in series["exemplars"]]
        assert exemplars
        assert all(len(exemplar["labels"]["trace_id"]) == 32 for exemplar in exemplars)
