"""Gemma-3 in real processes: its windowed layers have a pool of a few windows, and decode is sent what it reads."""

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import transformers

from splitserve.core.layout import first_token_read
from splitserve.core.parallel import WorkerShape
from splitserve.core.request import DisaggregationMode
from splitserve.tools.client import read_transfers
from splitserve.transfer.metadata import MetadataBuffers
from support.processes import wait_ready
from support.reference import Reference, greedy_reference
from support.shapes import Shapes
from support.tiny_models import make_tiny_model

pytestmark = pytest.mark.process

NULL, PREFILL, DECODE = DisaggregationMode.NULL, DisaggregationMode.PREFILL, DisaggregationMode.DECODE
WINDOW, NUM_NEW, DEADLINE = 20, 60, 30.0
EXACT = {"max_new_tokens": NUM_NEW, "min_new_tokens": NUM_NEW}
PROMPTS = [[(i * 37 + j * j * 11) % 250 for j in range(length)] for i, length in enumerate((1, 20, 21, 90, 300))]
# Of each two sides, keys and values of 16 float32 numbers, two heads.
LAYER_BYTES = 2 * 2 * 16 * 4
ARGS = ["--max-total-tokens", "4000", "--chunked-prefill-size", "32", "--swa-full-tokens-ratio", "0.15"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Reference]:
    folder = make_tiny_model("gemma3", tmp_path_factory.mktemp("models") / "gemma3")
    config = transformers.AutoConfig.from_pretrained(folder)
    config.sliding_window, config.num_attention_heads = WINDOW, 8
    torch.set_num_threads(1)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    model.save_pretrained(folder)
    return str(folder), greedy_reference(model)


def bytes_read(length: int) -> int:
    """Of a prompt's KV by decode: by three layers with windows, and one that sees all."""
    return LAYER_BYTES * (3 * (length - first_token_read(WINDOW, length)) + length)


@pytest.mark.parametrize(
    ("prefill_shape", "decode_shape", "backend"),
    [
        (WorkerShape(), WorkerShape(), "tcp"),
        *(
            pytest.param(WorkerShape(*p), WorkerShape(*d), backend, marks=pytest.mark.soak)
            for p, d, backend in (
                ((2, 1), (1, 1), "shm"),
                # A stage has windowed layers only, the other one of each kind.
                ((1, 2), (1, 1), "tcp"),
                ((1, 1), (1, 2), "shm"),
                ((2, 1), (1, 2), "tcp"),
                ((1, 2), (2, 2), "tcp"),
            )
        ),
    ],
)
def test_a_pair(model: tuple[str, Reference], tmp_path: Path, prefill_shape, decode_shape, backend) -> None:
    folder, reference = model
    with Shapes(folder, tmp_path, backend=backend, args=ARGS) as shapes:
        children = (
            shapes.start(PREFILL, prefill_shape, "--page-size", "8"),
            shapes.start(DECODE, decode_shape, "--page-size", "4"),
        )
        pair = wait_ready(children[0]), wait_ready(children[1])
        for worker in pair:
            state = shapes.state(worker)
            assert 0 < state["window_pages_total"] < state["pages_total"] / 4
        with ThreadPoolExecutor(len(PROMPTS)) as pool:
            answers = list(pool.map(lambda p: shapes.generate_apart(*pair, p, sampling_params=EXACT), PROMPTS))
        assert [answer.status_code for answer in answers] == [200] * len(answers), [a.text for a in answers]
        outputs = [answer.json()["output_ids"] for answer in answers]
        assert outputs == [reference(prompt, NUM_NEW) for prompt in PROMPTS]
        limit = time.monotonic() + DEADLINE
        while (moved := read_transfers(pair[0].url)).count < len(PROMPTS):
            assert time.monotonic() < limit
        # Each tensor parallel rank of decode has the heads that it reads, and there are two.
        rows = len(PROMPTS) * MetadataBuffers(1).row_bytes
        assert moved.num_bytes - rows == sum(bytes_read(len(prompt)) for prompt in PROMPTS)
        # The next turn: both sides find what they have.
        following = PROMPTS[-1] + outputs[-1] + [5, 6, 7]
        answer = shapes.generate_apart(*pair, following, sampling_params=EXACT).json()
        assert answer["output_ids"] == reference(following, NUM_NEW)
        limit = time.monotonic() + DEADLINE
        while (second := read_transfers(pair[0].url) - moved).count < 1:
            assert time.monotonic() < limit
        assert second.num_bytes < bytes_read(len(following)) / 4
        shapes.check_nothing_is_held(*children)


@pytest.mark.soak
@pytest.mark.parametrize("shape", [WorkerShape(), WorkerShape(2, 1), WorkerShape(1, 2), WorkerShape(2, 2)], ids=str)
def test_a_colocated_worker_whose_requests_give_way(model: tuple[str, Reference], tmp_path: Path, shape) -> None:
    folder, reference = model
    # Windows are promised for hardly more than the prompt's tokens.
    args = ["--page-size", "4", "--num-reserved-decode-tokens", "1", "--max-total-tokens", "500", *ARGS[2:]]
    prompts = [[7 * i + 1, 2, 3 + i] for i in range(12)]
    with Shapes(folder, tmp_path, args=args) as shapes:
        child = shapes.start(NULL, shape)
        worker = wait_ready(child)
        with ThreadPoolExecutor(len(prompts)) as pool:
            answers = list(pool.map(lambda p: shapes.generate(worker, p, sampling_params=EXACT), prompts))
        assert [answer.json()["output_ids"] for answer in answers] == [reference(p, NUM_NEW) for p in prompts]
        state = shapes.state(worker)
        assert state["num_retracted_resumed_whole_total"] == state["num_retracted_requests_total"] > 0
        shapes.check_nothing_is_held(child)
