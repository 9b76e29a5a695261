"""Data parallel attention in real processes: ranks with requests of their own meet for the experts of each layer."""

from __future__ import annotations

import os
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
from splitserve.process.lifecycle import ReadyInfo
from support.processes import wait_ready
from support.reference import Reference, greedy_reference
from support.shapes import Shapes
from support.tiny_models import TinyKind, make_tiny_model

pytestmark = pytest.mark.process

NULL, PREFILL, DECODE = DisaggregationMode.NULL, DisaggregationMode.PREFILL, DisaggregationMode.DECODE
DEADLINE = 60.0
ONE, TWO = WorkerShape(), WorkerShape(dp_size=2)
# Two groups of two ranks.
FOUR = WorkerShape(tp_size=4, dp_size=2)
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


def check_pair(shapes: Shapes, pair: tuple[ReadyInfo, ReadyInfo], reference: Reference) -> None:
    """Cold and warm: all requests at once, with the tokens of one rank."""
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        for _ in ("cold", "warm"):
            asked = [
                pool.submit(shapes.generate_apart, *pair, prompt, sampling_params=exact(n))
                for prompt, n in zip(PROMPTS, LENGTHS, strict=True)
            ]
            answers = [answer.result().json()["output_ids"] for answer in asked]
            assert answers == [reference(prompt, n) for prompt, n in zip(PROMPTS, LENGTHS, strict=True)]


def test_groups_of_ranks_decode_what_ranks_of_another_shape_computed(tmp_path: Path) -> None:
    model, reference = make("mixtral", tmp_path)
    with Shapes(model, tmp_path, args=ARGS) as shapes:
        prefill = shapes.start(PREFILL, WorkerShape(tp_size=2))
        decode = shapes.start(DECODE, FOUR, "--enable-dp-attention")
        pair = wait_ready(prefill), wait_ready(decode)
        # A driver for each group, with a follower.
        assert (len(pair[1].scheduler_pids), len(pair[1].follower_pids)) == (2, 2)
        check_pair(shapes, pair, reference)
        found = check_ranks_are_idle_after_the_same_steps(decode)
        assert min(state["num_finished_reqs_total"] for state in found) >= 1
        shapes.check_nothing_is_held(prefill)
    check_ended_in_order(prefill, decode, *pair)


def check_ended_in_order(*ended: ChildProcess | ReadyInfo) -> None:
    """No rank was left in a collective, and none was killed."""
    for one in ended:
        if isinstance(one, ChildProcess):
            assert one.exit_code == 0
            assert "killing it" not in one.log_path.read_text()
        else:
            assert not any(psutil.pid_exists(pid) for pid in (*one.scheduler_pids, *one.follower_pids))


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
        _check_a_killed_rank_ends_its_worker(shapes, child, wait_ready(child).scheduler_pids[1])
        assert "data parallel rank 1 was killed by signal 9" in child.log_path.read_text()


def _check_a_killed_rank_ends_its_worker(shapes: Shapes, child: ChildProcess, pid: int) -> None:
    worker = wait_ready(child)
    ranks = [psutil.Process(pid) for pid in (*worker.scheduler_pids, *worker.follower_pids)]
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(shapes.generate, worker, PROMPTS[0], sampling_params=exact(3000))
        deadline = time.monotonic() + DEADLINE
        while not any(state["num_running_reqs"] for state in states(child)):
            assert time.monotonic() < deadline
        os.kill(pid, signal.SIGKILL)
        assert asked.result(DEADLINE).status_code == 503
    assert child.wait(DEADLINE)
    assert child.exit_code == 1
    assert not any(rank.is_running() for rank in ranks)


@pytest.mark.soak
def test_a_killed_follower_ends_all_groups(tmp_path: Path) -> None:
    model, reference = make("deepseek_v3", tmp_path)
    with Shapes(model, tmp_path, args=ARGS) as shapes:
        child = shapes.start(NULL, FOUR, "--enable-dp-attention")
        worker = wait_ready(child)
        # This group alone has requests. The other one only computes its experts.
        assert shapes.generate(worker, PROMPTS[1], sampling_params=exact(8)).json()["output_ids"] == reference(
            PROMPTS[1], 8
        )
        _check_a_killed_rank_ends_its_worker(shapes, child, worker.follower_pids[0])
        assert "tensor parallel rank 1 of pipeline stage 0, data parallel rank 0 was killed" in child.log_tail()


@pytest.mark.soak
def test_requests_retracted_in_a_group_are_computed_again(tmp_path: Path) -> None:
    model, reference = make("mixtral", tmp_path)
    tight = ["--max-total-tokens", "224", "--num-reserved-decode-tokens", "1"]
    prompts = [[*PROMPTS[1][:50], i] for i in range(8)]
    with Shapes(model, tmp_path, args=ARGS) as shapes:
        prefill = shapes.start(PREFILL, WorkerShape(tp_size=2))
        decode = shapes.start(DECODE, FOUR, "--enable-dp-attention", *tight)
        pair = wait_ready(prefill), wait_ready(decode)
        with ThreadPoolExecutor(len(prompts)) as pool:
            asked = [pool.submit(shapes.generate_apart, *pair, prompt, sampling_params=exact(40)) for prompt in prompts]
            answers = [answer.result().json()["output_ids"] for answer in asked]
        assert answers == [reference(prompt, 40) for prompt in prompts]
        found = check_ranks_are_idle_after_the_same_steps(decode)
        assert sum(state["num_retracted_requests_total"] for state in found) > 0


@pytest.mark.soak
@pytest.mark.parametrize("kind", ["mixtral", "deepseek_v3"])
@pytest.mark.parametrize(
    ("prefill_shape", "decode_shape"),
    [(TWO, ONE), (TWO, TWO), (FOUR, ONE), (FOUR, WorkerShape(tp_size=2)), (FOUR, TWO), (TWO, FOUR), (FOUR, FOUR)],
    ids=str,
)
def test_a_pair_hands_over_from_and_to_ranks_that_meet(
    kind: TinyKind, prefill_shape: WorkerShape, decode_shape: WorkerShape, tmp_path: Path
) -> None:
    model, reference = make(kind, tmp_path)

    def start(shapes: Shapes, mode: DisaggregationMode, shape: WorkerShape) -> ChildProcess:
        return shapes.start(mode, shape, *(["--enable-dp-attention"] if shape.dp_size > 1 else []))

    with Shapes(model, tmp_path, args=ARGS) as shapes:
        prefill, decode = start(shapes, PREFILL, prefill_shape), start(shapes, DECODE, decode_shape)
        pair = wait_ready(prefill), wait_ready(decode)
        check_pair(shapes, pair, reference)
        for child in (prefill, decode):
            check_ranks_are_idle_after_the_same_steps(child)
    check_ended_in_order(prefill, decode, *pair)


@pytest.mark.soak
def test_each_rank_retracts_to_its_own_host_memory(tmp_path: Path) -> None:
    model, reference = make("deepseek_v3", tmp_path)
    # A pool for two or three of a rank's six answers.
    tight = ["--max-total-tokens", "160", "--num-reserved-decode-tokens", "1", "--disable-radix-cache"]
    prompts = [[(i * 37 + j * 11) % 250 for j in range(5 + i)] for i in range(12)]
    with Shapes(model, tmp_path, args=[*ARGS, *tight]) as shapes:
        child = shapes.start(NULL, TWO, "--enable-dp-attention")
        worker = wait_ready(child)
        with ThreadPoolExecutor(len(prompts)) as pool:
            answers = list(pool.map(lambda p: shapes.generate(worker, p, sampling_params=exact(40)), prompts))
        assert [answer.json()["output_ids"] for answer in answers] == [reference(prompt, 40) for prompt in prompts]
        found = check_ranks_are_idle_after_the_same_steps(child)
        num_retracted = sum(state["num_retracted_requests_total"] for state in found)
        assert sum(state["num_retracted_resumed_whole_total"] for state in found) == num_retracted > 0
        assert all(state["num_retracted_recomputed_tokens_total"] == 0 for state in found)


@pytest.mark.soak
def test_a_model_without_experts_is_refused(tmp_path: Path) -> None:
    model, _ = make("llama", tmp_path)
    with Shapes(model, tmp_path) as shapes:
        child = shapes.start(NULL, TWO, "--enable-dp-attention")
        assert child.wait(DEADLINE)
        assert child.exit_code == USAGE_EXIT_CODE
        assert "distributes a model's experts over ranks" in child.log_path.read_text()
