"""Real workers that differ from their prefill worker: nothing is generated from wrong KV, and operators learn why."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from splitserve.process.child import POLL_INTERVAL
from support.processes import running, wait_ready
from support.tiny_models import make_tiny_model
from support.tokens import write_token_file

pytestmark = pytest.mark.process

DEADLINE = 120.0
REQUEST = {"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 4, "temperature": 0.0}}


class Cluster:
    """A router and workers of one token; `start` starts one more."""

    def __init__(self, folder: Path, closing: ExitStack) -> None:
        self._folder = folder
        self._closing = closing
        self._token = folder / "token"
        write_token_file(self._token)
        options = ["router", "--port", "0", "--health-interval", "0.5"]
        self.url = wait_ready(closing.enter_context(running(options, folder, name="router"))).url

    def start(self, name: str, mode: str, model: Path, dtype: str) -> str:
        args = ["serve", str(model), "--disaggregation-mode", mode, "--router", self.url, "--dtype", dtype]
        args += ["--port", "0", "--disaggregation-bootstrap-port", "0", "--device", "cpu", "--threads", "1"]
        args += ["--max-total-tokens", "2000", "--cluster-token-file", str(self._token)]
        return wait_ready(self._closing.enter_context(running(args, self._folder, name=name))).url

    def ready(self) -> tuple[int, str]:
        response = httpx.get(f"{self.url}/ready")
        return response.status_code, response.text

    def wait_until_ready_says(self, text: str) -> None:
        deadline = time.monotonic() + DEADLINE
        while text not in (answer := self.ready()[1]):
            assert time.monotonic() < deadline, answer
            time.sleep(POLL_INTERVAL)

    def generate(self) -> httpx.Response:
        return httpx.post(f"{self.url}/generate", json=REQUEST, timeout=DEADLINE)

    def differences(self) -> dict[str, list[dict[str, Any]]]:
        workers = httpx.get(f"{self.url}/workers").json()["workers"]
        return {worker["url"]: worker["incompatible"] for worker in workers}


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with ExitStack() as closing:
        yield Cluster(tmp_path, closing)


def changed_copy(model: Path, folder: Path) -> Path:
    """The same model with other bytes in the middle of its weights; size and config stay."""
    copy = make_tiny_model("llama", folder)
    weights = copy / "model.safetensors"
    content = bytearray(weights.read_bytes())
    assert content == (model / "model.safetensors").read_bytes()
    middle = len(content) // 2
    content[middle : middle + 8] = bytes(byte ^ 1 for byte in content[middle : middle + 8])
    weights.write_bytes(content)
    return copy


def test_workers_that_differ_get_no_request_until_one_comes_that_fits(cluster: Cluster, tmp_path: Path) -> None:
    model = make_tiny_model("llama", tmp_path / "model")
    prefill = cluster.start("prefill", "prefill", model, "bfloat16")
    other_weights = cluster.start("decode-1", "decode", changed_copy(model, tmp_path / "changed"), "bfloat16")
    cluster.wait_until_ready_says("model fingerprint")
    other_dtype = cluster.start("decode-2", "decode", model, "float16")
    cluster.wait_until_ready_says("dtype of layer 0")
    response = cluster.generate()
    assert (response.status_code, response.json()["error"]["code"]) == (503, "worker_unavailable"), response.text
    assert "127.0.0.1" not in response.json()["error"]["message"]
    differences = cluster.differences()
    assert {entry["url"] for entry in differences[prefill]} == {other_weights, other_dtype}
    assert [entry["url"] for entry in differences[other_weights]] == [prefill]
    fits = cluster.start("decode-3", "decode", model, "bfloat16")
    cluster.wait_until_ready_says('"ready":true')
    assert cluster.differences()[fits] == []
    assert [cluster.generate().status_code for _ in range(3)] == [200] * 3
