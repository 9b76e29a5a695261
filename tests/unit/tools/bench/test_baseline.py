"""The baseline: what it runs on a tiny model, and how its process is driven."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest
import torch
import transformers
from rich.console import Console

from splitserve.tools.bench.baseline import BaselineJob, run_job
from splitserve.tools.bench.stats import StreamRecord
from splitserve.tools.bench.systems import TransformersSystem
from splitserve.tools.bench.workload import Prompt
from splitserve.tools.client import RequestFailedError
from support.tiny_models import make_tiny_model

# Answers every job with as many records as it has prompts.
ECHO = """
import json, sys
assert json.loads(sys.stdin.readline()) == {"folder": "folder", "dtype": "float32", "threads": 1}
for line in sys.stdin:
    job = json.loads(line)
    n = job["max_tokens"]
    record = {"sent_at": 0.0, "arrived_at": [1.0] * n, "num_prompt_tokens": 4, "num_output_tokens": n}
    print(json.dumps([record] * len(job["prompts"])), flush=True)
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    torch.set_num_threads(1)
    folder = make_tiny_model("llama", tmp_path_factory.mktemp("model") / "llama")
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def test_every_prompt_of_a_batch_gets_all_its_tokens_each_step_timed(model):
    records = run_job(model, BaselineJob(prompts=[[5, 6, 7], [8]], max_tokens=6))
    assert [(r.num_prompt_tokens, r.num_output_tokens) for r in records] == [(3, 6), (1, 6)]
    assert records[0].sent_at < records[0].arrived_at[0]
    assert len(set(records[0].arrived_at)) == 6


def ask(program, *prompts, timeout=60.0):
    """Return the answers to the prompts, each one a batch."""
    system = TransformersSystem("baseline", Path("folder"), "float32", 1, (sys.executable, "-c", program))
    with system.running(Console(file=io.StringIO())) as running:
        return [running.endpoint.ask([Prompt(ids=ids, text="")], len(ids), timeout) for ids in prompts]


def test_each_line_of_the_process_is_the_answer_to_a_batch():
    assert ask(ECHO, [1, 2], [3]) == [[StreamRecord(0.0, [1.0, 1.0], 4, 2)], [StreamRecord(0.0, [1.0], 4, 1)]]


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("import sys; sys.exit('no such model')", "code 1.*\n*.*no such model"),
        ("import sys; sys.stdin.readline()", "ended with code 0"),
    ],
)
def test_a_process_that_fails_or_ends_early_is_an_error(program, message):
    with pytest.raises(RequestFailedError, match=message):
        ask(program, [1])


def test_a_process_that_hangs_is_killed_at_its_deadline():
    with pytest.raises(RequestFailedError, match="code -9"):
        ask("import threading; threading.Event().wait()", [1], timeout=0.5)


def test_the_real_process_runs_a_batch(tmp_path):
    folder = make_tiny_model("llama", tmp_path / "llama")
    system = TransformersSystem("baseline", folder, "float32", 1)
    with system.running(Console(file=io.StringIO())) as running:
        [record] = running.endpoint.ask([Prompt(ids=[5, 6], text="")], 3)
    assert (record.num_prompt_tokens, record.num_output_tokens) == (2, 3)
