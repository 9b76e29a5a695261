"""Nodes of one worker as processes, around ranks without a model: who is refused, and that all end together."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import psutil
import pytest
import tokenizers
from safetensors.numpy import save_file

from splitserve import cli
from splitserve.process.child import ChildProcess
from support import fake_worker
from support.fake_scheduler import FOLLOWER_REFUSES, HANG_TOKEN, STUCK
from support.processes import running, wait_ready
from support.tokens import write_token_file

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("workers_fork")]

DEADLINE = 60.0
# Loopback addresses that are this process's alone: any port of theirs is free.
HEAD, OTHER = (f"127.{os.getpid() % 250 + 1}.{os.getpid() // 250 % 250 + 1}.{i}" for i in (251, 252))


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"w{i}": i for i in range(16)}, unk_token="w0"))
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text('{"eos_token_id": 15}')
    save_file({}, folder / "model.safetensors")
    write_token_file(folder / "token")
    return folder


@contextmanager
def node(model: Path, folder: Path, node_rank: int, *options: str, scenario: str = STUCK) -> Iterator[ChildProcess]:
    args = ["serve", str(model), "--pp-size", "2", "--nnodes", "2", "--node-rank", str(node_rank)]
    args += ["--dist-init-addr", f"{HEAD}:20000", "--cluster-token-file", str(model / "token")]
    args += ["--port", "0"] if node_rank == 0 else ["--host", OTHER]
    with running([*args, *options], folder, name=f"node{node_rank}", program=(*fake_worker.PROGRAM, scenario)) as child:
        yield child


@contextmanager
def both(model: Path, folder: Path) -> Iterator[tuple[list[ChildProcess], list[psutil.Process]]]:
    """Nodes, and all ranks."""
    with ExitStack() as closing:
        nodes = [closing.enter_context(node(model, folder, i)) for i in (0, 1)]
        ready = [wait_ready(child) for child in nodes]
        assert [len(info.scheduler_pids) for info in ready] == [1, 0]
        assert [len(info.follower_pids) for info in ready] == [0, 1]
        assert ready[1].url == ready[0].url
        yield nodes, [psutil.Process(pid) for info in ready for pid in (*info.scheduler_pids, *info.follower_pids)]


def test_a_rank_that_is_killed_on_node_1_ends_node_0_though_its_ranks_hear_nothing(model_folder, tmp_path):
    with both(model_folder, tmp_path) as (nodes, ranks):
        url = wait_ready(nodes[0]).url
        body = {"input_ids": [HANG_TOKEN], "sampling_params": {"max_new_tokens": 3}, "stream": True}
        with httpx.stream("POST", f"{url}/generate", json=body, timeout=DEADLINE, trust_env=False) as stream:
            ranks[1].kill()
            assert b"of pipeline stage 0 was killed by signal 9 on node 1" in stream.read()
        assert all(child.wait(DEADLINE) for child in nodes)
        assert [child.exit_code for child in nodes] == [1, 1]
        assert not any(rank.is_running() for rank in ranks)


def test_node_1_ends_when_node_0_is_killed(model_folder, tmp_path):
    with both(model_folder, tmp_path) as (nodes, ranks):
        nodes[0].send_signal(signal.SIGKILL)
        assert nodes[1].wait(DEADLINE)
        assert nodes[1].exit_code == 1
        assert f"node 0 at {HEAD}:20000 was lost (its connection ended)" in nodes[1].log_path.read_text()
        # It ignores the end of its input, and its starter has ended.
        ranks[0].kill()
        psutil.wait_procs(ranks, timeout=DEADLINE)
        assert not any(rank.is_running() for rank in ranks)


def test_a_failed_start_of_a_rank_of_node_1_ends_both_nodes_with_its_exit_code(model_folder, tmp_path):
    with ExitStack() as closing:
        nodes = [closing.enter_context(node(model_folder, tmp_path, i, scenario=FOLLOWER_REFUSES)) for i in (0, 1)]
        assert all(child.wait(DEADLINE) for child in nodes)
        assert [child.exit_code for child in nodes] == [2, 2]
        assert "error: the model does not fit" in nodes[0].log_path.read_text()
        assert "node 0 reports: the model does not fit" in nodes[1].log_path.read_text()


def test_options_that_differ_and_another_token_are_refused(model_folder, tmp_path):
    other_token = tmp_path / "token"
    write_token_file(other_token)
    refused = {
        "--page-size is 16 on node 0 and 8 on node 1": ["--page-size", "8"],
        "the cluster tokens differ": ["--cluster-token-file", str(other_token)],
    }
    with ExitStack() as closing:
        head = closing.enter_context(node(model_folder, tmp_path, 0))
        strangers = []
        for i, options in enumerate(refused.values()):
            folder = tmp_path / str(i)
            folder.mkdir()
            strangers.append(closing.enter_context(node(model_folder, folder, 1, *options)))
        for said, stranger in zip(refused, strangers, strict=True):
            assert stranger.wait(DEADLINE)
            assert stranger.exit_code == 2
            assert said in stranger.log_path.read_text()
        # It waits until it gets another order.
        head.send_signal(signal.SIGTERM)
        assert head.wait(DEADLINE)
        assert head.exit_code == 128 + signal.SIGTERM


def test_who_does_not_come_in_time_is_named(model_folder, tmp_path):
    with node(model_folder, tmp_path, 0, "--load-timeout", "0.2") as head:
        assert head.wait(DEADLINE)
        assert head.exit_code == 1
        assert f"node 1 of 2 did not come to {HEAD}:20000 within 0.2 s" in head.log_path.read_text()


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--nnodes", "2", "--tp-size", "2"], "--nnodes above 1 and --dist-init-addr HOST:PORT"),
        (["--dist-init-addr", "127.0.0.1:1"], "need each other"),
        (["--nnodes", "2", "--node-rank", "2", "--tp-size", "2"], "--node-rank must be in [0, 1]"),
        (["--nnodes", "2", "--dist-init-addr", "127.0.0.1", "--tp-size", "2"], "give HOST:PORT of node 0"),
        (["--nnodes", "2", "--dist-init-addr", "127.0.0.1:1", "--tp-size", "2"], "--cluster-token-file is needed with"),
        (["--nnodes", "2", "--dist-init-addr", "127.0.0.1:1", "--tp-size", "3"], "but to 1 or 3"),
        (
            ["--nnodes", "2", "--dist-init-addr", "127.0.0.1:1", "--dp-size", "2", "--enable-dp-attention"],
            "--nnodes does not go together with --enable-dp-attention",
        ),
        (["--nnodes", "2", "--dist-init-addr", "127.0.0.1:1", "--cluster-token-file", "/no/file"], "/no/file"),
        (
            [
                *("--nnodes", "2", "--node-rank", "1", "--tp-size", "2"),
                *("--dist-init-addr", "no-host.invalid:1"),
                "--load-timeout",
                "0.1",
            ],
            "no way there",
        ),
    ],
)
def test_options_that_do_not_go_together_are_refused(capsys, options, problem):
    with pytest.raises(SystemExit) as ended:
        cli.main(["serve", "smollm2", *options])
    assert ended.value.code == 2
    assert problem in capsys.readouterr().err
