"""Draft tokens with models over several ranks, in real processes: outputs are those of one rank without them."""

from __future__ import annotations

from pathlib import Path

import pytest

from splitserve.core.parallel import WorkerShape
from splitserve.core.request import DisaggregationMode
from splitserve.process.child import ChildProcess
from support.processes import wait_ready
from support.shapes import Shapes, make_divisible_model
from support.tiny_models import TinyKind, make_tiny_model

pytestmark = pytest.mark.process

NULL, PREFILL, DECODE = DisaggregationMode.NULL, DisaggregationMode.PREFILL, DisaggregationMode.DECODE
ONE = WorkerShape()
PROMPTS = [[(i * 37 + j * 11) % 250 for j in range(3 + 21 * i)] for i in range(6)]
EXACT = {"max_new_tokens": 24, "min_new_tokens": 24}
SAMPLINGS = [EXACT | {"temperature": 0.0}, EXACT | {"temperature": 0.8, "seed": 7}]
ASKED = [(prompt, sampling) for sampling in SAMPLINGS for prompt in PROMPTS]
# Chunks that are smaller than most prompts.
ARGS = ["--max-total-tokens", "4000", "--chunked-prefill-size", "32"]


def drafting(model: str) -> list[str]:
    return ["--speculative-algorithm", "draft", "--speculative-draft-model", model]


def check_pair(shapes: Shapes, prefill: ChildProcess, decode: ChildProcess, expected: list[list[int]]) -> None:
    """All prompts at once. The model is its own draft, so that only wrong KV makes a proposal wrong."""
    answers = shapes.answers_apart(prefill, decode, ASKED)
    assert [answer["output_ids"] for answer in answers] == expected
    rates = [answer["meta_info"]["spec_accept_rate"] for answer in answers]
    assert rates == [1.0] * len(ASKED)
    shapes.check_nothing_is_held(prefill, decode)


def test_a_pair_of_unequal_shapes_with_a_draft_model_equals_one_rank_without(tmp_path: Path) -> None:
    """Two ranks share the draft model on prefill. The last stage has it whole on decode."""
    model = str(make_divisible_model(tmp_path / "llama"))
    with Shapes(model, tmp_path, args=ARGS) as shapes:
        alone = shapes.start(NULL, ONE)
        prefill = shapes.start(PREFILL, WorkerShape(tp_size=2), "--page-size", "16", *drafting(model))
        decode = shapes.start(DECODE, WorkerShape(pp_size=2), "--page-size", "8", *drafting(model))
        check_pair(shapes, prefill, decode, shapes.outputs(alone, ASKED))


@pytest.mark.soak
@pytest.mark.parametrize("backend", ["tcp", "shm"])
@pytest.mark.parametrize(
    ("before", "after"),
    [
        (ONE, WorkerShape(tp_size=2)),
        (WorkerShape(tp_size=2), ONE),
        (WorkerShape(tp_size=4), WorkerShape(tp_size=2)),
        (WorkerShape(tp_size=2, pp_size=2), WorkerShape(tp_size=2)),
        (WorkerShape(pp_size=2), WorkerShape(tp_size=2, pp_size=2)),
        (WorkerShape(pp_size=2), ONE),
    ],
    ids=str,
)
def test_a_draft_models_kv_moves_between_any_two_shapes(
    backend: str, before: WorkerShape, after: WorkerShape, tmp_path: Path
) -> None:
    model = str(make_divisible_model(tmp_path / "llama"))
    with Shapes(model, tmp_path, backend=backend, args=ARGS) as shapes:
        alone = shapes.start(NULL, ONE)
        prefill = shapes.start(PREFILL, before, *drafting(model))
        decode = shapes.start(DECODE, after, "--page-size", "8", *drafting(model))
        check_pair(shapes, prefill, decode, shapes.outputs(alone, ASKED))


@pytest.mark.soak
@pytest.mark.parametrize("kind", ["mixtral", "deepseek_v3"])
@pytest.mark.parametrize("algorithm", ["ngram", "draft"])
def test_ranks_of_data_parallel_attention_have_draft_tokens(kind: TinyKind, algorithm: str, tmp_path: Path) -> None:
    model = str(make_tiny_model(kind, tmp_path / kind))
    speculation = drafting(model) if algorithm == "draft" else ["--speculative-algorithm", algorithm]
    shape = WorkerShape(dp_size=2)
    with Shapes(model, tmp_path, args=ARGS) as shapes:
        alone = shapes.start(NULL, ONE)
        worker = shapes.start(NULL, shape, "--enable-dp-attention", *speculation)
        expected = shapes.outputs(alone, ASKED)
        assert shapes.outputs(worker, ASKED) == expected
        if algorithm == "draft":
            prefill = shapes.start(PREFILL, shape, "--enable-dp-attention", *speculation)
            check_pair(shapes, prefill, shapes.start(DECODE, shape, "--enable-dp-attention", *speculation), expected)


@pytest.mark.soak
@pytest.mark.parametrize("cut", [WorkerShape(tp_size=2), WorkerShape(pp_size=2)], ids=str)
def test_draft_tokens_survive_retractions(cut: WorkerShape, tmp_path: Path) -> None:
    model = str(make_divisible_model(tmp_path / "llama"))
    tight = ["--max-total-tokens", "320", "--num-reserved-decode-tokens", "1"]
    with Shapes(model, tmp_path, args=ARGS) as shapes:
        alone = shapes.start(NULL, ONE)
        prefill, decode = (
            shapes.start(PREFILL, cut, *drafting(model)),
            shapes.start(DECODE, cut, *drafting(model), *tight),
        )
        check_pair(shapes, prefill, decode, shapes.outputs(alone, ASKED))
        assert shapes.state(wait_ready(decode))["num_retracted_requests_total"] > 0


@pytest.mark.soak
@pytest.mark.parametrize("shape", [WorkerShape(tp_size=2), WorkerShape(pp_size=2)], ids=str)
def test_ranks_of_two_nodes_have_a_draft_model(shape: WorkerShape, tmp_path: Path) -> None:
    model = str(make_divisible_model(tmp_path / "llama"))
    with Shapes(model, tmp_path, args=[*ARGS, "--device", "cpu"]) as shapes:
        alone = shapes.start(NULL, ONE)
        nodes = shapes.start_nodes(NULL, shape, 2, *drafting(model))
        assert shapes.outputs(nodes[0], ASKED) == shapes.outputs(alone, ASKED)
        assert shapes.state(wait_ready(nodes[0]))["spec_decode_num_accepted_tokens_total"] > 0
