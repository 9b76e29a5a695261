"""The commands a user starts with, as a user starts them."""

import json
import subprocess
import sys

import pytest

from splitserve.disaggregation.transports import missing

pytestmark = pytest.mark.process


def splitserve(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "splitserve", *args], capture_output=True, text=True, timeout=300, check=False
    )


# Over tcp test_parity.py has the real model, over shm test_offline.py; the contract suite has every transport.
@pytest.mark.parametrize(
    "transport",
    [
        pytest.param(["tcp"], marks=pytest.mark.soak),
        pytest.param(["shm"], marks=pytest.mark.soak),
        ["shm", "--hand-over"],
        pytest.param(["gloo"], marks=pytest.mark.soak),
        pytest.param(["mooncake"], marks=pytest.mark.soak),
        pytest.param(["nixl"], marks=pytest.mark.soak),
    ],
    ids=" ".join,
)
def test_verify_proves_equality_over_every_transport(tmp_path, transport):
    if problem := missing(transport[0]):
        pytest.skip(problem)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"text": "The capital of France is"}\n{"input_ids": [19556, 28]}\n"One, two, three,"\n')
    options = ["--prompts", str(prompts), "--max-tokens", "4", "--threads", "1", "--json"]
    done = splitserve("verify", "smollm2", "--transfer-backend", *transport, *options)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert (report["equal"], report["prompts"], report["mismatches"]) == (True, 3, [])
    assert 0 <= report["max_logprob_delta"] < 1e-3


def test_verify_names_a_bad_line(tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"text": "fine"}\n{"txt": "not"}\n')
    done = splitserve("verify", "smollm2", "--prompts", str(prompts))
    assert done.returncode == 2
    assert "line 2" in done.stderr


def test_the_demo_answers_and_ends_with_success():
    done = splitserve("demo", "--max-tokens", "8")
    assert done.returncode == 0, done.stderr
    assert "The capital of France is Paris" in done.stdout
    row = next(line for line in done.stdout.splitlines() if "equal to colocated" in line)
    assert "in float32" in row
    assert "yes" in row
