"""The mark "serves" of docs/vocabulary.md: the part runs during a startup, a request or an operator's call.

Three deployments of tiny models run with a tracer in every process: a cluster, an offline engine with sliding windows,
and a worker with data parallel attention, both in a script. Requests and calls are those of users and operators.
"""

from __future__ import annotations

import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from support.evidence import Place, Symbol, read_trace, serves
from support.processes import running, wait_ready
from support.tiny_models import make_tiny_model
from support.vocabulary import rows

pytestmark = pytest.mark.process

TRACER = Path(__file__).parents[1] / "support" / "call_trace"
# Seconds for the start of a deployment.
DEADLINE = 300.0
KEY = "a-key-of-this-test-1"
EVENTS = json.dumps({"publisher": "zmq", "endpoint": "tcp://127.0.0.1:0", "replay_endpoint": "tcp://127.0.0.1:0"})
SCRIPT = """\
import sys

from splitserve import Engine, SamplingParams, ServerArgs, launch_server

with Engine(model_path=sys.argv[1], max_model_len=512, threads=1, speculative_algorithm="ngram") as engine:
    print(engine.generate("abc" * 40, SamplingParams(temperature=0.0, max_new_tokens=16)).text)
    print(*(chunk.text for chunk in engine.stream("abc", {"max_new_tokens": 4})))
args = dict(host="127.0.0.1", port=0, dp_size=2, enable_dp_attention=True, max_total_tokens=2048, threads=1)
launch_server(ServerArgs(model_path=sys.argv[2], exit_with_parent=True, ready_file=sys.argv[-1], **args))
"""


@pytest.fixture
def env(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    monkeypatch.setenv("SPLITSERVE_RUN_DIR", str(tmp_path / "run"))
    (tmp_path / "trace").mkdir()
    path = os.pathsep.join([str(TRACER), os.environ["PYTHONPATH"]])
    return {"CALL_TRACE_DIR": str(tmp_path / "trace"), "PYTHONPATH": path}


def write_cluster(folder: Path) -> Path:
    """Write the file of a cluster that uses as many parts as its workers can have at once. Return its path."""
    model = make_tiny_model("llama", folder / "llama", dtype=torch.bfloat16)
    draft = ["--speculative-draft-model", str(make_tiny_model("llama", folder / "draft", 1, torch.bfloat16))]
    (folder / "keys").write_text(f"{KEY} test\n")
    (folder / "keys").chmod(0o600)
    (folder / "workers").touch()
    small_pool = ["--max-total-tokens", "640", "--num-reserved-decode-tokens", "1"]
    pools = {
        "prefill": {"tp_size": 2, "args": ["--chunked-prefill-size", "32"]},
        "decode": {"pp_size": 2},
        "colocated": {
            "args": ["--speculative-algorithm", "draft", *draft, *small_pool, "--prefix-host-memory", "64M"],
        },
    }
    routing = ["--policy", "cache_aware", "--max-running-requests", "64", "--disaggregate-above", "8"]
    routing += ["--rate-limit", "100"]
    config = {
        "name": "tour",
        "model": str(model),
        "pools": {name: {"cpus": 1, **pool} for name, pool in pools.items()},
        "worker_args": ["--dtype", "bfloat16", "--max-total-tokens", "4096", "--kv-events-config", EVENTS],
        "router": {"port": 0, "args": [*routing, "--workers-file", str(folder / "workers")]},
        "keys": {"clients": str(folder / "keys")},
    }
    # JSON is YAML, too.
    path = folder / "cluster.yaml"
    path.write_text(json.dumps(config))
    return path


def body(text: str, num_tokens: int = 8, **params: Any) -> dict[str, Any]:
    return {"text": text, "sampling_params": {"max_new_tokens": num_tokens, "temperature": 0.0, **params}}


def send_requests(client: httpx.Client, colocated: str) -> None:
    """Send what clients send: to the pair, then so many to the colocated worker that some are retracted."""

    def post(url: str, body: dict[str, Any]) -> None:
        response = client.post(url, json=body)
        assert response.status_code == 200, response.text

    function = {"name": "f", "parameters": {"type": "object", "properties": {}}}
    chat = {
        "model": client.get("/v1/models").json()["data"][0]["id"],
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 8,
        "tools": [{"type": "function", "function": function}],
    }
    post("/generate", body("abc" * 40))
    post("/generate", {**body("abc" * 40), "stream": True})
    post("/generate", {**body("abcdefghijklmnop"), "return_logprob": True, "logprob_start_len": 0})
    post("/generate", body("ab"))
    post("/generate", body("0123456789 0123456789", 6, regex="[0-9]+"))
    post("/v1/chat/completions", chat)
    with ThreadPoolExecutor(8) as pool:
        bodies = [body(letter * 60, 120, ignore_eos=True) for letter in "abcdefgh"]
        for future in [pool.submit(post, f"{colocated}/generate", one) for one in bodies]:
            future.result()
    post(f"{colocated}/generate", body("a" * 60))


def abort_a_request(client: httpx.Client, workers: list[dict[str, Any]]) -> None:
    """Abort a request on decode that waits for a prompt of prefill, which does not have the request."""
    prefill, decode = (next(w for w in workers if w["mode"] == mode) for mode in ("prefill", "decode"))
    room = {"bootstrap_host": "127.0.0.1", "bootstrap_port": prefill["bootstrap_port"], "bootstrap_room": 7}
    with ThreadPoolExecutor(1) as pool:
        request = {**body("abc"), **room, "rid": "orphan"}
        waiting = pool.submit(client.post, f"{decode['url']}/generate", json=request)
        abort = {"rid": "orphan"}
        while client.post(f"{decode['url']}/abort_request", json=abort).json()["num_aborted"] == 0:
            assert not waiting.done(), waiting.result().text
        assert waiting.result().json()["meta_info"]["finish_reason"]["type"] == "abort"


def operate(client: httpx.Client, urls: dict[str, str]) -> None:
    """Call what operators call, on the router and on the workers."""
    for path in ("/health", "/ready", "/health_generate", "/server_info", "/model_info", "/metrics", "/v1/models"):
        assert client.get(path).status_code == 200, path
    for url in urls.values():
        for path in ("/health_generate", "/v1/loads", "/get_load", "/server_info", "/metrics", "/kv_index"):
            assert client.get(url + path).status_code == 200, path
    assert client.post("/flush_cache").status_code == 200
    assert client.post("/abort_request", json={"abort_all": True}).status_code == 200
    switch = {"url": urls["null"], "role": "decode", "timeout": 30}
    assert client.post("/role", json=switch).status_code == 200


def serve_a_cluster(config: Path, folder: Path, env: dict[str, str]) -> None:
    with running(["cluster", "up", str(config)], folder, name="up", env=env) as up:
        url = wait_ready(up, DEADLINE).url
        headers = {"Authorization": f"Bearer {KEY}"}
        with httpx.Client(base_url=url, timeout=60, headers=headers) as client:
            workers = client.get("/workers").json()["workers"]
            urls = {worker["mode"]: worker["url"] for worker in workers}
            send_requests(client, urls["null"])
            abort_a_request(client, workers)
            operate(client, urls)


def run_a_script(models: list[Path], folder: Path, env: dict[str, str]) -> None:
    script = folder / "script.py"
    script.write_text(SCRIPT)
    program = (sys.executable, str(script), *map(str, models))
    with running([], folder, name="script", env=env, program=program) as server:
        url = wait_ready(server, DEADLINE).url
        assert httpx.post(f"{url}/generate", json=body("abc"), timeout=60).status_code == 200


@pytest.fixture
def places(tmp_path: Path, env: dict[str, str]) -> set[Place]:
    """Return what the processes of the deployments ran. Deployments often wait, so they run at the same time."""
    cluster = write_cluster(tmp_path)
    models = [make_tiny_model(kind, tmp_path / kind, dtype=torch.bfloat16) for kind in ("gemma3", "mixtral")]
    with ThreadPoolExecutor(1) as pool:
        serving = pool.submit(serve_a_cluster, cluster, tmp_path, env)
        run_a_script(models, tmp_path, env)
        serving.result()
    return read_trace(tmp_path / "trace")


def test_every_part_that_serves_has_run(places: set[Place]) -> None:
    marked = {symbol for row in rows() if not row.needs for symbol in row.symbols}
    assert len(marked) > 100
    idle = sorted(symbol for symbol in marked if not serves(Symbol.of(symbol), places))
    assert not idle, "\n".join(idle)
