"""The line a worker logs when it is ready."""

from __future__ import annotations

import os
import subprocess
import sys

import msgspec
import pytest

from splitserve.core.config import DisaggregationConfig, ModelConfig, ServerConfig, WorkerConfig
from splitserve.core.messages import SchedulerReady
from splitserve.worker.worker import memory_bytes, startup_figures

INFO = SchedulerReady(
    max_total_tokens_per_request=8192,
    vocab_size=100,
    pages_total=1024,
    page_size=16,
    dtype="bfloat16",
    kv_bytes_per_token=1 << 16,
    device="cpu",
    num_parameters=1,
    load_seconds=0.1,
    kernels="avx2",
    threads=3,
)
CONFIG = WorkerConfig(model=ModelConfig(model="/models/m"), disaggregation=DisaggregationConfig(transfer_backend="shm"))


def test_the_line_has_what_an_operator_sizes_a_worker_by() -> None:
    assert startup_figures(CONFIG, INFO, 1 << 30, 3 << 29) == (
        "model=/models/m dtype=bfloat16 device=cpu kernels=avx2 context_length=8192 kv_pool_tokens=16384 "
        "kv_pool=1GiB memory=1.5GiB threads=3 transfer_backend=shm"
    )


@pytest.mark.parametrize(
    ("config", "info", "figure"),
    [
        (CONFIG, {"kernels": None}, "kernels=torch"),
        (msgspec.structs.replace(CONFIG, server=ServerConfig(served_model_name="chat")), {}, "model=chat"),
        (CONFIG, {"weights_quantization": "gptq"}, "quantization=gptq"),
    ],
)
def test_a_figure_follows_its_setting(config: WorkerConfig, info: dict[str, str], figure: str) -> None:
    line = startup_figures(config, msgspec.structs.replace(INFO, **info), 0, 0)
    assert figure in line.split()


def test_memory_is_that_of_all_processes_that_live() -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    one = memory_bytes([os.getpid()])
    assert one > 1 << 20
    assert memory_bytes([os.getpid(), os.getpid(), ended.pid]) == pytest.approx(2 * one, rel=0.05)
