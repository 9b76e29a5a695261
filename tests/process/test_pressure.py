"""A real model in pools too small for its requests, over HTTP: same output, clear deadlines."""

from collections.abc import Iterator

import pytest
from prometheus_client.parser import text_string_to_metric_families

from support.deployment import Deployment, deploy

pytestmark = pytest.mark.process

# 16 pages of 16 tokens, and host memory for a few requests: some come back from their copies, some are computed again.
POOL_TOKENS = 256
PRESSURE = ["--num-reserved-decode-tokens", "1", "--retraction-host-memory", "6M"]


@pytest.fixture(scope="module")
def deployment() -> Iterator[Deployment]:
    yield from deploy(max_total_tokens=POOL_TOKENS, worker_args=PRESSURE)


def num_retractions(deployment: Deployment, url: str) -> float:
    families = text_string_to_metric_families(deployment.client.get(f"{url}/metrics").text)
    samples = {s.name: s.value for family in families for s in family.samples}
    return samples["splitserve:num_retracted_requests_total"]


# The shorter a prompt and the longer its answer, the less of what it will need is known when it is admitted.
@pytest.mark.soak
@pytest.mark.parametrize(
    ("num_requests", "prompt_tokens", "num_tokens", "num_retracted"),
    [(12, 14, 36, 2), (40, 14, 36, 24)],
    ids=["few", "many"],
)
def test_output_under_pressure_is_that_of_requests_that_have_room(
    deployment, prompts, num_requests, prompt_tokens, num_tokens, num_retracted
):
    pieces = [prompts[-1][i * 61 : i * 61 + prompt_tokens] for i in range(num_requests)]
    params = {"max_new_tokens": num_tokens, "ignore_eos": True}
    # Three at a time grow to 12 of the 16 pages.
    with_room = deployment.generate_all("colocated", pieces, 3, sampling_params=params)
    assert num_retractions(deployment, deployment.worker("null")) == 0
    for mode, role in (("colocated", "null"), ("disaggregated", "decode")):
        before = num_retractions(deployment, deployment.worker(role))
        together = deployment.generate_all(mode, pieces, num_requests, sampling_params=params)
        assert num_retractions(deployment, deployment.worker(role)) - before >= num_retracted
        assert [a["output_ids"] for a in together] == [a["output_ids"] for a in with_room]
    deployment.check_nothing_is_held()


@pytest.mark.parametrize("mode", ["colocated", "disaggregated"])
@pytest.mark.parametrize("is_stream", [False, True])
def test_a_request_that_runs_out_of_time_says_so(deployment, prompts, mode, is_stream):
    body = {
        "input_ids": prompts[5],
        "stream": is_stream,
        "sampling_params": {"max_new_tokens": 240, "ignore_eos": True},
    }
    answer = deployment.client.post(f"{deployment.url(mode)}/generate", json=body, headers={"X-Request-Timeout": "0.7"})
    assert "deadline_exceeded" in answer.text
    assert "timeout of 0.7 s" in answer.text
    assert answer.status_code == 504 or (is_stream and answer.status_code == 200)
    deployment.check_nothing_is_held()
