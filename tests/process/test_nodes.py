"""One worker over several hosts: tokens are those of one rank, and the end of any host is that of the worker.

Hosts are loopback addresses here, and network namespaces where the way between them matters.
"""

from __future__ import annotations

import secrets
import signal
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import httpx
import psutil
import pytest
import torch
import transformers

from splitserve.core.parallel import WorkerShape
from splitserve.core.request import DisaggregationMode
from splitserve.engine.sources import resolve_model
from splitserve.process.child import ChildProcess
from support.deployment import MODEL, THROUGH_SOCKETS
from support.hosts import missing, standing_on, two_hosts
from support.processes import running, wait_ready
from support.reference import NUM_OUTPUT_TOKENS, Reference, greedy_reference
from support.shapes import Shapes, make_divisible_model
from support.tokens import write_token_file

pytestmark = pytest.mark.process

NULL, PREFILL, DECODE = DisaggregationMode.NULL, DisaggregationMode.PREFILL, DisaggregationMode.DECODE
DEADLINE = 60.0
PROMPTS = [[(i * 37 + j * 11) % 250 for j in range(3 + 21 * i)] for i in range(6)]
EXACT = {"max_new_tokens": NUM_OUTPUT_TOKENS, "min_new_tokens": NUM_OUTPUT_TOKENS}
ENDLESS = {"max_new_tokens": 3000, "min_new_tokens": 3000}
# Chunks that are smaller than most prompts.
ARGS = ["--max-total-tokens", "4000", "--chunked-prefill-size", "32", "--device", "cpu"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_divisible_model(tmp_path_factory.mktemp("models") / "llama"))


@pytest.fixture(scope="module")
def reference(model: str) -> Reference:
    torch.set_num_threads(1)
    return greedy_reference(transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval())


def check_alone(shapes: Shapes, nodes: Sequence[ChildProcess], reference: Reference, prompts: Sequence) -> None:
    worker = wait_ready(nodes[0])
    with ThreadPoolExecutor(len(prompts)) as pool:
        answers = list(pool.map(lambda p: shapes.generate(worker, p, sampling_params=EXACT), prompts))
    assert [answer.json()["output_ids"] for answer in answers] == [reference(prompt) for prompt in prompts]
    shapes.check_nothing_is_held(nodes[0])


def ranks_of(nodes: Sequence[ChildProcess]) -> list[psutil.Process]:
    ready = [wait_ready(node) for node in nodes]
    return [psutil.Process(pid) for info in ready for pid in (*info.scheduler_pids, *info.follower_pids)]


def check_its_end_is_that_of_all(
    shapes: Shapes, nodes: Sequence[ChildProcess], victim: psutil.Process, message: str
) -> None:
    """With requests running; `message`: the error that clients receive."""
    worker, ranks = wait_ready(nodes[0]), ranks_of(nodes)
    with ThreadPoolExecutor(2) as pool:
        asked = [pool.submit(shapes.generate, worker, p, sampling_params=ENDLESS) for p in PROMPTS[:2]]
        shapes.wait_running(worker, len(asked))
        victim.kill()
        for answer in asked:
            assert answer.result(DEADLINE).status_code == 503
            assert message in answer.result().text
    for node in nodes:
        assert node.wait(DEADLINE)
        assert node.exit_code == (-signal.SIGKILL if node.pid == victim.pid else 1)
    psutil.wait_procs(ranks, timeout=DEADLINE)
    assert not any(rank.is_running() for rank in ranks)


def test_two_nodes_are_one_worker_and_end_together(model, reference, tmp_path):
    with Shapes(model, tmp_path, args=ARGS) as shapes:
        nodes = shapes.start_nodes(NULL, WorkerShape(tp_size=2), 2)
        check_alone(shapes, nodes, reference, PROMPTS)
        # What runs the ranks of the other host, not one of them.
        check_its_end_is_that_of_all(shapes, nodes, psutil.Process(nodes[1].pid), "connection to node 1")


@pytest.mark.soak
def test_a_rank_of_another_node_that_is_killed_ends_all(model, tmp_path):
    with Shapes(model, tmp_path, args=ARGS) as shapes:
        nodes = shapes.start_nodes(NULL, WorkerShape(pp_size=2), 2)
        (victim,) = (psutil.Process(pid) for pid in wait_ready(nodes[1]).follower_pids)
        message = "tensor parallel rank 0 of pipeline stage 0 was killed by signal 9 on node 1"
        check_its_end_is_that_of_all(shapes, nodes, victim, message)


@pytest.mark.soak
@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
def test_node_0_ends_and_with_it_the_others(model, tmp_path, end: signal.Signals):
    with Shapes(model, tmp_path, args=ARGS) as shapes:
        nodes = shapes.start_nodes(NULL, WorkerShape(tp_size=2), 2)
        ranks = ranks_of(nodes)
        nodes[0].send_signal(end)
        assert all(node.wait(DEADLINE) for node in nodes)
        in_order = end is signal.SIGTERM
        assert [node.exit_code for node in nodes] == ([0, 0] if in_order else [-9, 1])
        assert ("node 0 has ended" if in_order else "was lost") in nodes[1].log_path.read_text()
        psutil.wait_procs(ranks, timeout=DEADLINE)
        assert not any(rank.is_running() for rank in ranks)


@pytest.mark.soak
def test_another_node_that_is_told_to_end_drains_the_worker(model, reference, tmp_path):
    with Shapes(model, tmp_path, args=ARGS) as shapes:
        nodes = shapes.start_nodes(NULL, WorkerShape(tp_size=2), 2)
        worker = wait_ready(nodes[0])
        wait_ready(nodes[1])
        long = {"max_new_tokens": 200, "min_new_tokens": 200}
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(shapes.generate, worker, PROMPTS[0], sampling_params=long)
            shapes.wait_running(worker, 1)
            nodes[1].send_signal(signal.SIGTERM)
            answer = asked.result(DEADLINE)
        assert answer.status_code == 200
        assert len(answer.json()["output_ids"]) == 200
        assert all(node.wait(DEADLINE) for node in nodes)
        assert [node.exit_code for node in nodes] == [0, 0]


@pytest.mark.soak
@pytest.mark.parametrize(
    ("shape", "num_nodes"),
    [
        (WorkerShape(pp_size=2), 2),
        (WorkerShape(tp_size=2, pp_size=2), 2),
        (WorkerShape(tp_size=4), 2),
        (WorkerShape(tp_size=2, pp_size=2), 4),
        (WorkerShape(pp_size=3), 3),
        (WorkerShape(pp_size=2, dp_size=2), 2),
    ],
    ids=str,
)
def test_every_shape_over_nodes_equals_one_rank(model, reference, tmp_path, shape: WorkerShape, num_nodes: int):
    with Shapes(model, tmp_path, args=ARGS) as shapes:
        check_alone(shapes, shapes.start_nodes(NULL, shape, num_nodes), reference, PROMPTS)


@pytest.mark.soak
@pytest.mark.parametrize(("shape", "num_nodes"), [(WorkerShape(pp_size=2), 2), (WorkerShape(tp_size=3), 3)], ids=str)
def test_the_real_model_over_nodes_equals_one_rank(prompts, tmp_path, shape: WorkerShape, num_nodes: int):
    torch.set_num_threads(1)
    folder = resolve_model(MODEL)
    reference = greedy_reference(transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval())
    chosen = [p for p in prompts if len(p) in (1, 17, 64, 129)]
    with Shapes(MODEL, tmp_path, args=["--max-total-tokens", "8000", "--chunked-prefill-size", "64"]) as shapes:
        check_alone(shapes, shapes.start_nodes(NULL, shape, num_nodes), reference, chosen)


@pytest.mark.soak
@pytest.mark.parametrize("shape", [WorkerShape(pp_size=2), WorkerShape(tp_size=2, pp_size=2)], ids=str)
def test_prefill_and_decode_over_two_hosts_each(model, reference, tmp_path, shape: WorkerShape):
    """Hosts reach each other by one address alone: every rank must announce its own."""
    if problem := missing():
        pytest.skip(problem)
    token = tmp_path / "token"
    write_token_file(token)
    with ExitStack() as closing:
        near, far = closing.enter_context(two_hosts()).hosts
        options = ["--dtype", "float32", "--threads", "1", *THROUGH_SOCKETS, *ARGS]

        def start(mode: DisaggregationMode, port: int) -> list[ChildProcess]:
            """Node 0 of prefill on one host, that of decode on the other."""
            hosts = (near, far) if mode is PREFILL else (far, near)
            args = ["serve", model, "--disaggregation-mode", mode, *shape.args, *options, "--nnodes", "2"]
            args += ["--dist-init-addr", f"{hosts[0].address}:{port}", "--cluster-token-file", str(token)]
            found = []
            for i, host in enumerate(hosts):
                own = [*args, "--node-rank", str(i)]
                # An address of HTTP that the client reaches; the others follow from the way to node 0.
                own += ["--host", host.address, "--port", "0", "--disaggregation-bootstrap-port", "0"] if i == 0 else []
                name = f"{mode}-{i}"
                found.append(closing.enter_context(running(own, tmp_path, name=name, program=host.program)))
            return found

        prefill, decode = start(PREFILL, 20000), start(DECODE, 20001)
        pair = wait_ready(prefill[0]), wait_ready(decode[0])
        clients = [closing.enter_context(standing_on(near)) for _ in pair]

        def ask(worker: Any, prompt: Sequence[int], room: int) -> httpx.Response:
            where = {"bootstrap_host": near.address, "bootstrap_port": pair[0].bootstrap_port, "bootstrap_room": room}
            body = {"input_ids": list(prompt), "sampling_params": {"temperature": 0.0, **EXACT}, **where}
            return httpx.post(f"{worker.url}/generate", json=body, timeout=DEADLINE, trust_env=False)

        with ThreadPoolExecutor(2) as pool:
            for prompt in PROMPTS:
                room = secrets.randbits(62)
                answers = [pool.submit(call, ask, w, prompt, room) for call, w in zip(clients, pair, strict=True)]
                assert [answer.result(DEADLINE).status_code for answer in answers] == [200, 200], answers[1].result()
                assert answers[1].result().json()["output_ids"] == reference(prompt)


@pytest.mark.soak
def test_a_cut_between_the_hosts_ends_the_worker_on_both(model, tmp_path):
    """No node is notified: the missing heartbeat ends the others."""
    if problem := missing():
        pytest.skip(problem)
    token = tmp_path / "token"
    write_token_file(token)
    with ExitStack() as closing:
        wire = closing.enter_context(two_hosts())
        nodes = []
        for i, host in enumerate(wire.hosts):
            args = ["serve", model, "--dtype", "float32", "--threads", "1", *ARGS, "--pp-size", "2", "--nnodes", "2"]
            args += ["--dist-init-addr", f"{wire.hosts[0].address}:20000", "--cluster-token-file", str(token)]
            args += ["--node-rank", str(i), *(["--port", "0"] if i == 0 else [])]
            nodes.append(closing.enter_context(running(args, tmp_path, name=f"node{i}", program=host.program)))
        ranks, url = ranks_of(nodes), wait_ready(nodes[0]).url
        call = closing.enter_context(standing_on(wire.hosts[0]))
        body = {"input_ids": PROMPTS[0], "sampling_params": ENDLESS, "stream": True}

        def ask() -> bytes:
            with httpx.stream("POST", f"{url}/generate", json=body, timeout=DEADLINE, trust_env=False) as stream:
                lines = stream.iter_lines()
                next(lines)
                wire.cut()
                return "".join(lines).encode()

        assert b"node 1" in call(ask)
        assert all(node.wait(DEADLINE) for node in nodes)
        assert [node.exit_code for node in nodes] == [1, 1]
        assert all("it was silent for 15 s" in node.log_path.read_text() for node in nodes)
        psutil.wait_procs(ranks, timeout=DEADLINE)
        assert not any(rank.is_running() for rank in ranks)


@pytest.mark.soak
@pytest.mark.parametrize("shape", [WorkerShape(tp_size=2), WorkerShape(tp_size=2, pp_size=2)], ids=str)
def test_prefill_over_nodes_hands_over_to_one_rank_and_takes_its_pages_back(model, reference, tmp_path, shape):
    with Shapes(model, tmp_path, args=ARGS) as shapes:
        prefill = shapes.start_nodes(PREFILL, shape, 2)
        # Its address must be one that prefill's are reachable from.
        decode = shapes.start(DECODE, WorkerShape(), "--cluster-token-file", str(tmp_path / "token"))
        pair = wait_ready(prefill[0]), wait_ready(decode)
        host = prefill[0].log_path.read_text().partition("this worker at ")[2].partition(":")[0]
        with ThreadPoolExecutor(len(PROMPTS)) as pool:
            answers = list(
                pool.map(lambda p: shapes.generate_apart(*pair, p, host=host, sampling_params=EXACT), PROMPTS)
            )
        assert [a.json()["output_ids"] for a in answers] == [reference(p) for p in PROMPTS]
        shapes.check_nothing_is_held(prefill[0], decode)
