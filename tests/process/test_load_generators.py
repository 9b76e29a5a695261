"""Load generators of others run unchanged against the router, and count what we count.

They are big, and none of them is a dependency: install each where you like and put its `bin` on the PATH.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from splitserve.deploy.deployment import LocalDeployment
from splitserve.deploy.local import LocalCluster
from support.tiny_models import make_tiny_model

pytestmark = [pytest.mark.process, pytest.mark.soak]

NUM_REQUESTS, PROMPT_TOKENS, OUTPUT_TOKENS = 24, 100, 16
# Seconds for one of them, most of which its imports take.
TIMEOUT = 300.0


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make_tiny_model("llama", tmp_path_factory.mktemp("model") / "llama")


@pytest.fixture(scope="module")
def url(model) -> Iterator[str]:
    args = ["--max-total-tokens", "8000", "--served-model-name", "tiny"]
    with LocalCluster(LocalDeployment(model=str(model), dtype="float32", threads=1, worker_args=args)) as cluster:
        cluster.wait_ready(timeout=180)
        yield cluster.router_url


def run(command: list[str], folder: Path) -> None:
    program = shutil.which(command[0])
    if program is None:
        pytest.skip(f"{command[0]} is not on the PATH")
    done = subprocess.run(
        [program, *command[1:]], cwd=folder, capture_output=True, text=True, timeout=TIMEOUT, check=False
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]


@pytest.mark.parametrize("kind", ["chat", "completions"])
def test_aiperf(url, model, tmp_path, kind):
    command = ["aiperf", "profile", "-m", "tiny", "--tokenizer", str(model), "-u", url, "--endpoint-type", kind]
    command += ["--streaming", "--use-server-token-count", "--concurrency", "4", "--request-count", str(NUM_REQUESTS)]
    command += ["--isl", str(PROMPT_TOKENS), "--osl", str(OUTPUT_TOKENS), "--extra-inputs", "ignore_eos:true"]
    run([*command, "--ui", "simple", "--artifact-dir", str(tmp_path)], tmp_path)
    found = json.loads((tmp_path / "profile_export_aiperf.json").read_text())
    assert found["request_count"]["avg"] == NUM_REQUESTS
    assert not found["error_summary"]
    assert found["output_sequence_length"]["min"] == found["output_sequence_length"]["max"] == OUTPUT_TOKENS
    check_times(found["time_to_first_token"], found["inter_token_latency"], found["request_latency"])


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_guidellm(url, model, tmp_path, path):
    data = f"kind=synthetic_text,prompt_tokens={PROMPT_TOKENS},output_tokens={OUTPUT_TOKENS}"
    command = ["guidellm", "run", "--backend", f"kind=openai_http,target={url},request_format={path}"]
    command += ["--profile", "kind=concurrent,streams=4", "--constraint", f"kind=max_requests,count={NUM_REQUESTS}"]
    command += ["--tokenizer", f"kind=huggingface_auto,model={model}", "--data", data, "--disable-console"]
    run([*command, "--output", f"kind=json,path={tmp_path / 'report.json'}"], tmp_path)
    (found,) = json.loads((tmp_path / "report.json").read_text())["benchmarks"]
    metrics = found["metrics"]
    assert metrics["request_totals"] == {
        "successful": NUM_REQUESTS,
        "errored": 0,
        "incomplete": 0,
        "total": NUM_REQUESTS,
    }
    tokens = metrics["output_token_count"]["successful"]
    assert tokens["min"] == tokens["max"] == OUTPUT_TOKENS
    names = ("time_to_first_token_ms", "inter_token_latency_ms", "request_latency")
    ttft, itl, latency = ({"avg": metrics[name]["successful"]["mean"]} for name in names)
    check_times(ttft, itl, {"avg": latency["avg"] * 1000})


def check_times(ttft: dict[str, Any], itl: dict[str, Any], latency: dict[str, Any]) -> None:
    """In milliseconds: the parts add up to the whole, so tokens were seen as they came."""
    assert 0 < ttft["avg"] < latency["avg"]
    assert ttft["avg"] + itl["avg"] * (OUTPUT_TOKENS - 1) == pytest.approx(latency["avg"], rel=0.1)
