from __future__ import annotations

import resource
import sys
from pathlib import Path
from typing import Any

import pytest

from splitserve.api.http_server import bind, port_of, reachable_host
from splitserve.core.config import CacheConfig, ModelConfig, WorkerConfig
from splitserve.core.errors import ConfigError, OptionError, clause
from splitserve.core.parallel import ParallelRank, WorkerShape
from splitserve.deploy.commands import option_value, threads_of, worker_args
from splitserve.deploy.config import KeysConfig
from splitserve.deploy.deployment import LocalDeployment
from splitserve.process.child import ChildProcess
from splitserve.process.lifecycle import Lifecycle, ReadyInfo, read_ready_file, write_ready_file
from splitserve.process.settings import setup_logger
from splitserve.ranks.group import share_of_rank
from splitserve.ranks.kv_transfer import MAX_DESCRIPTORS, check_pool_device, raise_descriptor_limit
from splitserve.ranks.scheduler_start import SchedulerStart


@pytest.mark.parametrize(
    ("backend", "device", "remedy"),
    [
        ("tcp", "cuda", "--transfer-backend cuda_ipc"),
        ("nixl", "cuda", "mooncake or nccl"),
        ("cuda_ipc", "cpu", "--device cuda"),
        ("nccl", "cpu", "shm or tcp"),
    ],
)
def test_a_pool_where_the_backend_cannot_read_is_refused_with_the_remedy(
    backend: str, device: str, remedy: str
) -> None:
    with pytest.raises(ConfigError, match=remedy):
        check_pool_device(backend, device)


@pytest.mark.parametrize(
    ("backend", "device"),
    [("tcp", "cpu"), ("shm", "cpu"), ("cuda_ipc", "cuda"), ("nccl", "cuda"), ("mooncake", "cpu"), ("mooncake", "cuda")],
)
def test_a_pool_where_the_backend_can_read_is_taken(backend: str, device: str) -> None:
    check_pool_device(backend, device)


def test_workers_of_a_local_pair_share_a_device_that_the_backend_can_read() -> None:
    def device(*args: str, backend: str = "tcp", pairs: int = 1) -> str | None:
        deployment = LocalDeployment(prefill=pairs, decode=pairs, null=1, backend=backend, worker_args=args)
        return option_value(worker_args(deployment.config(), "decode", threads=1), "--device")

    assert device() == "cpu"
    assert device("--device", "cuda:1") == "cuda:1"
    assert device("--device=cuda:1") == "cuda:1"
    assert device(backend="cuda_ipc") == "auto"
    assert device(backend="mooncake") == "auto"
    assert device(pairs=0) == "auto"


def test_a_ready_file_is_read_as_it_was_written_and_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "ready.json"
    assert read_ready_file(path) is None
    for port in (1, 2):
        info = ReadyInfo(pid=1, port=port, url="http://h:1")
        write_ready_file(path, info)
        assert read_ready_file(path) == info
    assert list(tmp_path.iterdir()) == [path]


def test_a_taken_port_says_what_to_do() -> None:
    with bind("127.0.0.1", 0) as sock, pytest.raises(ConfigError, match="choose another --host or --port"):
        bind("127.0.0.1", port_of(sock))


@pytest.mark.parametrize(
    ("host", "reachable"), [("0.0.0.0", "127.0.0.1"), ("::", "[::1]"), ("::1", "[::1]"), ("10.0.0.1", "10.0.0.1")]
)
def test_a_wildcard_address_is_reached_over_loopback(host: str, reachable: str) -> None:
    assert reachable_host(host) == reachable


async def test_the_first_request_to_end_drains_and_the_second_stops() -> None:
    lifecycle = Lifecycle()
    lifecycle.request_end()
    assert lifecycle.draining.is_set()
    assert not lifecycle.stopping.is_set()
    lifecycle.request_end()
    assert lifecycle.stopping.is_set()


@pytest.mark.parametrize("counts", [(1, 0, 0), (0, 1, 0), (0, 0, 0), (-1, -1, 1)])
def test_a_cluster_that_cannot_serve_is_refused(counts: tuple[int, int, int]) -> None:
    prefill, decode, null = counts
    with pytest.raises(ConfigError):
        LocalDeployment(model="m", prefill=prefill, decode=decode, null=null)


def test_files_of_keys_that_the_router_of_a_deployment_gets_are_those_of_the_cluster() -> None:
    args = ["--policy", "random", "--api-key-file", "c", "--operator-key-file=o", "--max-retries", "1"]
    config = LocalDeployment(router_args=[*args, "--worker-key-file", "w"]).config()
    assert config.keys == KeysConfig(clients="c", operators="o", workers="w")
    assert config.router.args == ("--policy", "random", "--max-retries", "1")
    assert LocalDeployment(router_args=args).config().keys.workers is None


def test_colocated_workers_take_their_shape_from_the_options_of_workers() -> None:
    args = ["--tp-size", "2", "--page-size", "8", "--pp-size=3"]
    config = LocalDeployment(prefill=0, decode=0, null=1, worker_args=args).config()
    pool = config.pools.colocated
    assert (pool.tp_size, pool.pp_size, pool.dp_size) == (2, 3, 1)
    assert not {"--tp-size", "--pp-size=3"} & {*config.worker_args, *pool.args}
    with pytest.raises(OptionError, match="--tp-size none: it must be a number"):
        LocalDeployment(prefill=0, decode=0, null=1, worker_args=["--tp-size", "none"]).config()


@pytest.mark.parametrize("args", [["--transfer-dtype", "int8"], ["--transfer-dtype=int8"]])
def test_options_of_decode_workers_reach_only_these(args) -> None:
    config = LocalDeployment(worker_args=["--page-size", "8", *args]).config()
    assert list(config.pools.decode.args) == args
    assert (config.pools.prefill.args, config.worker_args[-4:-2]) == ((), ("--page-size", "8"))


def test_the_cores_are_divided_among_the_workers() -> None:
    def threads(**options: Any) -> int:
        config = LocalDeployment(model="m", **options).config()
        return threads_of(config, config.pools.by_name()["decode"], 8)

    assert threads() == 4
    assert threads(prefill=2, decode=3) == 1
    assert threads(threads=3) == 3
    assert threads(decode_shape=WorkerShape(dp_size=3)) == 2
    assert threads(prefill_shape=WorkerShape(tp_size=2, pp_size=2)) == 1


def start_of(dp_size: int, *, rank: ParallelRank | None = None, **model: Any) -> SchedulerStart:
    config = WorkerConfig(model=ModelConfig(**model), cache=CacheConfig(mem_fraction=0.6))
    rank = rank or ParallelRank(dp_rank=1, dp_size=dp_size)
    return SchedulerStart(config=config, model_folder="/m", to_scheduler="a", from_scheduler="b", rank=rank)


def test_ranks_divide_the_cores_and_the_memory_of_their_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("splitserve.ranks.group.num_cores", lambda: 7)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    model, cache = share_of_rank(start_of(3))
    assert (model.threads, model.device, cache.num_sharers) == (2, "auto", 3)
    assert share_of_rank(start_of(2, cpu_affinity="0-7"))[0].threads == 4
    assert share_of_rank(start_of(9))[0].threads == 1
    assert share_of_rank(start_of(2, threads=5))[0].threads == 5
    model, cache = share_of_rank(start_of(1))
    assert (model.model, model.threads, cache.num_sharers) == ("/m", None, 1)


@pytest.mark.parametrize(
    ("asked", "got", "num_sharers"),
    [("auto", "cuda:1", 2), ("cuda", "cuda:1", 2), ("cuda:3", "cuda:3", 7), ("cpu", "cpu", 7)],
)
def test_gpus_are_dealt_out_in_turn(monkeypatch: pytest.MonkeyPatch, asked: str, got: str, num_sharers: int) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    model, cache = share_of_rank(start_of(7, device=asked))
    assert (model.device, cache.num_sharers) == (got, num_sharers)


def test_ranks_of_one_model_get_a_gpu_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    rank = ParallelRank(tp_size=2, pp_size=2, dp_size=2, dp_rank=1)
    shares = [share_of_rank(start_of(2, rank=each)) for each in rank.group()]
    assert [model.device for model, _ in shares] == ["cuda:0", "cuda:1", "cuda:2", "cuda:3"]
    assert {cache.num_sharers for _, cache in shares} == {2}
    with pytest.raises(ConfigError, match="are for 8 GPUs, and this machine has 4"):
        share_of_rank(start_of(1, rank=ParallelRank(tp_size=8)))
    with pytest.raises(ConfigError, match="--device cuda:1 is one GPU"):
        share_of_rank(start_of(1, rank=ParallelRank(tp_size=2), device="cuda:1"))


def test_ranks_that_share_experts_get_a_gpu_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    assert share_of_rank(start_of(2, dp_attention=True))[0].device == "cuda:1"
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    group = ParallelRank(tp_size=2, dp_rank=1, dp_size=2)
    shares = [share_of_rank(start_of(2, rank=rank, dp_attention=True)) for rank in group.group()]
    assert [(model.device, cache.num_sharers) for model, cache in shares] == [("cuda:2", 1), ("cuda:3", 1)]
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    with pytest.raises(ConfigError, match="--dp-size 2 is for 4 GPUs, and this machine has 2"):
        share_of_rank(start_of(2, rank=group, dp_attention=True))
    with pytest.raises(ConfigError, match="--dp-size 3 is for 3 GPUs, and this machine has 2"):
        share_of_rank(start_of(3, dp_attention=True))
    with pytest.raises(ConfigError, match="--device cuda:0 is one GPU, and --enable-dp-attention"):
        share_of_rank(start_of(2, dp_attention=True, device="cuda:0"))


def test_an_unknown_log_level_is_refused() -> None:
    with pytest.raises(ConfigError, match="--log-level"):
        setup_logger("loud")


def test_a_log_is_moved_aside_when_it_is_too_long(tmp_path: Path) -> None:
    program = (sys.executable, "-c", "import sys\nfor line in sys.stdin: print(line, end='', flush=True)")
    child = ChildProcess("worker", (), tmp_path, program=program)
    try:
        standard_input = child._process.stdin
        assert standard_input is not None

        def write(line: bytes) -> None:
            standard_input.write(line)
            standard_input.flush()
            while not child.log_path.read_bytes().endswith(line):
                assert child.exit_code is None

        write(b"first\n")
        child.bound_log(max_bytes=6)
        assert child.log_tail() == "first"
        write(b"second\n")
        child.bound_log(max_bytes=6)
        assert Path(f"{child.log_path}.1").read_text() == "first\nsecond\n"
        write(b"third\n")
        assert child.log_path.read_text() == "third\n"
        assert child.log_tail() == "third"
    finally:
        child.close()


@pytest.mark.parametrize("text", ["gone", "gone.", "gone. ", "gone: "])
def test_an_error_inside_another_one_brings_no_punctuation(text: str) -> None:
    assert f"{clause(OSError(text))}; try again" == "gone; try again"


@pytest.mark.parametrize(
    ("limits", "raised"),
    [
        ((1024, 524288), (MAX_DESCRIPTORS, 524288)),
        ((1024, 4096), (4096, 4096)),
        ((1024, resource.RLIM_INFINITY), (MAX_DESCRIPTORS, resource.RLIM_INFINITY)),
        ((100_000, 524288), None),
        ((resource.RLIM_INFINITY, resource.RLIM_INFINITY), None),
    ],
)
def test_a_rank_may_use_as_many_descriptors_as_the_system_allows(
    limits: tuple[int, int], raised: tuple[int, int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits)
    monkeypatch.setattr(resource, "setrlimit", lambda _, new: done.append(new))
    raise_descriptor_limit()
    assert done == ([] if raised is None else [raised])
