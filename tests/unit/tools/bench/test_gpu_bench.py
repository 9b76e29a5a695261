"""The arithmetic of `bench gpu`, and the whole bench with a tiny model on the CPU, where its figures mean nothing."""

from __future__ import annotations

import datetime
import json

import pytest
import torch
from rich.console import Console

from splitserve.core.config import ModelConfig
from splitserve.core.errors import ConfigError
from splitserve.core.layout import KVComponent, KVLayout
from splitserve.tools.bench import transfer
from splitserve.tools.bench.engine_steps import decode_gb, weight_bytes
from splitserve.tools.bench.gpu import (
    GpuSizes,
    GpuThroughput,
    bench_gpu,
    gpu_figure,
    gpu_report,
    measure_gpu,
    random_model,
)
from splitserve.tools.bench.options import GpuBenchOptions
from splitserve.tools.bench.report import run_bench
from support.fake_gpu import FAKE_CUDA_IPC
from support.transfer_peer import End, PeerProcess

TINY = {
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
CPU = torch.device("cpu")
MODEL = ModelConfig(cuda_graph_max_batch=0)


def test_a_decode_step_reads_the_weights_once_and_each_requests_cache() -> None:
    # Two heads of eight 16-bit numbers: 32 bytes a token and component; the second layer sees four tokens.
    parts = [KVComponent(n, layer, "bfloat16", 2, 0, 2, 8, window=w) for layer, w in ((0, None), (1, 4)) for n in "kv"]
    layout = KVLayout(16, 10, tuple(parts))
    expected = 1000 + 3 * (2 * 32 * 100 + 2 * 32 * 4)
    assert decode_gb(1000, layout, batch=3, context=100) == pytest.approx(expected / 1e9)


def test_the_input_embeddings_are_not_read_whole_unless_they_are_the_head_too() -> None:
    apart = random_model("tiny", TINY, CPU, torch.bfloat16)
    tied = random_model("tiny", {**TINY, "tie_word_embeddings": True}, CPU, torch.bfloat16)
    assert weight_bytes(apart.model) == weight_bytes(tied.model) == 2 * (apart.num_parameters - 100 * 32)


def test_a_share_is_what_was_reached_of_the_limit() -> None:
    figure = gpu_figure("decode", seconds=0.01, amount=20.0, unit="B", limit=4000.0, wanted=0.7)
    assert figure["per_second"] == pytest.approx(2000.0)
    assert figure["share"] == pytest.approx(0.5)
    limits = GpuThroughput(1.0, 2.0, 3.0)
    facts = {"device": "card", "model": "model", "attention": "FlashInfer", "max_graph_batch": 64}
    report = gpu_report(facts, limits, [figure])
    assert report.tables[0].rows == [["decode", "10.00", "2,000 GB/s", "4,000 GB/s", "0.50", "0.7"]]
    assert json.loads(json.dumps(report.figures))["figures"][0]["share"] == pytest.approx(0.5)
    assert "CUDA graphs up to batch 64" in report.markdown(datetime.date(2026, 1, 2))


def test_the_whole_bench_runs_with_a_tiny_model_and_a_gpu_that_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "End", End)
    monkeypatch.setattr(transfer, "PeerProcess", PeerProcess)
    sizes = GpuSizes(
        shape=TINY,
        batch=2,
        context=20,
        prompt_tokens=40,
        num_bytes=1 << 16,
        page_bytes=1 << 10,
        matrix_size=16,
        repeats=2,
    )
    report = measure_gpu(MODEL, sizes, CPU, Console(quiet=True), FAKE_CUDA_IPC)
    figures = report.figures["figures"]
    assert [f["wanted"] for f in figures] == [0.7, 0.5, 0.8]
    assert figures[2]["name"] == "hand-over of 64 pages of 1 KiB, two processes"
    assert all(f["seconds"] > 0 and f["amount"] > 0 and f["limit"] > 0 for f in figures)
    assert report.figures["attention"] == "TorchSdpa"


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="bench gpu needs a GPU"):
        run_bench(GpuBenchOptions(), bench_gpu)


def test_a_card_that_is_too_small_is_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError("Tried to allocate 2.00 GiB")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("splitserve.tools.bench.gpu.measure_gpu", fail)
    with pytest.raises(ConfigError, match="needs about 32 GiB"):
        run_bench(GpuBenchOptions(), bench_gpu)
