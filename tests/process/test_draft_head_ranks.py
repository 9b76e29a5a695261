"""Draft heads with models over several ranks, in real processes: outputs are those of one rank without a head."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from splitserve.core.parallel import WorkerShape
from splitserve.core.request import DisaggregationMode
from splitserve.process.child import ChildProcess
from support.draft_heads import TaughtModel, make_eagle3_head
from support.processes import wait_ready
from support.shapes import Shapes

pytestmark = pytest.mark.process

NULL, PREFILL, DECODE = DisaggregationMode.NULL, DisaggregationMode.PREFILL, DisaggregationMode.DECODE
ONE, TP, PP = WorkerShape(), WorkerShape(tp_size=2), WorkerShape(pp_size=2)
PROMPTS = [[(i * 37 + j * 11) % 250 for j in range(3 + 21 * i)] for i in range(6)]
EXACT = {"max_new_tokens": 24, "min_new_tokens": 24}
SAMPLINGS = [EXACT | {"temperature": 0.0}, EXACT | {"temperature": 0.6, "seed": 7}]
ASKED = [(prompt, sampling) for sampling in SAMPLINGS for prompt in PROMPTS]
# Chunks that are smaller than most prompts.
ARGS = ["--max-total-tokens", "4000", "--chunked-prefill-size", "32"]
# By chance, one proposal of 261 is right.
FAR_ABOVE_CHANCE = 0.15


@pytest.fixture(params=["taught_with_eagle3", "taught_with_mtp"])
def taught(request: pytest.FixtureRequest) -> TaughtModel:
    found: TaughtModel = request.getfixturevalue(request.param)
    return found


def acceptance(shapes: Shapes, worker: ChildProcess) -> float:
    state = shapes.state(wait_ready(worker))
    accepted: int = state["spec_decode_num_accepted_tokens_total"]
    return accepted / state["spec_decode_num_draft_tokens_total"]


def check_pair(shapes: Shapes, prefill: ChildProcess, decode: ChildProcess, expected: list[list[int]]) -> None:
    """Send all prompts at once."""
    answers = shapes.answers_apart(prefill, decode, ASKED)
    assert [answer["output_ids"] for answer in answers] == expected
    assert acceptance(shapes, decode) > FAR_ABOVE_CHANCE
    shapes.check_nothing_is_held(prefill, decode)


def check_shapes(
    taught: TaughtModel, folder: Path, before: WorkerShape, after: WorkerShape, backend: str = "tcp"
) -> None:
    with Shapes(str(taught.model), folder, backend=backend, args=ARGS) as shapes:
        alone = shapes.start(NULL, ONE)
        prefill = shapes.start(PREFILL, before, "--page-size", "16", *taught.options)
        decode = shapes.start(DECODE, after, "--page-size", "8", *taught.options)
        check_pair(shapes, prefill, decode, shapes.outputs(alone, ASKED))


def test_stages_send_a_heads_kv_to_ranks_of_another_shape(taught_with_eagle3: TaughtModel, tmp_path: Path) -> None:
    check_shapes(taught_with_eagle3, tmp_path, PP, TP)


def test_ranks_send_a_heads_kv_to_one_rank(taught_with_mtp: TaughtModel, tmp_path: Path) -> None:
    check_shapes(taught_with_mtp, tmp_path, TP, ONE)


@pytest.mark.soak
@pytest.mark.parametrize("backend", ["tcp", "shm"])
@pytest.mark.parametrize(
    ("before", "after"),
    [(ONE, TP), (TP, ONE), (PP, TP), (TP, PP), (WorkerShape(tp_size=2, pp_size=2), WorkerShape(pp_size=3)), (PP, ONE)],
    ids=str,
)
def test_a_heads_kv_moves_between_any_two_shapes(
    backend: str, before: WorkerShape, after: WorkerShape, taught: TaughtModel, tmp_path: Path
) -> None:
    check_shapes(taught, tmp_path, before, after, backend)


@pytest.mark.soak
@pytest.mark.parametrize("shape", [WorkerShape(dp_size=2), WorkerShape(tp_size=4, dp_size=2)], ids=str)
def test_ranks_of_data_parallel_attention_have_a_head(
    shape: WorkerShape, taught_with_mtp: TaughtModel, tmp_path: Path
) -> None:
    args = ["--enable-dp-attention", *taught_with_mtp.options]
    with Shapes(str(taught_with_mtp.model), tmp_path, args=ARGS) as shapes:
        alone = shapes.start(NULL, ONE)
        prefill, decode = shapes.start(PREFILL, ONE, *taught_with_mtp.options), shapes.start(DECODE, shape, *args)
        check_pair(shapes, prefill, decode, shapes.outputs(alone, ASKED))


@pytest.mark.soak
@pytest.mark.parametrize("shape", [TP, PP], ids=str)
def test_a_heads_kv_returns_from_host_memory(shape: WorkerShape, taught: TaughtModel, tmp_path: Path) -> None:
    tight = ["--max-total-tokens", "320", "--num-reserved-decode-tokens", "1", "--retraction-host-memory", "64M"]
    with Shapes(str(taught.model), tmp_path, args=ARGS) as shapes:
        alone = shapes.start(NULL, ONE)
        prefill = shapes.start(PREFILL, shape, *taught.options)
        decode = shapes.start(DECODE, shape, *taught.options, *tight)
        check_pair(shapes, prefill, decode, shapes.outputs(alone, ASKED))
        assert shapes.state(wait_ready(decode))["num_retracted_resumed_whole_total"] > 0


@pytest.mark.soak
@pytest.mark.parametrize("shape", [TP, PP], ids=str)
def test_ranks_of_two_nodes_have_a_head(shape: WorkerShape, taught: TaughtModel, tmp_path: Path) -> None:
    with Shapes(str(taught.model), tmp_path, args=[*ARGS, "--device", "cpu"]) as shapes:
        alone = shapes.start(NULL, ONE)
        nodes = shapes.start_nodes(NULL, shape, 2, *taught.options)
        assert shapes.outputs(nodes[0], ASKED) == shapes.outputs(alone, ASKED)
        assert acceptance(shapes, nodes[0]) > FAR_ABOVE_CHANCE


def check_refused(shapes: Shapes, prefill: ChildProcess, decode: ChildProcess, words: Sequence[str]) -> None:
    answer = shapes.generate_apart(wait_ready(prefill), wait_ready(decode), PROMPTS[1])
    assert answer.status_code == 503
    assert all(word in answer.text for word in ("draft model fingerprint", *words)), answer.text


def test_workers_with_different_heads_refuse_each_other(taught_with_eagle3: TaughtModel, tmp_path: Path) -> None:
    model = taught_with_eagle3.model
    other = TaughtModel(model, taught_with_eagle3.algorithm, make_eagle3_head(model, tmp_path / "other", num_steps=1))
    with Shapes(str(model), tmp_path, args=ARGS) as shapes:
        plain, with_head = shapes.start(PREFILL, ONE), shapes.start(PREFILL, ONE, *taught_with_eagle3.options)
        decode, with_other = shapes.start(DECODE, ONE), shapes.start(DECODE, ONE, *other.options)
        check_refused(shapes, plain, with_other, ["none against "])
        check_refused(shapes, with_head, decode, [" against none"])
        check_refused(shapes, with_head, with_other, [" against "])
        assert shapes.generate_apart(wait_ready(plain), wait_ready(decode), PROMPTS[1]).status_code == 200
        shapes.check_nothing_is_held(plain, with_head, decode, with_other)
