"""A pair over HTTP releases its memory and gets new weights: answers are correct before, between and after."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import transformers

from splitserve import Engine
from splitserve.core.errors import InvalidRequestError, WorkerUnavailableError
from splitserve.deploy.deployment import LocalDeployment
from splitserve.deploy.local import LocalCluster
from splitserve.process.child import POLL_INTERVAL
from support.deployment import Deployment
from support.reference import Reference, greedy_reference
from support.tiny_models import make_tiny_model

pytestmark = pytest.mark.process

PROMPT = list(range(2, 60))
NUM_TOKENS = 12
DEADLINE = 120.0


def reference(folder: Path) -> Reference:
    return greedy_reference(transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval())


class MemoryPair(Deployment):
    """A router, a prefill worker and a decode worker."""

    @property
    def pair(self) -> list[str]:
        return [self.worker("prefill"), self.worker("decode")]

    def post(self, url: str, path: str, status: int = 200, **body: Any) -> dict[str, Any]:
        response = self.client.post(f"{url}/{path}", json=body)
        assert response.status_code == status, response.text
        answer: dict[str, Any] = response.json()
        assert answer["success"] is (status == 200)
        return answer

    def ask(self, num_tokens: int = NUM_TOKENS) -> httpx.Response:
        params = {"temperature": 0.0, "max_new_tokens": num_tokens, "ignore_eos": True}
        body = {"input_ids": PROMPT, "sampling_params": params}
        return self.client.post(f"{self.cluster.router_url}/generate", json=body)

    def wait_for(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + DEADLINE
        while not condition():
            assert time.monotonic() < deadline
            time.sleep(POLL_INTERVAL)

    def check_tokens(self, expected: list[int], num_cached: int | None = None) -> None:
        """Wait until the router serves again, and compare the tokens of the first answer."""
        answers: list[httpx.Response] = []
        self.wait_for(lambda: (answers.append(self.ask()), answers[-1].status_code == 200)[1])  # type: ignore[func-returns-value]
        answer = answers[-1].json()
        assert answer["output_ids"] == expected
        if num_cached is not None:
            assert answer["meta_info"]["cached_tokens"] == num_cached


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[MemoryPair]:
    model = make_tiny_model("llama", tmp_path / "old")
    args = ["--max-total-tokens", "4000", "--device", "cpu"]
    deployment = LocalDeployment(
        model=str(model),
        dtype="float32",
        threads=1,
        backend="shm",
        worker_args=args,
        # A request fails at once while no worker serves.
        router_args=("--worker-wait-timeout", "0"),
    )
    with LocalCluster(deployment) as cluster, httpx.Client(timeout=DEADLINE) as client:
        cluster.wait_ready(timeout=DEADLINE)
        yield MemoryPair(cluster, client)


def test_a_pair_releases_its_memory_and_gets_new_weights(pair: MemoryPair, tmp_path: Path) -> None:
    prefill, decode = pair.pair
    old = reference(tmp_path / "old")(PROMPT, NUM_TOKENS)
    pair.check_tokens(old)

    # A running request blocks a change, unless it may be aborted.
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(pair.ask, 3000)
        pair.wait_for(lambda: pair.state(decode)["num_running_reqs"] == 1)
        blocked = pair.post(decode, "release_memory_occupation", 409)
        assert "requests are running on this worker (1)" in blocked["message"]
        assert blocked["error"]["code"] == "memory_blocked"
        pair.post(decode, "release_memory_occupation", abort=True)
        answer = running.result()
        assert answer.status_code != 200 or len(answer.json()["output_ids"]) < 3000
    pair.post(prefill, "release_memory_occupation", drain=True, tags=["kv_cache"])
    for url, names in ((decode, "kv_cache and weights"), (prefill, "kv_cache")):
        health = pair.client.get(f"{url}/health")
        assert health.status_code == 503
        assert f"released its memory ({names})" in health.text
        assert pair.client.get(f"{url}/server_info").json()["status"] == "memory_released"
        pair.post(url, "update_weights_from_disk", 400, model_path=str(tmp_path / "nothing"))
    assert pair.ask().status_code == 503
    for url in pair.pair:
        assert pair.post(url, "resume_memory_occupation")["released"] == []
    pair.check_tokens(old, num_cached=0)

    # Only one of the two has the new weights: nothing is computed from both.
    new_model = make_tiny_model("llama", tmp_path / "new", seed=1)
    new = reference(new_model)(PROMPT, NUM_TOKENS)
    assert new != old
    pair.post(prefill, "update_weights_from_disk", model_path=str(new_model), drain=True)
    pair.wait_for(lambda: pair.client.get(f"{prefill}/health").status_code == 200)
    assert pair.ask().status_code == 503
    shared = Path("/dev/shm") / f"splitserve-test-{os.getpid()}.safetensors"
    try:
        shared.write_bytes((new_model / "model.safetensors").read_bytes())
        pair.post(decode, "update_weights_from_shared_memory", name=shared.name, drain=True)
        pair.check_tokens(new, num_cached=0)
    finally:
        shared.unlink()
    assert pair.client.get(f"{prefill}/model_info").json()["model_path"] == str(new_model)
    pair.check_nothing_is_held()


def test_an_offline_engine_releases_its_memory_and_gets_new_weights(tmp_path: Path) -> None:
    models = [make_tiny_model("llama", tmp_path / str(seed), seed=seed) for seed in range(2)]
    old, new = (reference(model)(PROMPT, NUM_TOKENS) for model in models)
    greedy = {"temperature": 0.0, "max_new_tokens": NUM_TOKENS, "ignore_eos": True}
    options: dict[str, Any] = {"dtype": "float32", "threads": 1, "device": "cpu", "max_total_tokens": 4000}
    with Engine(str(models[0]), progress=False, **options) as engine:
        assert list(engine.generate(PROMPT, greedy).token_ids) == old
        with pytest.raises(InvalidRequestError, match="'gpu' is none of kv_cache, weights"):
            engine.release_memory_occupation(["gpu"])
        engine.release_memory_occupation()
        with pytest.raises(WorkerUnavailableError, match="released its memory"):
            engine.generate(PROMPT, greedy)
        engine.update_weights_from_disk(str(models[1]))
        engine.resume_memory_occupation()
        assert list(engine.generate(PROMPT, greedy).token_ids) == new
        with pytest.raises(InvalidRequestError, match="nothing"):
            engine.update_weights_from_disk(str(tmp_path / "nothing"))
        assert list(engine.generate(PROMPT, greedy).token_ids) == new
