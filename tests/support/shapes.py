"""Real worker processes of chosen shapes, and pairs of them. Tests send requests to them directly, as a router does.

One worker of each shape serves in a pair with every shape of the other role.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import httpx
import torch
import transformers

from splitserve.core.parallel import WorkerShape
from splitserve.core.request import DisaggregationMode
from splitserve.observe.scheduler_metrics import held
from splitserve.process.child import PROGRAM, ChildProcess
from splitserve.process.lifecycle import ReadyInfo
from support.processes import running, wait_ready
from support.tiny_models import make_tiny_model
from support.tokens import write_token_file

_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
_ANSWER_SECONDS = 120.0
_INIT_PORT = 20000


def make_divisible_model(folder: Path) -> Path:
    """Save a tiny random Llama of 3 layers for 1, 2 or 4 tensor parallel ranks. With 4, ranks share 2 KV heads."""
    config = transformers.AutoConfig.from_pretrained(make_tiny_model("llama", folder))
    config.num_attention_heads, config.num_key_value_heads = 8, 2
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(folder)
    return folder


class Shapes:
    """Workers of one model (float32). Use as a context manager. `folder` receives their logs."""

    def __init__(self, model: str, folder: Path, *, backend: str = "tcp", args: Sequence[str] = ()) -> None:
        self._model = model
        self._folder = folder
        self._args = ["--dtype", "float32", "--threads", "1", "--transfer-backend", backend, *args]
        self._closing = ExitStack()
        self._num_started = 0
        # Threads share the client, so each request has a connection of its own.
        limits = httpx.Limits(max_keepalive_connections=0)
        self._http = self._closing.enter_context(httpx.Client(timeout=_ANSWER_SECONDS, limits=limits, trust_env=False))
        self._pool = self._closing.enter_context(ThreadPoolExecutor(32))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.close()

    def start(
        self, mode: DisaggregationMode, shape: WorkerShape, *args: str, program: Sequence[str] = PROGRAM
    ) -> ChildProcess:
        """Start one worker, not yet ready."""
        self._num_started += 1
        command = ["serve", self._model, "--port", "0", "--disaggregation-mode", mode, *shape.args, *self._args, *args]
        if mode is DisaggregationMode.PREFILL:
            command += ["--disaggregation-bootstrap-port", "0"]
        name = f"{mode}-{self._num_started}"
        return self._closing.enter_context(running(command, self._folder, name=name, env=_ENVIRONMENT, program=program))

    def start_nodes(
        self, mode: DisaggregationMode, shape: WorkerShape, num_nodes: int, *args: str
    ) -> list[ChildProcess]:
        """Start one worker over `num_nodes` nodes, node 0 first. Each has a loopback address of its own."""
        hosts = [f"{_own_network()}.{8 * self._num_started + node + 1}" for node in range(num_nodes)]
        token = self._folder / "token"
        if not token.exists():
            write_token_file(token)
        # No other process uses these addresses, so every port is free.
        common = [*args, "--nnodes", str(num_nodes), "--dist-init-addr", f"{hosts[0]}:{_INIT_PORT}"]
        common += ["--cluster-token-file", str(token)]
        own: list[list[str]] = [["--node-rank", "0"]]
        own += [["--node-rank", str(i), "--host", host] for i, host in enumerate(hosts) if i]
        return [self.start(mode, shape, *common, *each) for each in own]

    def generate(self, worker: ReadyInfo, prompt: Sequence[int], **more: Any) -> httpx.Response:
        """Send a `/generate` request, greedy by default."""
        params = {"temperature": 0.0, **more.pop("sampling_params", {})}
        headers = more.pop("headers", None)
        body = {"input_ids": list(prompt), "sampling_params": params, **more}
        return self._http.post(f"{worker.url}/generate", json=body, headers=headers)

    def generate_apart(
        self, prefill: ReadyInfo, decode: ReadyInfo, prompt: Sequence[int], host: str = "127.0.0.1", **more: Any
    ) -> httpx.Response:
        """Send a request to a pair of workers and return decode's answer. `host`: of prefill's bootstrap server."""
        room = {
            "bootstrap_host": host,
            "bootstrap_port": prefill.bootstrap_port,
            "bootstrap_room": secrets.randbits(62),
        }
        other = self._pool.submit(self.generate, prefill, prompt, **room, **more)
        answer = self.generate(decode, prompt, **room, **more)
        if answer.status_code == 200:
            assert other.result().status_code == 200, other.result().text
        return answer

    def outputs(
        self, worker: ChildProcess, asked: Sequence[tuple[Sequence[int], Mapping[str, Any]]]
    ) -> list[list[int]]:
        """Return the output ids for each (prompt, sampling parameters), one after the other."""
        info = wait_ready(worker)
        answers = [self.generate(info, prompt, sampling_params=sampling) for prompt, sampling in asked]
        return [answer.json()["output_ids"] for answer in answers]

    def answers_apart(
        self, prefill: ChildProcess, decode: ChildProcess, asked: Sequence[tuple[Sequence[int], Mapping[str, Any]]]
    ) -> list[dict[str, Any]]:
        """Return the answers of a pair to each (prompt, sampling parameters), sent all at once."""
        pair = wait_ready(prefill), wait_ready(decode)
        with ThreadPoolExecutor(len(asked)) as pool:
            answers = list(pool.map(lambda a: self.generate_apart(*pair, a[0], sampling_params=a[1]), asked))
        assert [answer.status_code for answer in answers] == [200] * len(asked), answers[0].text
        return [answer.json() for answer in answers]

    def check_health(self, worker: ReadyInfo) -> None:
        assert self._http.get(f"{worker.url}/health_generate").status_code == 200

    def state(self, worker: ReadyInfo) -> dict[str, Any]:
        state: dict[str, Any] = self._http.get(f"{worker.url}/server_info").json()["internal_states"][0]
        return state

    def wait_running(self, worker: ReadyInfo, num_requests: int, within: float = 60.0) -> None:
        """Wait until `num_requests` requests run on the worker."""
        deadline = time.monotonic() + within
        while (found := self.state(worker)["num_running_reqs"]) != num_requests:
            assert time.monotonic() < deadline, f"{found} of {num_requests} requests run at {worker.url}"

    def check_nothing_is_held(self, *children: ChildProcess, within: float = 30.0) -> None:
        """Assert that all pages, rows and slots are freed soon after the last request."""
        deadline = time.monotonic() + within
        for child in children:
            while problem := held(self.state(wait_ready(child))):
                assert time.monotonic() < deadline, f"{child.name} keeps something: {problem}\n{child.log_tail()}"


def _own_network() -> str:
    """Return the first three numbers of loopback addresses that no other process of this machine uses."""
    pid = os.getpid()
    return f"127.{pid % 250 + 1}.{pid // 250 % 250 + 1}"
