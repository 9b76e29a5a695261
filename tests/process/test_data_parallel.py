"""Two data parallel ranks in every role, with a tiny random model: output is that of one, and each has its share."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import psutil
import pytest
import torch
import transformers

from splitserve.core.parallel import WorkerShape
from splitserve.core.request import DisaggregationMode
from splitserve.deploy.deployment import LocalDeployment
from splitserve.deploy.local import LocalCluster
from support.deployment import Deployment
from support.reference import NUM_OUTPUT_TOKENS, Reference, greedy_reference
from support.tiny_models import make_tiny_model

pytestmark = pytest.mark.process

PROMPTS = [[(i * 37 + j * 11) % 250 for j in range(5 + 9 * i)] for i in range(8)]
SAMPLING = {"max_new_tokens": NUM_OUTPUT_TOKENS, "min_new_tokens": NUM_OUTPUT_TOKENS}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return str(make_tiny_model("llama", tmp_path_factory.mktemp("models") / "llama"))


@pytest.fixture(scope="module")
def reference(model) -> Reference:
    torch.set_num_threads(1)
    return greedy_reference(transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval())


@pytest.fixture
def deployment(model) -> Iterator[Deployment]:
    args = ["--max-total-tokens", "4000", "--dp-size", "2"]
    two = WorkerShape(dp_size=2)
    cluster = LocalCluster(
        LocalDeployment(
            model=model,
            null=1,
            prefill_shape=two,
            decode_shape=two,
            dtype="float32",
            threads=1,
            worker_args=args,
            # A request fails at once while no worker serves.
            router_args=("--worker-wait-timeout", "0"),
        )
    )
    with cluster:
        cluster.wait_ready(timeout=300)
        with httpx.Client(timeout=120) as client:
            yield Deployment(cluster, client)


def finished(deployment: Deployment, role: str) -> list[int]:
    """Requests that each rank has ended."""
    info = deployment.client.get(f"{deployment.worker(role)}/server_info").json()
    return [state["num_finished_reqs_total"] for state in info["internal_states"]]


def test_output_is_that_of_one_rank_and_a_killed_rank_ends_its_worker(deployment, reference):
    for mode in ("colocated", "disaggregated"):
        answers = deployment.generate_all(mode, PROMPTS, 8, sampling_params=SAMPLING)
        assert [a["output_ids"] for a in answers] == [reference(prompt) for prompt in PROMPTS]
    for role in ("null", "decode"):
        assert min(finished(deployment, role)) >= 2
    # A request may name the rank of prefill itself, whatever its room.
    before = finished(deployment, "prefill")
    with ThreadPoolExecutor(4) as pool:
        named = pool.map(
            lambda i: deployment.generate(
                "disaggregated", PROMPTS[i], data_parallel_rank=i % 4 // 3, sampling_params=SAMPLING
            ),
            range(8),
        )
        assert [a["output_ids"] for a in named] == [reference(prompt) for prompt in PROMPTS]
    assert [after - b for after, b in zip(finished(deployment, "prefill"), before, strict=True)] == [6, 2]
    _check_all_ranks_answer_for_themselves(deployment)
    _check_a_killed_rank_ends_its_worker(deployment)


def _check_all_ranks_answer_for_themselves(deployment: Deployment) -> None:
    for url in deployment.workers():
        assert deployment.client.get(f"{url}/health_generate").status_code == 200
        metrics = deployment.client.get(f"{url}/metrics").text
        assert all(f'splitserve:pages_free{{dp_rank="{rank}",' in metrics for rank in (0, 1))
        assert [load["dp_rank"] for load in deployment.client.get(f"{url}/get_load").json()] == [0, 1]
    deployment.flush()
    deployment.check_nothing_is_held()


def _check_a_killed_rank_ends_its_worker(deployment: Deployment) -> None:
    child = deployment.cluster.children_of(DisaggregationMode.PREFILL)[0]
    assert child.ready is not None
    first, second = (psutil.Process(pid) for pid in child.ready.scheduler_pids)
    second.kill()
    assert child.wait(60.0)
    assert child.exit_code == 1
    assert "data parallel rank 1 was killed by signal 9" in child.log_tail()
    assert not first.is_running()
    body = {"input_ids": PROMPTS[0], "sampling_params": SAMPLING}
    assert deployment.client.post(f"{deployment.cluster.router_url}/generate", json=body).status_code == 503
