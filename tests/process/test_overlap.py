"""The real model behind both loops, over HTTP: the same answers to a mix of everything that may be asked.

`--disable-overlap-schedule` starts the workers that give the expected answers. 200 requests, of a colocated worker
and of a pair; tiny models have the same in tests/parity/test_overlap.py.
"""

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import httpx
import pytest

from splitserve.deploy.deployment import LocalDeployment
from splitserve.deploy.local import LocalCluster
from support.deployment import MODEL, Deployment

pytestmark = pytest.mark.process

AT_A_TIME = 12
KINDS = ("greedy", "seeded", "grammar", "logprobs", "stop", "abort", "penalty", "stop ids")


def start(stack: ExitStack, roles: dict[str, int]) -> tuple[Deployment, Deployment]:
    """Two deployments that differ in the loop alone: normal, overlapped."""
    common = ["--max-total-tokens", "8000", "--chunked-prefill-size", "256"]
    clusters = [
        stack.enter_context(
            LocalCluster(
                LocalDeployment(model=MODEL, dtype="float32", threads=1, worker_args=[*common, *loop], **roles)
            )
        )
        for loop in (["--disable-overlap-schedule"], [])
    ]
    for cluster in clusters:
        cluster.wait_ready(timeout=180)
    client = stack.enter_context(httpx.Client(timeout=600, limits=httpx.Limits(max_connections=4 * AT_A_TIME)))
    normal, overlapped = (Deployment(cluster, client) for cluster in clusters)
    return normal, overlapped


def body_of(number: int, prompts: list[list[int]]) -> dict[str, Any]:
    rng = random.Random(number)
    kind = KINDS[number % len(KINDS)]
    params: dict[str, Any] = {"max_new_tokens": rng.randrange(2, 14), "temperature": 0.0}
    body: dict[str, Any] = {"sampling_params": params}
    match kind:
        case "seeded":
            params |= {"temperature": 0.9, "top_p": 0.95, "seed": number}
        case "grammar":
            params["regex"] = "[a-z]{2,6}( [a-z]{2,6}){0,2}"
        case "logprobs":
            body |= {"return_logprob": True, "top_logprobs_num": 2}
        case "stop":
            params |= {"stop": [" the", "e", "\n"], "max_new_tokens": 24}
        case "penalty":
            params |= {"frequency_penalty": 0.7, "repetition_penalty": 1.1}
        case "stop ids":
            params |= {"stop_token_ids": rng.sample(range(49_000), 4_000), "max_new_tokens": 24}
    piece = rng.choice(prompts)
    begin = rng.randrange(max(1, len(piece) - 40))
    body["input_ids"] = piece[begin : begin + rng.randrange(1, 40)]
    return body


def ask(deployment: Deployment, mode: str, number: int, prompts: list[list[int]]) -> Any:
    """The answer without what may differ; of an aborted one nothing."""
    url, body = f"{deployment.url(mode)}/generate", body_of(number, prompts)
    if KINDS[number % len(KINDS)] == "abort":
        with deployment.client.stream("POST", url, json=body | {"stream": True}) as response:
            next(response.iter_raw())
        return None
    response = deployment.client.post(url, json=body)
    assert response.status_code == 200, response.text
    answer = response.json()
    meta = answer["meta_info"]
    tokens = [token for _, token, *_ in meta.get("output_token_logprobs") or ()]
    return answer["text"], answer["output_ids"], meta["finish_reason"], tokens


def compare(deployments: tuple[Deployment, Deployment], mode: str, numbers: range, prompts: list[list[int]]) -> None:
    normal, overlapped = deployments
    with ThreadPoolExecutor(2 * AT_A_TIME) as pool:
        pairs = [[pool.submit(ask, d, mode, n, prompts) for d in (normal, overlapped)] for n in numbers]
        for number, (expected, got) in zip(numbers, pairs, strict=True):
            assert got.result() == expected.result(), (number, KINDS[number % len(KINDS)])
    for deployment in deployments:
        deployment.check_nothing_is_held()


@pytest.fixture(scope="module")
def colocated() -> Iterator[tuple[Deployment, Deployment]]:
    with ExitStack() as stack:
        yield start(stack, {"prefill": 0, "decode": 0, "null": 1})


@pytest.mark.soak
def test_both_loops_give_the_same_answers_to_two_hundred_requests(colocated, prompts):
    compare(colocated, "colocated", range(200), prompts)
    with ExitStack() as stack:
        compare(start(stack, {"prefill": 1, "decode": 1}), "disaggregated", range(200), prompts)
