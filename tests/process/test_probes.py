"""A prefill worker that joins while the only decode worker is overloaded: its probe passes the requests of clients."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
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
NUM_CLIENTS = 48
# One answer takes most of the decode worker's pool, so requests wait for minutes.
POOL_TOKENS = 1200
BODY = {"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 1000, "ignore_eos": True}}


def until(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < deadline, "the condition never became true"
        time.sleep(POLL_INTERVAL)


def test_a_prefill_worker_is_proven_while_the_only_decode_worker_is_overloaded(tmp_path: Path) -> None:
    model = make_tiny_model("llama", tmp_path / "model")
    write_token_file(tmp_path / "token")
    with ExitStack() as closing:
        router = wait_ready(closing.enter_context(running(["router", "--port", "0"], tmp_path, name="router"))).url

        def start(name: str, mode: str, *more: str) -> str:
            args = ["serve", str(model), "--disaggregation-mode", mode, "--router", router, "--port", "0", *more]
            args += ["--disaggregation-bootstrap-port", "0", "--device", "cpu", "--threads", "1"]
            args += ["--max-total-tokens", str(POOL_TOKENS), "--cluster-token-file", str(tmp_path / "token")]
            return wait_ready(closing.enter_context(running(args, tmp_path, name=name))).url

        start("prefill-1", "prefill")
        decode = start("decode", "decode")

        def is_ready(url: str) -> bool:
            workers = httpx.get(f"{router}/workers").json()["workers"]
            return any(worker["url"] == url and worker["ready"] for worker in workers)

        def num_waiting() -> int:
            states = httpx.get(f"{decode}/server_info", timeout=DEADLINE).json()["internal_states"]
            return sum(state["num_decode_prealloc_queue_reqs"] for state in states)

        until(lambda: is_ready(decode))
        pool = closing.enter_context(ThreadPoolExecutor(NUM_CLIENTS))
        answers = [pool.submit(httpx.post, f"{router}/generate", json=BODY, timeout=None) for _ in range(NUM_CLIENTS)]
        until(lambda: num_waiting() > 0)
        late = start("prefill-2", "prefill")
        until(lambda: is_ready(late))
        assert num_waiting() > 0, "the decode worker was no longer overloaded"
        httpx.post(f"{router}/abort_request", json={"abort_all": True}, timeout=DEADLINE)
        assert {answer.result(DEADLINE).status_code for answer in answers} <= {200, 499}
