"""Settings of one worker, by component. Resolved once at startup (cli, launch); later only its role may change.

A field that users can set has an Option: it is the only description of that option.
"""

from __future__ import annotations

import enum
from typing import Any

import msgspec

from splitserve.core.errors import OptionError
from splitserve.core.kv_events import KVEventsConfig
from splitserve.core.limits import LimitsConfig
from splitserve.core.machine import MAX_THREADS
from splitserve.core.options import Config, named_values, option, section
from splitserve.core.parallel import MAX_DP_SIZE, ParallelConfig
from splitserve.core.request import DisaggregationMode
from splitserve.core.speculative import SpeculativeConfig

DTYPES = ("float32", "bfloat16", "float16")
KERNELS = ("auto", "torch")
ATTENTION_BACKENDS = ("auto", "torch", "flashinfer")
METRICS_SYSTEMS = ("vllm", "sglang")
QUANTIZATIONS = ("int8", "w8a8")
TRANSFER_DTYPES = ("bfloat16", "float16", "float8_e4m3fn")
LOG_LEVELS = ("debug", "info", "warning", "error", "critical")
LOG_FORMATS = ("text", "json")


def metrics_systems(text: str, option: str) -> tuple[str, ...]:
    """Return the systems in a list separated by commas. Raises OptionError."""
    systems = tuple(dict.fromkeys(text.split(",")))
    if unknown := [name for name in systems if name not in METRICS_SYSTEMS]:
        raise OptionError(option, f"{unknown[0]!r}: give {' or '.join(METRICS_SYSTEMS)}, or both with a comma")
    return systems


class SchedulePolicy(enum.StrEnum):
    """Order in which waiting requests are admitted; `scheduler/admission.py`."""

    FCFS = "fcfs"
    LPM = "lpm"
    SPF = "spf"


class ModelConfig(Config, frozen=True, kw_only=True):
    # A folder of safetensors, a .gguf file, a hub name, or an alias (`smollm2`, `smollm2-q4`).
    model: str = "smollm2"
    dtype: str = option(
        "auto",
        "Dtype of weights and KV pool. auto: the checkpoint's; on a CPU only if that is bfloat16 or float16 and our "
        "kernels compute it, else float32. With --quantization: bfloat16.",
        choices=("auto", *DTYPES),
    )
    device: str = option(
        "auto",
        "auto, cpu, cuda or cuda:N. auto: cuda if there is one. Prefill and decode on GPUs need a transfer "
        "backend that reads GPU memory.",
    )
    quantization: str | None = option(
        None,
        "Quantize on load. int8: the weights. w8a8: weights and activations. On CPUs in bfloat16.",
        choices=QUANTIZATIONS,
    )
    context_length: int | None = option(
        None, "Tokens of prompt and answer per request. Default: the model's.", ge=1, aliases="--max-model-len"
    )
    kernels: str = option(
        "auto", "auto: own CPU kernels if they are faster than torch's. torch: torch's.", choices=KERNELS
    )
    share_weights: bool = option(
        True,
        "On a CPU: keep the packed weights private to this worker, not in a file that the workers of a host share.",
        name="disable_shared_weights",
        negates=True,
    )
    attention_backend: str = option(
        "auto",
        "On GPUs. auto: FlashInfer if it is installed and supports the model's heads, else torch.",
        choices=ATTENTION_BACKENDS,
    )
    deterministic: bool = option(
        False,
        "Compute each token with the same bits in any batch, also if that is slower: on GPUs matrix products, norms, "
        "decode attention and sums over ranks; on CPUs with bfloat16 instructions that the compiler at installation "
        "lacked, prompts. Otherwise it has no effect.",
    )
    threads: int | None = option(
        None,
        "CPU threads of each rank. Default: all cores, divided evenly among the ranks on this host.",
        ge=1,
        le=MAX_THREADS,
    )
    elastic_cores: bool = option(
        True,
        "Use the cores of idle workers on this host. Each worker gets its own cores (--threads) back when it computes.",
    )
    cpu_affinity: str | None = option(
        None, "Cores the worker may use, such as 0-3,8. Default: all of this process.", metavar="CPUS"
    )
    cuda_graph_max_batch: int = option(
        256, "On GPUs: largest decode batch that is replayed as a CUDA graph. 0: none.", name="cuda_graph_max_bs", ge=0
    )
    load_timeout: float = option(
        900.0, "Seconds in which each rank must load the model, at startup and in an update of weights."
    )
    return_hidden_states: bool = option(
        False,
        "Serve requests with `return_hidden_states`. Give it to prefill and decode workers alike: each metadata row "
        "then has room for one state.",
        name="enable_return_hidden_states",
    )
    expert_parallel: bool = option(
        False,
        "Each tensor parallel rank holds some experts whole instead of a shard of every expert.",
        name="enable_expert_parallel",
        aliases="--enable-ep",
        section="Parallel ranks",
    )
    dp_attention: bool = option(
        False,
        "Data parallel ranks share the experts and compute their steps together. --tp-size is then the number of all "
        "ranks, and the ranks of one scheduler split its attention. --tp-size 1: one rank per scheduler.",
        name="enable_dp_attention",
    )


class CacheConfig(Config, frozen=True, kw_only=True):
    page_size: int = option(16, "Tokens per page of the KV pool.", ge=1, aliases="--block-size")
    max_total_tokens: int | None = option(None, "Tokens in the KV pool. Default: from --mem-fraction-static.", ge=1)
    # None leaves memory to other processes on a CPU, and to a step on a GPU.
    mem_fraction: float | None = option(
        None,
        "Share of the memory that is free after the weights are loaded, for the KV pool. Default: 0.15, on GPUs 0.85.",
        name="mem_fraction_static",
        gt=0,
        le=1,
        aliases="--gpu-memory-utilization",
    )
    # Ranks of this worker that share that memory.
    num_sharers: int = 1
    workers_per_gpu: int = option(
        1,
        "Workers that share a GPU. Divides the default of --mem-fraction-static on GPUs. Set it if you start several "
        "workers on one GPU yourself.",
        ge=1,
    )
    enable_prefix_cache: bool = option(
        True,
        "Do not keep the prefixes of finished requests.",
        name="disable_radix_cache",
        negates=True,
        decls=("--disable-radix-cache/--enable-prefix-caching",),
        aliases="--no-enable-prefix-caching",
    )
    enable_decode_prefix_cache: bool = option(
        True, "On decode workers: keep prefixes, so prefill sends only new pages.", name="decode_prefix_cache"
    )
    prefix_host_memory: int = option(
        0,
        "On colocated and prefill workers: host memory for prefixes evicted from the KV pool. 0: none.",
        is_bytes=True,
    )
    shared_pool: str | None = option(
        None, "Memory file with one KV pool for several workers of this host (backend shm).", metavar="FILE"
    )
    enable_memory_saver: bool = option(
        False,
        "Make the KV pool releasable (POST /release_memory_occupation). On GPUs this needs torch_memory_saver. On CPUs "
        "the pool is always releasable.",
    )
    swa_full_tokens_ratio: float | None = option(
        None,
        "Models with sliding windows: tokens in the pool of these layers per token in the pool of the others. "
        "1: one pool, which keeps all tokens. Default: window / 2048.",
        gt=0,
        le=1,
    )


class SchedulerConfig(Config, frozen=True, kw_only=True):
    chunked_prefill_size: int = option(2048, "Tokens computed per step.", ge=1, aliases="--max-num-batched-tokens")
    local_prefill_size: int = option(
        256, "On decode workers: prompt tokens computed locally per step, within --chunked-prefill-size.", ge=1
    )
    # None: see `scheduler/chunk_size.py`.
    target_itl_ms: float | None = option(
        None,
        "Target time of a step with decodes, in milliseconds. It limits the prompt tokens of that step. Lower: "
        "steadier streams, later first tokens. 0: chunks of --chunked-prefill-size. Default: from measured steps. On "
        "decode workers: interval of steps while another worker of the host computes prompts. Default: none.",
        ge=0,
    )
    max_running_requests: int = option(256, "Requests in the running batch.", ge=1, aliases="--max-num-seqs")
    max_queued_requests: int = option(4096, "Waiting requests. Beyond that: 503.", ge=1)
    # Rows beyond `max_running_requests` for requests with KV in transfer (decode).
    num_preallocated_rows: int = 64
    # Maximum number of requests that wait for a grammar; more are rejected with 503.
    max_queued_grammars: int = 1024
    # Grammars compiled at the same time.
    grammar_threads: int = 2
    # Compiled grammars kept for later requests, bytes.
    grammar_cache_bytes: int = 256 << 20
    # Fewer for a request that may generate fewer.
    num_reserved_decode_tokens: int = option(
        512,
        "Tokens that admission leaves free for each running request. Raise it if requests are retracted often.",
        ge=1,
    )
    retraction_host_memory: int = option(
        1 << 30,
        "Host memory for copies of the KV of retracted requests, on all ranks of a scheduler together. 0: their KV is "
        "computed again.",
        is_bytes=True,
    )
    schedule_policy: SchedulePolicy = option(
        SchedulePolicy.FCFS,
        "Order of waiting requests: first come first served, longest prefix match, shortest prompt first.",
        aliases="--scheduling-policy",
    )
    enable_priority: bool = option(
        False, "Run requests with a larger `priority` first.", aliases="--enable-priority-scheduling"
    )
    # `scheduler/loops.py`.
    overlap_schedule: bool = option(
        True,
        "Plan each step after the end of the previous one, not during it.",
        name="disable_overlap_schedule",
        negates=True,
        aliases="--no-async-scheduling",
    )
    request_timeout: float | None = option(
        None, "Seconds per request, if the request has no `timeout`. Default: no limit."
    )
    grammar_timeout: float = option(60.0, "Seconds a request waits for its compiled grammar.")
    grammar_compile_budget: float = option(20.0, "CPU seconds to compile one grammar. Beyond that: 422.")
    grammar_step_budget: float = option(
        0.25, "CPU seconds that a grammar may need per token of a request. Beyond that: 422."
    )
    grammar_request_budget: float = option(
        10.0, "CPU seconds that a grammar may need for all tokens of a request. Beyond that: 422."
    )
    grammar_memory: int = option(
        1 << 30, "Memory of one compiled grammar and its matchers. Beyond that: 422.", is_bytes=True, ge=1 << 20
    )


class ClusterToken(msgspec.Struct, frozen=True):
    """Secret shared by all workers of a cluster. Not part of any repr, so not of any log."""

    # Empty: any connection is accepted.
    secret: bytes = b""

    def __repr__(self) -> str:
        return f"ClusterToken({'***' if self.secret else 'none'})"

    def __rich_repr__(self) -> list[tuple[str, Any]]:
        return []


class DisaggregationConfig(Config, frozen=True, kw_only=True):
    mode: DisaggregationMode = option(
        DisaggregationMode.NULL, "Role of the worker. null: colocated, both phases.", name="disaggregation_mode"
    )
    transfer_backend: str = option(
        "tcp",
        "Transport of the KV cache.",
        name="disaggregation_transfer_backend",
        decls=("--transfer-backend", "--disaggregation-transfer-backend"),
    )
    transfer_options: dict[str, str] = option(
        {},
        "Setting of the transfer backend, repeatable: see docs/transports.md.",
        name="transfer_option",
        kind=list[str] | None,
        parse=named_values,
        metavar="NAME=VALUE",
    )
    transfer_checksum: bool = option(False, "Compare the KV cache of every prompt end to end; enough on one worker.")
    transfer_dtype: str = option(
        "auto",
        "On decode workers: dtype of the KV cache in transfer. auto: that of the pool.",
        choices=("auto", *TRANSFER_DTYPES),
    )
    # Address at which peers reach this worker's bootstrap server (prefill) and its data and control sockets.
    host: str = "127.0.0.1"
    # Proves membership on each of these connections. Required if `host` is not a loopback address.
    cluster_token: ClusterToken = ClusterToken()
    # Prefill: port of the bootstrap server, 0: any free one.
    bootstrap_port: int = 8998
    bootstrap_timeout: float = option(300.0, "Seconds a request waits for its peer.")
    transfer_timeout: float = option(300.0, "Seconds per KV transfer.")
    # Seconds.
    heartbeat_interval: float = 5.0
    heartbeat_misses: int = 2
    num_metadata_slots: int = option(
        512, "Metadata rows: maximum number of requests with a KV transfer in flight. Others wait.", ge=1
    )


class ServerConfig(Config, frozen=True, kw_only=True):
    host: str = "127.0.0.1"
    # 0: any free port.
    port: int = 30000
    served_model_name: str | None = option(
        None, "Name of the model in requests. Default: MODEL.", metavar="NAME", section="Model"
    )
    # Routers to register with, e.g. http://127.0.0.1:8000.
    router_urls: tuple[str, ...] = ()
    # None: routers require no key.
    router_key_file: str | None = option(
        None,
        "File with the key for a router that has --operator-key-file. The first key is sent.",
        metavar="FILE",
        section="Addresses and keys",
    )
    # Accepted for any host name. None: a certificate that the system trusts, for the host name in the URL.
    router_certificate: str | None = option(
        None, "PEM file with the certificate that a router at an https URL must present.", metavar="FILE"
    )
    ssl_certfile: str | None = option(None, "PEM certificate of this worker: serve https.", metavar="FILE")
    ssl_keyfile: str | None = option(None, "PEM key of the certificate.", metavar="FILE")
    # None: clients need no certificate.
    ssl_ca_certs: str | None = option(
        None, "PEM file with authorities. Clients must present a certificate that one of them signed.", metavar="FILE"
    )
    # None: no key is required.
    api_key_file: str | None = option(
        None,
        "File with the keys that this worker accepts, one per line. Routers present one (--worker-key-file).",
        metavar="FILE",
    )
    strict_fields: bool = option(
        False, "Reject requests with unknown fields. Default: accept them and warn in a header."
    )
    metrics_compat: tuple[str, ...] = option(
        (),
        "Add the metrics under the names of other systems, so that their dashboards work: vllm, sglang, or both.",
        parse=metrics_systems,
        metavar="NAME,...",
    )
    limits: LimitsConfig = section("Limits", LimitsConfig())
    log_level: str = option(
        "warning", "Lowest level of log lines.", choices=LOG_LEVELS, aliases="--uvicorn-log-level", section="Process"
    )
    log_format: str = option(
        "text", "Format of log lines: text, or one JSON object per line for log collectors.", choices=LOG_FORMATS
    )


class WorkerConfig(Config, frozen=True, kw_only=True):
    """All settings of one worker."""

    model: ModelConfig = section("Model", ModelConfig())
    parallel: ParallelConfig = section("Parallel ranks", ParallelConfig())
    # Each scheduler has all other limits of this config for itself.
    dp_size: int = option(
        1,
        "Data parallel ranks: schedulers that each have the whole model and a KV pool.",
        ge=1,
        le=MAX_DP_SIZE,
        aliases="--dp --data-parallel-size",
    )
    cache: CacheConfig = section("KV cache", CacheConfig())
    scheduler: SchedulerConfig = section("Scheduling", SchedulerConfig())
    speculative: SpeculativeConfig = section("Speculative decoding", SpeculativeConfig())
    disaggregation: DisaggregationConfig = section("Disaggregation", DisaggregationConfig())
    server: ServerConfig = section("Addresses and keys", ServerConfig())
    kv_events: KVEventsConfig = option(
        KVEventsConfig(),
        'Publish changes of the prefix cache: {"publisher": "zmq", "endpoint": "tcp://*:5557"}. See docs/events.md.',
        name="kv_events_config",
        parse=KVEventsConfig.from_cli,
        metavar="JSON",
    )

    @property
    def served_model_name(self) -> str:
        """Name under which clients request the model."""
        return self.server.served_model_name or self.model.model

    @property
    def max_open_requests(self) -> int:
        """Maximum number of samples that the worker holds, running and waiting."""
        return self.dp_size * (self.scheduler.max_running_requests + self.scheduler.max_queued_requests)
