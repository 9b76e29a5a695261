"""The live view of a real cluster: a killed worker and the migration of its requests are events on open subscriptions.

Health checks are too rare to find the kill: the samples of the live view do.
"""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from splitserve.deploy.deployment import LocalDeployment
from splitserve.deploy.local import LocalCluster
from splitserve.tools.options import TopOptions
from splitserve.tools.top import run_top
from support.tiny_models import make_tiny_model

pytestmark = pytest.mark.process

# Seconds each wait may take.
DEADLINE = 120.0
# Two seconds of decoding and more: the kill comes after the first update of the live view, within this time.
NUM_TOKENS = 1500


class Subscription:
    """All updates of one `GET /v1/live` so far."""

    def __init__(self, client: httpx.Client, url: str) -> None:
        self._updates = self._read(client, url)
        self.seen: list[dict[str, Any]] = []

    def until(self, holds: Callable[[], object]) -> None:
        """Read updates until `holds` is true."""
        while not holds():
            self.seen.append(next(self._updates))

    def states(self) -> dict[str, str]:
        """Return the states of the workers by URL, as last seen."""
        return {worker["url"]: worker["state"] for worker in self.seen[-1]["workers"]} if self.seen else {}

    def request(self, rid: str) -> dict[str, Any]:
        """Return a request as last seen. Empty: it was not listed."""
        found = [request for update in self.seen for request in update["requests"] if request["rid"] == rid]
        return found[-1] if found else {}

    def events(self, kind: str) -> list[tuple[str, str]]:
        """Return worker and request of all events of a kind."""
        events = [event for update in self.seen for event in update["events"]]
        return [(event["worker"], event["rid"]) for event in events if event["kind"] == kind]

    @staticmethod
    def _read(client: httpx.Client, url: str) -> Iterator[dict[str, Any]]:
        with client.stream("GET", f"{url}/v1/live") as response:
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    yield json.loads(line.removeprefix("data: "))


def test_a_killed_worker_and_its_migrated_request_are_visible(tmp_path, capsys):
    model = make_tiny_model("llama", tmp_path / "llama")
    deployment = LocalDeployment(
        model=str(model),
        prefill=1,
        decode=2,
        threads=1,
        worker_args=["--max-total-tokens", "20000", "--context-length", "4096"],
        # Samples come every second.
        router_args=["--health-interval", "60"],
    )
    with LocalCluster(deployment) as cluster, httpx.Client(timeout=DEADLINE) as client:
        cluster.wait_ready(timeout=300)
        url = cluster.router_url
        params = {"max_new_tokens": NUM_TOKENS, "ignore_eos": True, "temperature": 0}
        body = {"rid": "mine", "input_ids": [5, 6, 7], "stream": True, "sampling_params": params}
        answers: list[httpx.Response] = []
        sent = threading.Thread(
            target=lambda: answers.append(httpx.post(f"{url}/generate", json=body, timeout=DEADLINE)), daemon=True
        )
        live = Subscription(client, url)
        live.until(lambda: set(live.states().values()) == {"ready"})
        sent.start()
        live.until(lambda: live.request("mine").get("output_tokens"))
        assert live.request("mine")["state"] == "running"
        worker = live.request("mine")["workers"]["decode"]
        os.kill(httpx.get(f"{worker}/server_info").json()["pid"], signal.SIGKILL)
        live.until(lambda: live.states()[worker] == "unhealthy")
        live.until(lambda: live.events("migration"))
        # On a busy machine another worker may be silent for a while.
        assert (worker, "") in live.events("worker_lost")
        assert live.events("migration") == [(worker, "mine")]
        live.until(lambda: live.request("mine")["state"] == "done")
        request = live.request("mine")
        assert (request["status"], request["migrations"], request["output_tokens"]) == (200, 1, NUM_TOKENS)
        sent.join(DEADLINE)
        assert answers[0].status_code == 200
        charts = client.get(f"{url}/v1/charts").json()
        assert max(value for value in charts["series"]["tokens_per_s"] if value is not None) > 0
        assert max(value for value in charts["series"]["itl_p50_ms"] if value is not None) > 0
        assert run_top(TopOptions(url=url, once=True)) == 0
        assert "mine" in capsys.readouterr().out
