"""`splitserve bench gpu`: decode, prefill and KV transfer on one GPU, compared with the limits of the card.

1. The card's limits: memory, matrix products, copies.
2. A random model of Llama 3 8B's shape: a decode step of many requests, then a long prompt in one step.
3. A peer process with its own pool on the same card. Scattered pages are written to it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from rich.console import Console

from splitserve.core.batch import ModelEngine, RequestStep, SampleSpec, StepPlan
from splitserve.core.config import CacheConfig, ModelConfig
from splitserve.core.errors import ConfigError, SplitserveError
from splitserve.core.sampling import ResolvedSampling
from splitserve.engine.build import BuiltEngine, engine_over
from splitserve.tools.bench.gpu_figures import Figure, GpuThroughput, decode_gb, gpu_report
from splitserve.tools.bench.gpu_limits import measure_limits, median_seconds
from splitserve.tools.bench.gpu_model import LLAMA_3_8B, ModelShape, random_model, weight_bytes
from splitserve.tools.bench.growth_steps import prompt_flops
from splitserve.tools.bench.machine import describe_machine
from splitserve.tools.bench.report import Report, ReportOutput
from splitserve.tools.bench.transfer_peer import End, PeerProcess
from splitserve.transfer.copies import copy_table
from splitserve.transfer.transports.base import WriteState

_GREEDY = ResolvedSampling(temperature=0.0)
_PAGE_SIZE = 16


@dataclass(frozen=True, slots=True)
class GpuSizes:
    shape: ModelShape = LLAMA_3_8B
    batch: int = 64
    context: int = 1024
    prompt_tokens: int = 8192
    # Bytes of the tensors that are copied, and of the transferred pool.
    num_bytes: int = 2 << 30
    # Keys of one layer in a page of that model, bytes.
    page_bytes: int = 32 << 10
    matrix_size: int = 8192
    repeats: int = 20


@dataclass(frozen=True, slots=True)
class GpuBenchOptions:
    # Command line that repeats this benchmark.
    command: str
    attention_backend: str
    max_graph_batch: int
    output: ReportOutput


def run_gpu_bench(options: GpuBenchOptions) -> int:
    """Run the benchmark and return the exit code. Raises ConfigError if there is no GPU."""
    if not torch.cuda.is_available():
        raise ConfigError(
            f"bench gpu needs a GPU, and torch {torch.__version__} finds no CUDA device: install a CUDA build of torch "
            "on a machine that has one. For this machine's CPU there are bench main and bench growth"
        )
    options.output.check()
    console = Console(stderr=True)
    try:
        report = measure_gpu(options, GpuSizes(), torch.device("cuda:0"), "cuda_ipc", console)
    except torch.OutOfMemoryError as error:
        raise ConfigError(f"bench gpu needs about 32 GiB of the GPU's memory, free: {error}") from error
    options.output.publish(report, console)
    return 0


def measure_gpu(
    options: GpuBenchOptions, sizes: GpuSizes, device: torch.device, transfer_backend: str, console: Console
) -> Report:
    """Measure all figures. `transfer_backend`: moves pages between pools on `device`. Raises SplitserveError."""
    with console.status("the card's limits") as status:
        limits = measure_limits(device, num_bytes=sizes.num_bytes, matrix_size=sizes.matrix_size, repeats=sizes.repeats)
        status.update("loading, compiling and recording")
        model = ModelConfig(attention_backend=options.attention_backend, cuda_graph_max_batch=options.max_graph_batch)
        num_pages = max(sizes.batch * _pages(sizes.context), _pages(sizes.prompt_tokens))
        cache = CacheConfig(page_size=_PAGE_SIZE, max_total_tokens=num_pages * _PAGE_SIZE)
        built = engine_over(random_model(sizes.shape, device, torch.bfloat16), model, cache)
        status.update("steps of the engine")
        figures = measure_steps(built, sizes, limits)
        attention = type(built.attention).__name__.removesuffix("Backend")
        # Free the card's memory for the pools of the transfer.
        built.close()
        del built
        if device.type == "cuda":
            torch.cuda.empty_cache()
        status.update("hand-over to another process")
        figures.append(measure_hand_over(transfer_backend, sizes, limits))
    return gpu_report(
        options.command,
        describe_machine(),
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else str(device),
        model=sizes.shape.name,
        attention=attention,
        max_graph_batch=options.max_graph_batch,
        limits=limits,
        figures=figures,
    )


def measure_steps(built: BuiltEngine, sizes: GpuSizes, limits: GpuThroughput) -> list[Figure]:
    """Measure a decode step and a prefill step.

    Row 0 of the page table is the prompt's, row 1 + i that of decoding request i. The pool is filled with random
    numbers, because memory that was never written would be zeros.
    """
    for tensor in (*built.pool.keys.values(), *built.pool.values.values()):
        tensor.normal_()
    pages_each = _pages(sizes.context)
    table = np.zeros((1 + sizes.batch, max(pages_each, _pages(sizes.prompt_tokens))), dtype=np.int32)
    table[0] = np.arange(table.shape[1])
    table[1:, :pages_each] = np.arange(sizes.batch * pages_each).reshape(-1, pages_each)
    engine: ModelEngine = built.runner(table)
    last = sizes.context - 1
    decode = StepPlan(tuple(_step(built, 1 + i, last, sizes.context) for i in range(sizes.batch)))
    prefill = StepPlan((_step(built, 0, 0, sizes.prompt_tokens),))
    device = built.loaded.device
    return [
        Figure(
            f"decode step, batch {sizes.batch}, context {sizes.context:,}",
            median_seconds(device, lambda: engine.execute(decode), sizes.repeats),
            decode_gb(weight_bytes(built.loaded), built.layout, sizes.batch, sizes.context),
            "B",
            limits.memory_gb_per_s,
            0.7,
        ),
        Figure(
            f"prefill, {sizes.prompt_tokens:,} tokens",
            median_seconds(device, lambda: engine.execute(prefill), max(1, sizes.repeats // 4)),
            prompt_flops(built.loaded, sizes.prompt_tokens) / 1e9,
            "FLOP",
            limits.matmul_gflop_per_s,
            0.5,
        ),
    ]


def _pages(num_tokens: int) -> int:
    return -(-num_tokens // _PAGE_SIZE)


def _step(built: BuiltEngine, row: int, begin: int, end: int) -> RequestStep:
    """Return a step for tokens [begin, end) of a request, which samples the next token."""
    ids = [(7 * i + row) % built.loaded.vocab_size for i in range(begin, end)]
    return RequestStep(f"gpu-{row}", row, ids, begin, SampleSpec(_GREEDY, end, ids, ()))


def measure_hand_over(backend: str, sizes: GpuSizes, limits: GpuThroughput) -> Figure:
    """Write all pages of a pool to other positions of a peer's in one write. Raises SplitserveError."""
    num_pages = sizes.num_bytes // sizes.page_bytes
    places = np.random.default_rng(0).permutation(num_pages).tolist()
    size = sizes.page_bytes
    copies = copy_table((0, i * size, 0, place * size, size) for i, place in enumerate(places))
    with PeerProcess(backend, [num_pages * size]) as peer:
        ours = End(backend, [num_pages * size])
        try:
            session = peer.open_session()

            def hand_over() -> None:
                status = ours.outcome(ours.transport.write(session, copies))
                if status.state is not WriteState.DONE:
                    raise SplitserveError(f"a hand-over by {backend} failed: {status.error}")

            seconds = median_seconds(torch.device("cpu"), hand_over, sizes.repeats)
        finally:
            ours.close()
    name = f"hand-over of {num_pages:,} pages of {size >> 10} KiB, two processes"
    return Figure(name, seconds, num_pages * size / 1e9, "B", limits.copy_gb_per_s, 0.8)
