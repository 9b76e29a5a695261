"""A draft head in real processes: a pair that transfers its KV and its state over tcp."""

from pathlib import Path

import httpx
import pytest
import torch
import transformers
from rich.console import Console

from splitserve.deploy.deployment import LocalDeployment
from splitserve.deploy.local import LocalCluster
from splitserve.tools.bench.options import SpeculationBenchOptions
from splitserve.tools.bench.speculation import bench_speculation
from support.draft_heads import TaughtModel
from support.reference import NUM_OUTPUT_TOKENS, greedy_reference

pytestmark = pytest.mark.process

PROMPTS = [[(start + 5 * i) % 250 for i in range(20)] for start in (3, 90, 150)]
GREEDY = {"temperature": 0.0, "max_new_tokens": NUM_OUTPUT_TOKENS, "min_new_tokens": NUM_OUTPUT_TOKENS}


def test_answers_of_a_pair_with_a_head_are_transformers_and_it_proposes_from_the_first_step(
    taught_with_eagle3: TaughtModel, tmp_path: Path
) -> None:
    torch.set_num_threads(1)
    model = str(taught_with_eagle3.model)
    reference = greedy_reference(transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval())
    args = ["--max-total-tokens", "4096", "--chunked-prefill-size", "16", *taught_with_eagle3.options]
    with LocalCluster(LocalDeployment(model=model, dtype="float32", threads=1, worker_args=args)) as cluster:
        cluster.wait_ready(timeout=180)
        for prompt in PROMPTS:
            body = {"input_ids": prompt, "sampling_params": GREEDY}
            answer = httpx.post(f"{cluster.router_url}/generate", json=body, timeout=120).json()
            assert answer["output_ids"] == reference(prompt)
            meta = answer["meta_info"]
            # Each step of decode verifies proposals, except a last one without room.
            assert meta["spec_verify_ct"] >= NUM_OUTPUT_TOKENS - 2 - meta["spec_accept_token_num"]
            assert meta["spec_accept_rate"] > 0.15


def test_bench_reports_acceptance_and_the_same_answers(taught_with_mtp: TaughtModel) -> None:
    options = SpeculationBenchOptions(
        model=str(taught_with_mtp.model),
        dtype="float32",
        speculative_algorithm="mtp",
        mode="disaggregated",
        num_prompts=2,
        concurrency=2,
        output_tokens=24,
        threads=1,
    )
    figures = bench_speculation(options, Console(quiet=True)).figures
    assert figures["same_answers"] == 2
    plain, speculating = figures["runs"]
    assert plain["draft_tokens"] == 0
    assert speculating["acceptance"] > 0.15
    assert speculating["tokens_per_step"] > 1.1
