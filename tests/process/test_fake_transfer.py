"""A prefill and a decode worker, each alone with `--transfer-backend fake`, as an operator measures them."""

import json
import subprocess
import sys

import httpx
import pytest

from splitserve.server.fake_transfer import FAKE_ACCEPTED, FAKE_HEADER
from splitserve.tools.client import read_text, read_transfers
from support.processes import running, wait_ready
from support.tiny_models import make_tiny_model

pytestmark = pytest.mark.process

ACCEPT = {FAKE_HEADER: FAKE_ACCEPTED}
PROMPT = [(i * 37 + 11) % 250 for i in range(70)]
BODY = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 5, "ignore_eos": True, "temperature": 0.0}}
ARGS = [
    *("--port", "0", "--dtype", "float32", "--threads", "1", "--max-total-tokens", "2000"),
    *("--transfer-backend", "fake", "--transfer-option", "bandwidth=1", "--transfer-option", "delay=0.5"),
]


def worker_args(folder, mode):
    return ["serve", str(folder), "--disaggregation-mode", mode, "--disaggregation-bootstrap-port", "0", *ARGS]


def check_refusal_and_marks(url):
    """Return the answer of a request that accepts a fake transfer. Without the header it is refused."""
    refused = httpx.post(f"{url}/generate", json=BODY, timeout=60)
    assert refused.status_code == 400
    assert FAKE_HEADER in refused.json()["error"]["message"]
    assert httpx.get(f"{url}/health_generate", timeout=60).status_code == 200
    answer = httpx.post(f"{url}/generate", json=BODY, headers=ACCEPT, timeout=60)
    assert answer.status_code == 200, answer.text
    assert answer.json()["meta_info"]["fake_transfer"] is True
    return answer.json()


def check_prefill(url, log):
    before = read_transfers(url)
    answer = check_refusal_and_marks(url)
    # Keys and values of every layer, and the metadata row, over a link with a delay.
    assert answer["meta_info"]["kv_transfer"]["bytes"] > len(PROMPT) * 8
    assert answer["meta_info"]["kv_transfer"]["seconds"] >= 0.0005
    assert read_transfers(url).count > before.count
    assert 'backend="fake"' in read_text(f"{url}/metrics")
    assert "FAKE TRANSFER: this prefill worker has no peer" in log.read_text()


def check_decode(url, log, folder):
    first, second = (check_refusal_and_marks(url) for _ in range(2))
    assert len(first["output_ids"]) == 5
    # The KV depends on the prompt's length only, and the first token on the prompt.
    assert first["output_ids"] == second["output_ids"]
    assert first["output_ids"][0] == PROMPT[-1]
    assert first["meta_info"]["cached_tokens"] == second["meta_info"]["cached_tokens"] == 0
    log_text = log.read_text()
    assert "FAKE TRANSFER: this decode worker has no peer, and answers are MEANINGLESS" in log_text
    load = ["--concurrency", "2", "--num-prompts", "4", "--input-tokens", "20", "--output-tokens", "3"]
    command = [sys.executable, "-m", "splitserve", "bench", "serve", str(folder), "--json", "--url", url, *load]
    command += ["--ttft-runs", "0", "--header", f"{FAKE_HEADER}={FAKE_ACCEPTED}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(done.stdout)
    assert (row["num_requests"], row["num_failed"]) == (4, 0)


def test_each_role_serves_alone_and_marks_its_answers(tmp_path):
    folder = make_tiny_model("llama", tmp_path / "llama")
    with (
        running(worker_args(folder, "prefill"), tmp_path, name="prefill") as prefill,
        running(worker_args(folder, "decode"), tmp_path, name="decode") as decode,
    ):
        check_prefill(wait_ready(prefill).url, prefill.log_path)
        check_decode(wait_ready(decode).url, decode.log_path, folder)
