"""Real workers of a model with latents, over real transports: transformers' tokens, and latents are all that moves."""

import time

import httpx
import pytest
import torch
import transformers

from splitserve.core.parallel import WorkerShape
from splitserve.core.request import DisaggregationMode
from splitserve.deploy.deployment import LocalDeployment
from splitserve.deploy.local import LocalCluster
from splitserve.tools.client import read_transfers
from splitserve.transfer.metadata import MetadataBuffers
from support.reference import greedy_reference
from support.tiny_models import make_tiny_model

pytestmark = pytest.mark.process

NUM_NEW = 12
# Three layers of float32; a latent of 32 elements and 8 with positions.
BYTES_PER_TOKEN = 3 * (32 + 8) * 4
PROMPTS = [[(i * 37 + j * j * 11) % 250 for j in range(length)] for i, length in enumerate((1, 16, 70, 200))]
PARAMS = {"max_new_tokens": NUM_NEW, "min_new_tokens": NUM_NEW, "temperature": 0.0}
DEADLINE = 60.0


@pytest.mark.parametrize(
    ("backend", "prefill_size", "decode_size"),
    [
        ("shm", 2, 1),
        *(pytest.param("tcp", *sizes, marks=pytest.mark.soak) for sizes in ((1, 1), (1, 2), (2, 2))),
    ],
)
def test_tokens_are_those_of_generate_and_bytes_those_of_latents(backend, prefill_size, decode_size, tmp_path):
    torch.set_num_threads(1)
    folder = make_tiny_model("deepseek_v3", tmp_path / "deepseek_v3")
    reference = greedy_reference(transformers.AutoModelForCausalLM.from_pretrained(folder).eval())
    args = ["--max-total-tokens", "2000", "--chunked-prefill-size", "64"]
    if min(prefill_size, decode_size) > 1:
        args.append("--enable-expert-parallel")
    # A probe's transfer may be counted after its answer has come.
    options = {
        "backend": backend,
        "worker_args": args,
        "router_args": ["--no-probe"],
        "prefill_shape": WorkerShape(tp_size=prefill_size),
        "decode_shape": WorkerShape(tp_size=decode_size),
    }
    with LocalCluster(LocalDeployment(model=str(folder), dtype="float32", threads=1, **options)) as cluster:
        cluster.wait_ready(timeout=180)
        prefill = cluster.urls(DisaggregationMode.PREFILL)[0]
        before = read_transfers(prefill)
        with httpx.Client(timeout=120) as client:
            for prompt in PROMPTS:
                body = {"input_ids": prompt, "sampling_params": PARAMS}
                answer = client.post(f"{cluster.router_url}/generate", json=body).json()
                assert answer["output_ids"] == reference(prompt, NUM_NEW)
        limit = time.monotonic() + DEADLINE
        while (moved := read_transfers(prefill) - before).count < len(PROMPTS):
            assert time.monotonic() < limit
    rows = len(PROMPTS) * MetadataBuffers(1).row_bytes
    # Every rank of decode has the rows, and each gets them once, however many ranks of prefill have them.
    assert moved.num_bytes - rows == decode_size * sum(map(len, PROMPTS)) * BYTES_PER_TOKEN
