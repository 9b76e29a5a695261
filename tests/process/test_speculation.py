"""Speculation by its options, in real processes: a pair that transfers the draft's KV, and a colocated worker."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import torch
import transformers
from prometheus_client.parser import text_string_to_metric_families

from splitserve.core.request import DisaggregationMode
from splitserve.deploy.deployment import LocalDeployment
from splitserve.deploy.local import LocalCluster
from support.processes import running, wait_ready
from support.reference import NUM_OUTPUT_TOKENS, Reference, greedy_reference
from support.tiny_models import make_tiny_model

pytestmark = pytest.mark.process

PROMPTS = [list(range(start, start + 40)) for start in (3, 90, 150)]
GREEDY = {"temperature": 0.0, "max_new_tokens": NUM_OUTPUT_TOKENS, "min_new_tokens": NUM_OUTPUT_TOKENS}
# A random model repeats nothing by itself.
REPEATING = GREEDY | {"temperature": 0.7, "seed": 5, "logit_bias": {"7": 60, "9": 60}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    torch.set_num_threads(1)
    return make_tiny_model("llama", tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture(scope="module")
def reference(folder) -> Reference:
    return greedy_reference(transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval())


@pytest.fixture(scope="module")
def pair(folder) -> Iterator[tuple[str, str]]:
    """A model that is its own draft: the router's URL, and the decode worker's."""
    args = ["--max-total-tokens", "4096", "--speculative-algorithm", "draft", "--speculative-draft-model", str(folder)]
    with LocalCluster(LocalDeployment(model=str(folder), dtype="float32", threads=1, worker_args=args)) as cluster:
        cluster.wait_ready(timeout=180)
        yield cluster.router_url, cluster.urls(DisaggregationMode.DECODE)[0]


@pytest.fixture(scope="module")
def colocated(folder, tmp_path_factory) -> Iterator[str]:
    args = ["serve", str(folder), "--dtype", "float32", "--threads", "1", "--port", "0", "--max-total-tokens", "4096"]
    with running([*args, "--speculative-algorithm", "ngram"], tmp_path_factory.mktemp("worker")) as child:
        yield wait_ready(child).url


def generate(url: str, prompt: list[int], sampling: dict) -> dict:
    answer = httpx.post(f"{url}/generate", json={"input_ids": prompt, "sampling_params": sampling}, timeout=120)
    assert answer.status_code == 200, answer.text
    return answer.json()


def counters(url: str) -> tuple[float, float]:
    """Return (draft tokens, accepted ones) since the worker's start."""
    families = text_string_to_metric_families(httpx.get(f"{url}/metrics").text)
    samples = {s.name.removeprefix("splitserve:spec_decode_num_"): s.value for f in families for s in f.samples}
    return samples["draft_tokens_total"], samples["accepted_tokens_total"]


def test_answers_of_a_pair_are_transformers_and_its_draft_has_the_prompt(pair, reference):
    router, decode = pair
    answers = [generate(router, prompt, GREEDY) for prompt in PROMPTS]
    assert [answer["output_ids"] for answer in answers] == [reference(prompt) for prompt in PROMPTS]
    # One token arrived with the prompt. A step makes five of the others; only the last needs no draft token.
    num_steps, num_left = divmod(NUM_OUTPUT_TOKENS - 1, 5)
    for answer in answers:
        assert answer["meta_info"]["spec_verify_ct"] == num_steps + (num_left > 1)
        assert answer["meta_info"]["spec_accept_rate"] == 1.0
    guessed, accepted = counters(decode)
    assert guessed == accepted == sum(answer["meta_info"]["spec_draft_token_num"] for answer in answers)


def test_whoever_guesses_the_answer_is_the_same(pair, colocated):
    for prompt in PROMPTS:
        ours, theirs = (generate(url, prompt, REPEATING) for url in (colocated, pair[0]))
        assert ours["output_ids"] == theirs["output_ids"]
        assert ours["meta_info"]["spec_accept_token_num"] > 0
