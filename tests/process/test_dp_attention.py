"""Data parallel attention in real processes: ranks with requests of their own meet for the experts of each layer."""

from __future__ import annotations

import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest
import torch
import transformers

from splitserve.core.errors import USAGE_EXIT_CODE
from splitserve.core.parallel import WorkerShape
from splitserve.core.request import DisaggregationMode
from splitserve.observe.scheduler_metrics import held
from splitserve.process.child import ChildProcess
from support.processes import wait_ready
from support.reference import Reference, greedy_reference
from support.shapes import Shapes
from support.tiny_models import TinyKind, make_tiny_model

pytestmark = pytest.mark.process

NULL, PREFILL, DECODE = DisaggregationMode.NULL, DisaggregationMode.PREFILL, DisaggregationMode.DECODE
DEADLINE = 60.0
TWO = WorkerShape(dp_size=2)
# Of different lengths, two of them more than one chunk, so that a rank is done before the other.
PROMPTS = [[(i * 37 + j * j * 11) % 250 for j in range(length)] for i, length in enumerate((1, 90, 17, 5, 150))]
LENGTHS = [24, 6, 13, 3, 9]
ARGS = ["--max-total-tokens", "4000", "--chunked-prefill-size", "64"]


def make(kind: TinyKind, folder: Path) -> tuple[str, Reference]:
    torch.set_num_threads(1)
    model = make_tiny_model(kind, folder / kind)
    return str(model), greedy_reference(transformers.AutoModelForCausalLM.from_pretrained(model).eval())


def exact(num_tokens: int) -> dict[str, int]:
    return {"max_new_tokens": num_tokens, "min_new_tokens": num_tokens}


def states(child: ChildProcess) -> list[dict]:
    """Of each rank."""
    return httpx.get(f"{wait_ready(child).url}/server_info", timeout=DEADLINE).json()["internal_states"]


def check_ranks_are_idle_after_the_same_steps(child: ChildProcess) -> list[dict]:
    """And hold nothing, and compute nothing more."""
    deadline = time.monotonic() + DEADLINE
    while True:
        found = states(child)
        steps = {state["num_steps_total"] for state in found}
        problem = [held(state) for state in found if held(state)]
        if len(steps) == 1 and not problem:
            break
        assert time.monotonic() < deadline, (steps, problem, child.log_tail())
    assert {state["num_steps_total"] for _ in range(3) for state in states(child)} == steps
    return found


def test_tokens_are_those_of_one_rank_and_a_killed_rank_ends_its_worker(tmp_path: Path) -> None:
    model, reference = make("deepseek_v3", tmp_path)
    with Shapes(model, tmp_path, args=ARGS) as shapes:
        child = shapes.start(NULL, TWO, "--enable-dp-attention")
        worker = wait_ready(child)
        # Alone: the other rank has nothing but its experts.
        alone = shapes.generate(worker, PROMPTS[2], sampling_params=exact(8))
        assert alone.json()["output_ids"] == reference(PROMPTS[2], 8)
        before = check_ranks_are_idle_after_the_same_steps(child)
        assert min(state["num_computed_tokens_total"] for state in before) == 0
        assert before[0]["num_steps_total"] >= 8
        with ThreadPoolExecutor(len(PROMPTS)) as pool:
            asked = [
                pool.submit(shapes.generate, worker, prompt, sampling_params=exact(n))
                for prompt, n in zip(PROMPTS, LENGTHS, strict=True)
            ]
            answers = [answer.result().json()["output_ids"] for answer in asked]
        assert answers == [reference(prompt, n) for prompt, n in zip(PROMPTS, LENGTHS, strict=True)]
        shapes.check_health(worker)
        after = check_ranks_are_idle_after_the_same_steps(child)
        assert min(state["num_finished_reqs_total"] for state in after) >= 1
        _check_a_killed_rank_ends_its_worker(shapes, child)


def _check_a_killed_rank_ends_its_worker(shapes: Shapes, child: ChildProcess) -> None:
    worker = wait_ready(child)
    ranks = [psutil.Process(pid) for pid in worker.scheduler_pids]
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(shapes.generate, worker, PROMPTS[0], sampling_params=exact(3000))
        deadline = time.monotonic() + DEADLINE
        while not any(state["num_running_reqs"] for state in states(child)):
            assert time.monotonic() < deadline
        ranks[1].send_signal(signal.SIGKILL)
        assert asked.result(DEADLINE).status_code == 503
    assert child.wait(DEADLINE)
    assert child.exit_code == 1
    assert "data parallel rank 1 was killed by signal 9" in child.log_path.read_text()
    assert not any(rank.is_running() for rank in ranks)


@pytest.mark.soak
@pytest.mark.parametrize("kind", ["mixtral", "deepseek_v3"])
@pytest.mark.parametrize(("prefill_shares", "decode_shares"), [(True, False), (True, True)])
def test_a_pair_hands_over_from_and_to_ranks_that_meet(
    kind: TinyKind, prefill_shares: bool, decode_shares: bool, tmp_path: Path
) -> None:
    model, reference = make(kind, tmp_path)

    def start(shapes: Shapes, mode: DisaggregationMode, shares: bool) -> ChildProcess:
        return shapes.start(mode, *([TWO, "--enable-dp-attention"] if shares else [WorkerShape()]))

    with Shapes(model, tmp_path, args=ARGS) as shapes:
        prefill, decode = start(shapes, PREFILL, prefill_shares), start(shapes, DECODE, decode_shares)
        pair = wait_ready(prefill), wait_ready(decode)
        with ThreadPoolExecutor(len(PROMPTS)) as pool:
            for _ in ("cold", "warm"):
                asked = [
                    pool.submit(shapes.generate_apart, *pair, prompt, sampling_params=exact(n))
                    for prompt, n in zip(PROMPTS, LENGTHS, strict=True)
                ]
                answers = [answer.result().json()["output_ids"] for answer in asked]
                assert answers == [reference(prompt, n) for prompt, n in zip(PROMPTS, LENGTHS, strict=True)]
        for child in (prefill, decode):
            check_ranks_are_idle_after_the_same_steps(child)
        pids = [psutil.Process(pid) for worker in pair for pid in worker.scheduler_pids]
    # All ended in order: no rank was left in a collective, and none was killed.
    assert [child.exit_code for child in (prefill, decode)] == [0, 0]
    assert "killing it" not in prefill.log_path.read_text() + decode.log_path.read_text()
    assert not any(pid.is_running() for pid in pids)


@pytest.mark.soak
def test_a_model_without_experts_is_refused(tmp_path: Path) -> None:
    model, _ = make("llama", tmp_path)
    with Shapes(model, tmp_path) as shapes:
        child = shapes.start(NULL, TWO, "--enable-dp-attention")
        assert child.wait(DEADLINE)
        assert child.exit_code == USAGE_EXIT_CODE
        assert "deals a model's experts out to ranks" in child.log_path.read_text()
