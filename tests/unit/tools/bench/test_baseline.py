"""The baseline: what it runs on a tiny model, and how its process is driven."""

from __future__ import annotations

import io

import pytest
import torch
import transformers
from rich.console import Console

from splitserve.tools.bench.systems import run_batch, transformers_server
from splitserve.tools.bench.workload import Prompt
from splitserve.tools.client import RequestFailedError
from support.tiny_models import make_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    torch.set_num_threads(1)
    folder = make_tiny_model("llama", tmp_path_factory.mktemp("model") / "llama")
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def test_every_prompt_of_a_batch_gets_all_its_tokens_each_step_timed(model):
    records = run_batch(model, [[5, 6, 7], [8]], 6)
    assert [(r.num_prompt_tokens, r.num_output_tokens) for r in records] == [(3, 6), (1, 6)]
    assert records[0].sent_at < records[0].arrived_at[0]
    assert len(set(records[0].arrived_at)) == 6


def ask(folder, prompts, max_tokens, timeout=60.0):
    system = transformers_server("baseline", folder, "float32", 1)
    with system.running(Console(file=io.StringIO())) as running:
        return running.endpoint.ask([Prompt(ids=ids, text="") for ids in prompts], max_tokens, timeout=timeout)


def test_its_process_answers_a_batch_with_records(tmp_path):
    records = ask(make_tiny_model("llama", tmp_path / "llama"), [[5, 6], [7]], 3)
    assert [(r.num_prompt_tokens, r.num_output_tokens) for r in records] == [(2, 3), (1, 3)]


@pytest.mark.parametrize(("timeout", "message"), [(60.0, "ended with code 1"), (0.0, "did not answer within 0 s")])
def test_a_process_that_fails_or_hangs_is_an_error(timeout, message, tmp_path):
    with pytest.raises(RequestFailedError, match=message):
        ask(tmp_path / "no model", [[1]], 1, timeout)
