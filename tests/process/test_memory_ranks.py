"""Workers over several ranks and with drafts release their memory and get new weights, on all ranks or on none.

`make test` has one pair of unequal shapes with draft models, `make soak` more shapes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from splitserve.core.parallel import WorkerShape
from splitserve.core.request import DisaggregationMode
from splitserve.process.child import ChildProcess
from support.processes import wait_ready
from support.reference import Reference, greedy_reference
from support.shapes import Shapes, make_divisible_model
from support.tiny_models import make_tiny_model

pytestmark = pytest.mark.process

PREFILL, DECODE = DisaggregationMode.PREFILL, DisaggregationMode.DECODE
ONE = WorkerShape()
PROMPT = [(i * 37) % 250 for i in range(70)]
NUM_TOKENS = 12
ARGS = ["--max-total-tokens", "4000", "--chunked-prefill-size", "32"]


def reference(folder: Path) -> Reference:
    return greedy_reference(transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval())


def with_other_weights(old: Path, new: Path) -> Path:
    """Save the model with other random weights. Config and tokenizer stay, as in an update from shared memory."""
    model = transformers.AutoModelForCausalLM.from_pretrained(old)
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(noise * parameter.std() if parameter.dim() > 1 else parameter)
    model.save_pretrained(new)
    for path in old.iterdir():
        if path.suffix != ".safetensors":
            (new / path.name).write_bytes(path.read_bytes())
    return new


LOST_WEIGHT = "model.layers.0.mlp.up_proj.weight"


def without_a_weight(model: Path, broken: Path) -> Path:
    """Save a checkpoint without a weight that, of pipeline stages, only the first one reads: a follower."""
    broken.mkdir()
    for path in model.iterdir():
        (broken / path.name).write_bytes(path.read_bytes())
    weights = load_file(model / "model.safetensors")
    del weights[LOST_WEIGHT]
    save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})
    return broken


@dataclass
class RankedPair:
    """A prefill worker and a decode worker, with requests sent to both."""

    shapes: Shapes
    prefill: ChildProcess
    decode: ChildProcess
    http: httpx.Client = field(default_factory=lambda: httpx.Client(timeout=120.0, trust_env=False))

    def post(self, worker: ChildProcess, path: str, status: int = 200, **body: Any) -> str:
        answer = self.http.post(f"{wait_ready(worker).url}/{path}", json=body)
        assert answer.status_code == status, answer.text + worker.log_tail()
        return str(answer.json()["message"])

    def ask(self) -> httpx.Response:
        params = {"max_new_tokens": NUM_TOKENS, "ignore_eos": True}
        pair = wait_ready(self.prefill), wait_ready(self.decode)
        return self.shapes.generate_apart(*pair, PROMPT, sampling_params=params)

    def check_tokens(self, expected: list[int], num_cached: int | None = None) -> None:
        answer = self.ask()
        assert answer.status_code == 200, answer.text + self.prefill.log_tail() + self.decode.log_tail()
        assert answer.json()["output_ids"] == expected
        if num_cached is not None:
            assert answer.json()["meta_info"]["cached_tokens"] == num_cached

    def check_released(self, worker: ChildProcess) -> None:
        health = self.http.get(f"{wait_ready(worker).url}/health")
        assert health.status_code == 503
        assert health.json()["error"]["code"] == "memory_released"


@contextmanager
def ranked_pair(
    folder: Path, model: Path, prefill: tuple[WorkerShape, list[str]], decode: tuple[WorkerShape, list[str]]
) -> Iterator[RankedPair]:
    with Shapes(str(model), folder, backend="shm", args=ARGS) as shapes:
        pair = RankedPair(
            shapes,
            shapes.start(PREFILL, prefill[0], "--page-size", "16", *prefill[1]),
            shapes.start(DECODE, decode[0], "--page-size", "8", *decode[1]),
        )
        with pair.http:
            yield pair
            shapes.check_nothing_is_held(pair.prefill, pair.decode)


@contextmanager
def shared_weights(model: Path) -> Iterator[str]:
    """Yield the name of a file in shared memory with the weights of a model."""
    path = Path("/dev/shm") / f"splitserve-ranks-{os.getpid()}.safetensors"
    path.write_bytes((model / "model.safetensors").read_bytes())
    try:
        yield path.name
    finally:
        path.unlink()


def check_pair(pair: RankedPair, old_model: Path, new_model: Path, broken: Path) -> None:
    old, new = (reference(model)(PROMPT, NUM_TOKENS) for model in (old_model, new_model))
    assert old != new
    pair.check_tokens(old)
    pair.check_tokens(old)

    pair.post(pair.prefill, "release_memory_occupation", drain=True)
    pair.post(pair.decode, "release_memory_occupation", drain=True, tags=["weights"])
    for worker in (pair.prefill, pair.decode):
        pair.check_released(worker)
        pair.post(worker, "resume_memory_occupation")
    pair.check_tokens(old, num_cached=0)

    message = pair.post(pair.prefill, "update_weights_from_disk", 400, model_path=str(broken), drain=True)
    assert LOST_WEIGHT in message
    pair.check_tokens(old)

    # Only one of the two has the new weights: nothing is computed from both.
    pair.post(pair.prefill, "update_weights_from_disk", model_path=str(new_model), drain=True)
    assert pair.ask().status_code == 503
    with shared_weights(new_model) as name:
        pair.post(pair.decode, "update_weights_from_shared_memory", name=name, drain=True)
    pair.check_tokens(new, num_cached=0)
    # The weights of the update are resumed, not those of startup.
    for worker in (pair.prefill, pair.decode):
        pair.post(worker, "release_memory_occupation", drain=True)
        pair.post(worker, "resume_memory_occupation")
    pair.check_tokens(new, num_cached=0)


def test_a_pair_of_unequal_shapes_with_drafts_gets_new_weights(tmp_path: Path) -> None:
    model = make_divisible_model(tmp_path / "old")
    new = with_other_weights(model, tmp_path / "new")
    broken = without_a_weight(new, tmp_path / "broken")
    draft = ["--speculative-algorithm", "draft", "--speculative-draft-model", str(model)]
    with ranked_pair(tmp_path, model, (WorkerShape(tp_size=2), draft), (ONE, draft)) as pair:
        check_pair(pair, model, new, broken)


@pytest.mark.soak
@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        ((WorkerShape(pp_size=2), []), (WorkerShape(tp_size=2), [])),
        ((WorkerShape(tp_size=2, pp_size=2), []), (ONE, ["--dp-size", "2"])),
        ((WorkerShape(pp_size=2), ["--dp-size", "2"]), (ONE, ["--dp-size", "2"])),
    ],
)
def test_pairs_of_more_shapes_get_new_weights(
    prefill: tuple[WorkerShape, list[str]], decode: tuple[WorkerShape, list[str]], tmp_path: Path
) -> None:
    model = make_divisible_model(tmp_path / "old")
    new = with_other_weights(model, tmp_path / "new")
    broken = without_a_weight(new, tmp_path / "broken")
    with ranked_pair(tmp_path, model, prefill, decode) as pair:
        check_pair(pair, model, new, broken)


@pytest.mark.soak
def test_ranks_of_data_parallel_attention_get_new_weights(tmp_path: Path) -> None:
    model = make_tiny_model("deepseek_v3", tmp_path / "old")
    new = make_tiny_model("deepseek_v3", tmp_path / "new", seed=1)
    old_tokens, new_tokens = (reference(folder)(PROMPT, NUM_TOKENS) for folder in (model, new))
    together = ["--dp-size", "2", "--enable-dp-attention"]
    with ranked_pair(tmp_path, model, (ONE, together), (WorkerShape(tp_size=4), together)) as pair:
        pair.check_tokens(old_tokens)
        for worker in (pair.prefill, pair.decode):
            pair.post(worker, "release_memory_occupation", drain=True)
            pair.post(worker, "resume_memory_occupation")
        pair.check_tokens(old_tokens, num_cached=0)
        for worker in (pair.prefill, pair.decode):
            pair.post(worker, "update_weights_from_disk", model_path=str(new), drain=True)
        pair.check_tokens(new_tokens, num_cached=0)
