"""The baseline: what it runs on a tiny model, and how its process is driven."""

from __future__ import annotations

import io
import sys

import msgspec
import pytest
import torch
import transformers
from rich.console import Console

from splitserve.tools.bench.baseline import BaselineTask, run_job
from splitserve.tools.bench.stats import StreamRecord
from splitserve.tools.bench.systems import TransformersSystem
from splitserve.tools.bench.workload import Job
from splitserve.tools.client import RequestFailedError
from support.tiny_models import make_tiny_model

JOBS = [Job(prompts=[[1, 2, 3]], max_tokens=2), Job(prompts=[[1], [2]], max_tokens=1)]
# Answers every job with as many records as it has prompts.
ECHO = """
import json, sys
task = json.load(sys.stdin)
assert len(task["warm_up"]) == 1 and task["threads"] == 1
for job in task["jobs"]:
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
    records = run_job(model, Job(prompts=[[5, 6, 7], [8]], max_tokens=6))
    assert [(r.num_prompt_tokens, r.num_output_tokens) for r in records] == [(3, 6), (1, 6)]
    assert records[0].sent_at < records[0].arrived_at[0]
    assert len(set(records[0].arrived_at)) == 6


def run(program, timeout=60.0):
    system = TransformersSystem("baseline", "folder", "float32", 1, (sys.executable, "-c", program), timeout)
    return system.run(JOBS[:1], JOBS, Console(file=io.StringIO()))


def test_each_line_of_the_process_is_a_jobs_records():
    assert run(ECHO) == [
        [StreamRecord(0.0, (1.0, 1.0), 4, 2)],
        [StreamRecord(0.0, (1.0,), 4, 1)] * 2,
    ]


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("import sys; sys.exit('no such model')", "code 1.*\n*.*no such model"),
        ("import sys; sys.stdin.read()", "0 of 2 jobs"),
    ],
)
def test_a_process_that_fails_or_answers_too_little_is_an_error(program, message):
    with pytest.raises(RequestFailedError, match=message):
        run(program)


def test_a_process_that_hangs_is_killed_at_its_deadline():
    with pytest.raises(RequestFailedError, match="code -9"):
        run("import sys, threading; sys.stdin.read(); threading.Event().wait()", timeout=0.5)


def test_the_task_is_read_back_as_it_was_written():
    task = BaselineTask(model_folder="f", dtype="float32", threads=1, warm_up=[], jobs=JOBS)
    assert msgspec.json.decode(msgspec.json.encode(task), type=BaselineTask) == task
