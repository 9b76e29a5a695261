"""The commands a user starts with, as a user starts them."""

import json
import subprocess
import sys

import pytest
import torch

from splitserve.cli import main
from splitserve.transfer.transports import missing
from support.tiny_models import make_tiny_model

pytestmark = pytest.mark.process


def splitserve(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "splitserve", *args], capture_output=True, text=True, timeout=300, check=False
    )


TRANSPORTS = (["tcp"], ["shm"], ["shm", "--hand-over"], ["gloo"], ["mooncake"], ["nixl"])


# Over tcp test_parity.py has the real model, over shm test_offline.py; the contract suite has every transport.
@pytest.mark.parametrize(
    ("model", "transport"),
    [
        ("tiny", ["shm", "--hand-over"]),
        *(pytest.param("smollm2", options, marks=pytest.mark.soak) for options in TRANSPORTS),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_verify_proves_equality_over_every_transport(tmp_path, model, transport, capsys):
    if problem := missing(transport[0]):
        pytest.skip(problem)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"text": "The capital of France is"}\n{"input_ids": [195, 28]}\n"One, two, three,"\n')
    options = ["--prompts", str(prompts), "--max-tokens", "4", "--threads", "1", "--json"]
    if model == "tiny":
        model = str(make_tiny_model("llama", tmp_path / "llama", dtype=torch.bfloat16))
    # In this process, so that workers fork from the template. The demo below is a command in a process of its own.
    with pytest.raises(SystemExit) as end:
        main(["verify", model, "--transfer-backend", *transport, *options])
    printed = capsys.readouterr()
    assert end.value.code == 0, printed
    report = json.loads(printed.out)
    assert (report["equal"], report["prompts"], report["mismatches"]) == (True, 3, [])
    if report["dtype"] == "bfloat16":
        assert report["max_logprob_delta"] == 0
    (found,) = report["transports"]
    assert found["equal_answers"] == found["answers"] == {"colocated": 6, "disaggregated": 12}


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
    # float32 if there was no C compiler at installation.
    assert "in bfloat16" in row or "in float32" in row
    assert "yes" in row
    # The KV of the 42 tokens of the question, without that of checks before it.
    assert ("948 KiB" if "in bfloat16" in row else "1.85 MiB") in done.stdout
