"""`splitserve bench gpu`: decode, prefill and KV transfer on one GPU, compared with the limits of the card.

1. The card's limits: memory, matrix products, copies.
2. A random model of Llama 3 8B's shape: a decode step of many requests, then a long prompt in one step.
3. A peer process with its own pool on the same card. Scattered pages are written to it.

Memory bounds a decode step: it must read every weight once, and the KV of all contexts. Arithmetic bounds a prompt. A
KV transfer is a copy. So each figure is the engine's throughput of that kind, beside the card's in the same run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from rich.console import Console

from splitserve.core.config import CacheConfig, ModelConfig
from splitserve.core.errors import ConfigError
from splitserve.engine.attention.base import ATTENTION_NAME, register_attention
from splitserve.engine.build import BuiltEngine, engine_over
from splitserve.engine.loader import LoadedModel
from splitserve.engine.probe import probe
from splitserve.tools.bench.engine_steps import PAGE_SIZE, EngineSteps, decode_gb, pages_of, prompt_flops, weight_bytes
from splitserve.tools.bench.options import GpuBenchOptions
from splitserve.tools.bench.report import Cells, Report, ReportTable
from splitserve.tools.bench.stats import median, seconds_of
from splitserve.tools.bench.transfer import TransferPair
from splitserve.transfer.copies import copy_table

# Arguments of transformers' LlamaConfig.
LLAMA_3_8B = {
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}


@dataclass(frozen=True, slots=True)
class GpuSizes:
    # Name of the model in reports, and arguments of transformers' LlamaConfig.
    model: str = "a random model of Llama 3 8B's shape"
    shape: Mapping[str, Any] = field(default_factory=lambda: LLAMA_3_8B)
    batch: int = 64
    context: int = 1024
    prompt_tokens: int = 8192
    # Bytes of the tensors that are read and copied, and of the transferred pool. Much larger than a cache.
    num_bytes: int = 2 << 30
    # Keys of one layer in a page of that model, bytes.
    page_bytes: int = 32 << 10
    matrix_size: int = 8192
    repeats: int = 20


@dataclass(frozen=True, slots=True)
class GpuThroughput:
    """Throughput of the card, in 10^9 per second."""

    # Bytes read and written, by the fastest method.
    memory_gb_per_s: float
    # Floating-point operations of a large matrix product.
    matmul_gflop_per_s: float
    # Bytes copied: half of the bytes that a copy reads and writes.
    copy_gb_per_s: float


def gpu_figure(name: str, seconds: float, amount: float, unit: str, limit: float, wanted: float) -> dict[str, Any]:
    """Return the JSON object of one measurement.

    `seconds`: of one run, median. It moved or computed `amount` x 10^9 of `unit`. `limit`: throughput of the card, 10^9
    `unit` per second. `wanted`: target of this project, as a share of the limit.
    """
    figure = {"name": name, "seconds": seconds, "amount": amount, "unit": unit, "limit": limit, "wanted": wanted}
    return {**figure, "per_second": amount / seconds, "share": amount / seconds / limit}


def bench_gpu(options: GpuBenchOptions, console: Console) -> Report:
    """Measure the first GPU and return the report. Raises ConfigError without a GPU."""
    if not torch.cuda.is_available():
        raise ConfigError(
            f"bench gpu needs a GPU, and torch {torch.__version__} finds no CUDA device: install a CUDA build of torch "
            "on a machine that has one. For this machine's CPU there are bench main and bench growth"
        )
    max_batch = 0 if options.disable_cuda_graph else options.cuda_graph_max_bs
    model = ModelConfig(attention_backend=options.attention_backend, cuda_graph_max_batch=max_batch)
    try:
        return measure_gpu(model, GpuSizes(), torch.device("cuda:0"), console)
    except torch.OutOfMemoryError as error:
        raise ConfigError(f"bench gpu needs about 32 GiB of the GPU's memory, free: {error}") from error


def measure_gpu(
    model: ModelConfig,
    sizes: GpuSizes,
    device: torch.device,
    console: Console,
    transfer_backend: str = "cuda_ipc",
) -> Report:
    """Measure all figures. Raises SplitserveError.

    `model`: how steps are computed. `transfer_backend`: moves pages between pools on `device`.
    """
    with console.status("the card's limits") as status:
        limits = measure_limits(device, sizes)
        status.update("loading, compiling and recording")
        num_pages = max(sizes.batch * pages_of(sizes.context), pages_of(sizes.prompt_tokens))
        cache = CacheConfig(page_size=PAGE_SIZE, max_total_tokens=num_pages * PAGE_SIZE)
        built = engine_over(random_model(sizes.model, sizes.shape, device, torch.bfloat16), model, cache)
        status.update("steps of the engine")
        figures = measure_steps(built, sizes, limits)
        attention = type(built.attention).__name__.removesuffix("Backend")
        # Free the card's memory for the pools of the transfer.
        built.close()
        del built
        if device.type == "cuda":
            torch.cuda.empty_cache()
        status.update("KV transfer to another process")
        figures.append(measure_transfer(transfer_backend, sizes, limits))
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
    # Largest batch that is replayed as a CUDA graph. 0: no graphs.
    max_batch = model.cuda_graph_max_batch
    facts = {"device": name, "model": sizes.model, "attention": attention, "max_graph_batch": max_batch}
    return gpu_report(facts, limits, figures)


def median_seconds(device: torch.device, run: Callable[[], object], repeats: int, warm_ups: int = 3) -> float:
    """Return the median seconds of one run, including the device's work."""

    def once() -> None:
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    seconds = [seconds_of(once) for _ in range(warm_ups + repeats)]
    return median(seconds[warm_ups:])


def measure_limits(device: torch.device, sizes: GpuSizes) -> GpuThroughput:
    num_bytes, matrix_size, repeats = sizes.num_bytes, sizes.matrix_size, sizes.repeats
    source = torch.ones(num_bytes // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    copying = median_seconds(device, lambda: target.copy_(source), repeats)
    reading = median_seconds(device, lambda: source.amax(), repeats)
    left = torch.randn(matrix_size, matrix_size, dtype=torch.bfloat16, device=device)
    right = torch.randn_like(left)
    multiplying = median_seconds(device, lambda: left @ right, repeats)
    return GpuThroughput(
        memory_gb_per_s=max(2 * num_bytes / copying, num_bytes / reading) / 1e9,
        matmul_gflop_per_s=2 * matrix_size**3 / multiplying / 1e9,
        copy_gb_per_s=num_bytes / copying / 1e9,
    )


def random_model(name: str, shape: Mapping[str, Any], device: torch.device, dtype: torch.dtype) -> LoadedModel:
    """Return a random model that is ready for the engine, without a file."""
    began = time.monotonic()
    register_attention()
    config = transformers.LlamaConfig(**shape, attn_implementation=ATTENTION_NAME)
    with device:
        model: Any = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    model = model.to(device).eval()
    return LoadedModel(
        model=model,
        name=name,
        folder=Path(),
        device=device,
        dtype=dtype,
        dtype_name=str(dtype).removeprefix("torch."),
        context_length=config.max_position_embeddings,
        vocab_size=config.vocab_size,
        eos_token_ids=frozenset(),
        layers=probe(model, name),
        num_parameters=sum(p.numel() for p in model.parameters()),
        kernels=None,
        fingerprint="random",
        load_seconds=time.monotonic() - began,
    )


def measure_steps(built: BuiltEngine, sizes: GpuSizes, limits: GpuThroughput) -> list[dict[str, Any]]:
    """Measure a decode step and a prefill step."""
    steps = EngineSteps(built, long_tokens=sizes.prompt_tokens, num_short=sizes.batch, short_tokens=sizes.context)
    decode, prefill = steps.decode(sizes.batch), steps.part(0, sizes.prompt_tokens, sizes.prompt_tokens)
    device = built.loaded.device
    return [
        gpu_figure(
            f"decode step, batch {sizes.batch}, context {sizes.context:,}",
            median_seconds(device, lambda: steps.seconds(decode), sizes.repeats),
            decode_gb(weight_bytes(built.loaded.model), built.layout, sizes.batch, sizes.context),
            "B",
            limits.memory_gb_per_s,
            0.7,
        ),
        gpu_figure(
            f"prefill, {sizes.prompt_tokens:,} tokens",
            median_seconds(device, lambda: steps.seconds(prefill), max(1, sizes.repeats // 4)),
            prompt_flops(built.loaded, sizes.prompt_tokens) / 1e9,
            "FLOP",
            limits.matmul_gflop_per_s,
            0.5,
        ),
    ]


def measure_transfer(backend: str, sizes: GpuSizes, limits: GpuThroughput) -> dict[str, Any]:
    """Write all pages of a pool to other positions of a peer's in one write. Raises SplitserveError."""
    num_pages, size = sizes.num_bytes // sizes.page_bytes, sizes.page_bytes
    places = np.random.default_rng(0).permutation(num_pages).tolist()
    copies = copy_table((0, i * size, 0, place * size, size) for i, place in enumerate(places))
    with TransferPair(backend, num_pages * size) as pair:
        seconds = median_seconds(torch.device("cpu"), lambda: pair.write(copies), sizes.repeats)
    name = f"hand-over of {num_pages:,} pages of {size >> 10} KiB, two processes"
    return gpu_figure(name, seconds, num_pages * size / 1e9, "B", limits.copy_gb_per_s, 0.8)


def gpu_report(facts: Mapping[str, Any], limits: GpuThroughput, figures: Sequence[Mapping[str, Any]]) -> Report:
    """Return the report. `facts`: device, model, attention and max_graph_batch."""
    max_batch = facts["max_graph_batch"]
    graphs = f"CUDA graphs up to batch {max_batch}" if max_batch else "no CUDA graphs"
    return Report(
        title=f"{facts['model']} on {facts['device']}",
        setting=f"Attention by {facts['attention']}, {graphs}",
        legend="Times are medians of whole steps of the engine, sampling and the host's part included; limits are the "
        "card's own in the same run.",
        figures={**facts, "limits": asdict(limits), "figures": figures},
        tables=[ReportTable.by_row(_COLUMNS, figures)],
    )


_COLUMNS: Cells[Mapping[str, Any]] = [
    ("", "{name}"),
    ("ms", "{seconds:ms,.2f}"),
    ("reached", "{per_second:,.0f} G{unit}/s"),
    ("limit", "{limit:,.0f} G{unit}/s"),
    ("share", "{share:.2f}"),
    ("wanted", "{wanted:.1f}"),
]
