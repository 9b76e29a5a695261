"""Real deployment with a real model for tests: router, prefill, decode and a colocated worker."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx

from splitserve.core.request import DisaggregationMode
from splitserve.deploy.deployment import LocalDeployment
from splitserve.deploy.local import LocalCluster
from splitserve.observe.scheduler_metrics import held

MODEL = "smollm2"
# Options of workers. By default `tcp` writes directly between workers of one host, like `shm`.
THROUGH_SOCKETS = ("--transfer-option", "direct=false")


@dataclass
class Deployment:
    """Cluster and its client. Mode "disaggregated" sends to the router, "colocated" to the null worker."""

    cluster: LocalCluster
    client: httpx.Client

    def url(self, mode: str) -> str:
        return self.cluster.router_url if mode == "disaggregated" else self.worker("null")

    def worker(self, role: str) -> str:
        return self.cluster.urls(DisaggregationMode(role))[0]

    def workers(self) -> list[str]:
        """Return the URLs of the workers that run. The cluster's status may still contain one that has just ended."""
        return [url for role in DisaggregationMode for url in self.cluster.urls(role)]

    def generate(self, mode: str, prompt: list[int], **more: Any) -> dict[str, Any]:
        """Send a `/generate` request, greedy by default, and return the body of its response."""
        params = {"temperature": 0.0, **more.pop("sampling_params", {})}
        body = {"input_ids": prompt, "sampling_params": params, **more}
        response = self.client.post(f"{self.url(mode)}/generate", json=body)
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return answer

    def generate_all(self, mode: str, prompts: list[list[int]], at_a_time: int, **more: Any) -> list[dict[str, Any]]:
        with ThreadPoolExecutor(at_a_time) as pool:
            return list(pool.map(lambda prompt: self.generate(mode, prompt, **dict(more)), prompts))

    def state(self, worker_url: str) -> dict[str, Any]:
        state: dict[str, Any] = self.client.get(f"{worker_url}/server_info").json()["internal_states"][0]
        return state

    def flush(self) -> None:
        for url in self.workers():
            assert self.client.post(f"{url}/flush_cache").status_code == 200

    def check_nothing_is_held(self, within: float = 15.0) -> None:
        """Assert that all workers have freed all pages, rows and metadata slots, with no failed conservation check."""
        deadline = time.monotonic() + within
        for url in self.workers():
            while problem := held(self.state(url)):
                assert time.monotonic() < deadline, f"{url} keeps something: {problem}"


def deploy(
    *, chunk: int = 2048, dtype: str = "auto", max_total_tokens: int = 40_000, worker_args: Sequence[str] = ()
) -> Iterator[Deployment]:
    args = ["--chunked-prefill-size", str(chunk), "--max-total-tokens", str(max_total_tokens), *worker_args]
    with LocalCluster(LocalDeployment(model=MODEL, null=1, dtype=dtype, threads=1, worker_args=args)) as cluster:
        cluster.wait_ready(timeout=180)
        with httpx.Client(timeout=300) as client:
            yield Deployment(cluster, client)
