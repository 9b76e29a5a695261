"""Models cut over ranks, in real processes: tokens are those of one rank, whatever the shapes of a pair.

`make test` has one pair and the end of a follower, `make soak` every pair of shapes over tcp and shm, and smollm2.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import psutil
import pytest
import torch
import transformers

from splitserve.core.errors import USAGE_EXIT_CODE
from splitserve.core.parallel import WorkerShape
from splitserve.core.request import FAKE_BOOTSTRAP_HOST, DisaggregationMode
from splitserve.deploy.deployment import LocalDeployment
from splitserve.deploy.local import LocalCluster
from splitserve.engine.sources import resolve_model
from splitserve.process.child import ChildProcess
from splitserve.server.fake_transfer import FAKE_ACCEPTED, FAKE_HEADER
from splitserve.tools.chaos.streams import follow_undisturbed, make_requests
from support import failing_follower
from support.deployment import MODEL, THROUGH_SOCKETS, Deployment
from support.failing_follower import MESSAGE
from support.processes import wait_ready
from support.reference import NUM_OUTPUT_TOKENS, Reference, greedy_reference
from support.shapes import Shapes, make_divisible_model
from support.streams import follow_all

pytestmark = pytest.mark.process

NULL, PREFILL, DECODE = DisaggregationMode.NULL, DisaggregationMode.PREFILL, DisaggregationMode.DECODE
DEADLINE = 60.0
PROMPTS = [[(i * 37 + j * 11) % 250 for j in range(3 + 21 * i)] for i in range(8)]
# Chunks that are smaller than most prompts.
ARGS = ["--max-total-tokens", "4000", "--chunked-prefill-size", "32"]
SHAPES = [WorkerShape(tp, pp) for tp, pp in ((1, 1), (2, 1), (4, 1), (1, 2), (2, 2))]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_divisible_model(tmp_path_factory.mktemp("models") / "llama"))


@pytest.fixture(scope="module")
def reference(model: str) -> Reference:
    torch.set_num_threads(1)
    return greedy_reference(transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval())


def exact(num_tokens: int) -> dict[str, int]:
    return {"max_new_tokens": num_tokens, "min_new_tokens": num_tokens}


def check_pair(
    shapes: Shapes,
    prefill: ChildProcess,
    decode: ChildProcess,
    reference: Reference,
    prompts,
    num_tokens: int = NUM_OUTPUT_TOKENS,
) -> None:
    """All prompts at once, twice: what the first round has left in the caches is there for the second."""
    pair = wait_ready(prefill), wait_ready(decode)
    params = exact(num_tokens)
    for temperature in ("cold", "warm"):
        with ThreadPoolExecutor(len(prompts)) as pool:
            answers = list(pool.map(lambda p: shapes.generate_apart(*pair, p, sampling_params=params), prompts))
        for prompt, answer in zip(prompts, answers, strict=True):
            assert answer.status_code == 200, answer.text
            assert answer.json()["output_ids"] == reference(prompt, num_tokens), (temperature, len(prompt))
    for worker in pair:
        shapes.check_health(worker)
    shapes.check_nothing_is_held(prefill, decode)


def check_alone(
    shapes: Shapes, child: ChildProcess, reference: Reference, prompts, num_tokens: int = NUM_OUTPUT_TOKENS
) -> None:
    worker = wait_ready(child)
    params = exact(num_tokens)
    with ThreadPoolExecutor(len(prompts)) as pool:
        answers = list(pool.map(lambda p: shapes.generate(worker, p, sampling_params=params), prompts))
    assert [answer.json()["output_ids"] for answer in answers] == [reference(prompt, num_tokens) for prompt in prompts]
    shapes.check_nothing_is_held(child)


def test_a_pair_of_unequal_shapes_equals_one_rank_and_ends_with_any_of_its_ranks(model, reference, tmp_path):
    with Shapes(model, tmp_path, args=ARGS) as shapes:
        prefill = shapes.start(PREFILL, WorkerShape(tp_size=2), "--page-size", "16", program=failing_follower.PROGRAM)
        decode = shapes.start(DECODE, WorkerShape(pp_size=2), "--page-size", "8")
        check_pair(shapes, prefill, decode, reference, PROMPTS)
        _check_a_killed_follower_ends_its_worker_alone(shapes, prefill, decode)
        _check_a_step_that_fails_on_a_follower_ends_its_worker(shapes, prefill)


def _check_a_killed_follower_ends_its_worker_alone(shapes: Shapes, prefill: ChildProcess, decode: ChildProcess) -> None:
    pair = wait_ready(prefill), wait_ready(decode)
    ranks = [psutil.Process(pid) for pid in (*pair[1].scheduler_pids, *pair[1].follower_pids)]
    endless = {"max_new_tokens": 3000, "min_new_tokens": 3000}
    with ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(shapes.generate_apart, *pair, p, sampling_params=endless) for p in PROMPTS[:4]]
        shapes.wait_running(pair[1], len(asked))
        ranks[1].kill()
        for answer in asked:
            assert answer.result(DEADLINE).status_code == 503
    assert decode.wait(DEADLINE)
    assert "tensor parallel rank 0 of pipeline stage 0 was killed by signal 9" in decode.log_path.read_text()
    assert decode.exit_code == 1
    assert not any(rank.is_running() for rank in ranks)
    # The other worker has its pages back, and serves on.
    shapes.check_nothing_is_held(prefill)


def _check_a_step_that_fails_on_a_follower_ends_its_worker(shapes: Shapes, child: ChildProcess) -> None:
    worker = wait_ready(child)
    ranks = [psutil.Process(pid) for pid in (*worker.scheduler_pids, *worker.follower_pids)]
    room = {"bootstrap_host": FAKE_BOOTSTRAP_HOST, "bootstrap_room": 1, "headers": {FAKE_HEADER: FAKE_ACCEPTED}}
    assert shapes.generate(worker, PROMPTS[0], **room).status_code == 200
    ranks[1].send_signal(signal.SIGUSR1)
    answer = shapes.generate(worker, PROMPTS[1], **room)
    assert answer.status_code == 503
    assert f"rank tp 1 of 2, pp 0 of 1: A step of the driver failed on this rank: MemoryError: {MESSAGE}" in answer.text
    assert child.wait(DEADLINE)
    assert child.exit_code == 1
    assert not any(rank.is_running() for rank in ranks)


@pytest.mark.soak
@pytest.mark.parametrize("shape", SHAPES[1:], ids=str)
def test_a_colocated_worker_equals_one_rank(model, reference, tmp_path, shape: WorkerShape):
    with Shapes(model, tmp_path, args=ARGS) as shapes:
        check_alone(shapes, shapes.start(NULL, shape), reference, PROMPTS)


@pytest.fixture(scope="module", params=["tcp", "shm"])
def prefills(request, model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Shapes, dict]]:
    """A prefill worker of every shape."""
    with Shapes(
        model,
        tmp_path_factory.mktemp("prefills"),
        backend=request.param,
        args=[*ARGS, *(THROUGH_SOCKETS if request.param == "tcp" else ())],
    ) as shapes:
        yield shapes, {shape: shapes.start(PREFILL, shape) for shape in SHAPES}


@pytest.mark.soak
@pytest.mark.parametrize("page_size", ["16", "4"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_decode_of_any_shape_takes_from_prefill_of_any_shape(prefills, reference, shape: WorkerShape, page_size: str):
    shapes, workers = prefills
    decode = shapes.start(DECODE, shape, "--page-size", page_size)
    try:
        for prefill in workers.values():
            check_pair(shapes, prefill, decode, reference, PROMPTS)
    finally:
        decode.close()


# Short prompts with longer answers, and a pool for two of eight whole answers. All begin together, so some must be
# retracted.
SHORT_PROMPTS = [[(i * 37 + j * 11) % 250 for j in range(5 + i)] for i in range(8)]
LONG = 40
TIGHT = ["--max-total-tokens", "160", "--num-reserved-decode-tokens", "1", "--disable-radix-cache"]


def check_retractions(state: dict, *, has_copies: bool) -> None:
    """Requests were retracted. With copies none of their tokens was computed again."""
    num_retracted = state["num_retracted_requests_total"]
    assert num_retracted > 0
    assert state["retraction_host_bytes"] == 0
    if has_copies:
        assert state["num_retracted_resumed_whole_total"] == num_retracted
        assert state["num_retracted_recomputed_tokens_total"] == 0
    else:
        assert state["num_retracted_recomputed_tokens_total"] > 0


def test_a_request_retracted_on_two_ranks_resumes_without_recomputation(model, reference, tmp_path):
    with Shapes(model, tmp_path, args=[*ARGS, *TIGHT]) as shapes:
        child = shapes.start(NULL, WorkerShape(tp_size=2))
        check_alone(shapes, child, reference, SHORT_PROMPTS, LONG)
        state = shapes.state(wait_ready(child))
        check_retractions(state, has_copies=True)
        # Every token was computed once. Of an answer the last token is not.
        assert state["num_computed_tokens_total"] == sum(len(p) + LONG - 1 for p in SHORT_PROMPTS)


@pytest.mark.soak
@pytest.mark.parametrize("speculation", [[], ["--speculative-algorithm", "ngram"]], ids=["plain", "ngram"])
@pytest.mark.parametrize("cut", [WorkerShape(pp_size=2), WorkerShape(tp_size=2, pp_size=2)], ids=str)
def test_a_request_retracted_on_stages_resumes_without_recomputation(
    model, reference, tmp_path, cut: WorkerShape, speculation
):
    with Shapes(model, tmp_path, args=[*ARGS, *TIGHT, *speculation]) as shapes:
        child = shapes.start(NULL, cut)
        check_alone(shapes, child, reference, SHORT_PROMPTS, LONG)
        check_retractions(shapes.state(wait_ready(child)), has_copies=True)


@pytest.mark.soak
@pytest.mark.parametrize("host_memory", ["1M", "0"])
@pytest.mark.parametrize("cut", [WorkerShape(tp_size=2), WorkerShape(pp_size=2)], ids=str)
def test_requests_retracted_on_decode_resume_or_are_computed_again(
    model, reference, tmp_path, cut: WorkerShape, host_memory: str
):
    tight = [*TIGHT, "--retraction-host-memory", host_memory]
    with Shapes(model, tmp_path, args=ARGS) as shapes:
        prefill, decode = shapes.start(PREFILL, cut), shapes.start(DECODE, cut, *tight)
        check_pair(shapes, prefill, decode, reference, SHORT_PROMPTS, LONG)
        check_retractions(shapes.state(wait_ready(decode)), has_copies=host_memory != "0")


@pytest.mark.soak
def test_data_parallel_ranks_have_ranks_of_their_own(model, reference):
    cluster = LocalCluster(
        LocalDeployment(
            model=model,
            prefill_shape=WorkerShape(tp_size=2, dp_size=2),
            decode_shape=WorkerShape(pp_size=2, dp_size=2),
            dtype="float32",
            threads=1,
            worker_args=ARGS,
        )
    )
    with cluster, httpx.Client(timeout=DEADLINE) as client:
        cluster.wait_ready(timeout=300)
        deployment = Deployment(cluster, client)
        answers = deployment.generate_all(
            "disaggregated", PROMPTS, len(PROMPTS), sampling_params=exact(NUM_OUTPUT_TOKENS)
        )
        assert [a["output_ids"] for a in answers] == [reference(prompt) for prompt in PROMPTS]
        deployment.check_nothing_is_held()


@pytest.fixture(scope="module")
def real_reference() -> Reference:
    torch.set_num_threads(1)
    folder = resolve_model(MODEL)
    return greedy_reference(transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval())


@pytest.mark.soak
@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        (WorkerShape(tp_size=3), WorkerShape(pp_size=2)),
        (WorkerShape(pp_size=2), WorkerShape(tp_size=3)),
        (WorkerShape(tp_size=3, pp_size=2), WorkerShape()),
    ],
    ids=str,
)
def test_the_real_model_equals_one_rank(prompts, real_reference, tmp_path, prefill: WorkerShape, decode: WorkerShape):
    chosen = [p for p in prompts if len(p) in (1, 17, 64, 129, 513)]
    with Shapes(MODEL, tmp_path, args=["--max-total-tokens", "8000", "--chunked-prefill-size", "64"]) as shapes:
        pair = shapes.start(PREFILL, prefill), shapes.start(DECODE, decode)
        check_pair(shapes, *pair, real_reference, chosen)


@pytest.mark.soak
def test_a_size_that_does_not_fit_the_heads_is_refused_with_those_that_do(tmp_path):
    with Shapes(MODEL, tmp_path) as shapes:
        child = shapes.start(NULL, WorkerShape(tp_size=2))
        assert child.wait(DEADLINE)
        assert child.exit_code == USAGE_EXIT_CODE
        assert "Tensor parallel sizes that would do: 1, 3, 9." in child.log_path.read_text()


@pytest.mark.soak
@pytest.mark.parametrize(
    ("victim", "fault"), [("driver", signal.SIGKILL), ("follower", signal.SIGKILL), ("follower", signal.SIGSTOP)]
)
@pytest.mark.parametrize("role", [PREFILL, DECODE])
def test_streams_go_on_elsewhere_when_a_rank_fails(model, role: DisaggregationMode, victim: str, fault: signal.Signals):
    """Two workers of each kind; every stream has the tokens that it has undisturbed."""
    cut = WorkerShape(tp_size=2)
    cluster = LocalCluster(
        LocalDeployment(
            model=model,
            prefill=2,
            decode=2,
            prefill_shape=cut,
            decode_shape=cut,
            dtype="float32",
            threads=1,
            worker_args=ARGS,
            router_args=["--health-interval", "0.5"],
        )
    )
    with cluster, httpx.Client(timeout=DEADLINE) as client:
        cluster.wait_ready(timeout=300)
        requests = make_requests(12, 200)
        expected = follow_undisturbed(cluster.router_url, requests, timeout=DEADLINE)
        child = cluster.children_of(role)[0]
        assert child.ready is not None
        pid = (child.ready.scheduler_pids if victim == "driver" else child.ready.follower_pids)[0]

        outcomes = follow_all(
            cluster.router_url,
            requests,
            timeout=DEADLINE,
            disturb=lambda: psutil.Process(pid).send_signal(fault),
            after=2,
        )
        assert not {i: found for i, o in expected.items() if (found := outcomes[i].difference(o))}
        assert child.wait(DEADLINE)
        Deployment(cluster, client).check_nothing_is_held()
