"""Settings of one worker, by component. Resolved once at startup (cli, launch); later only its role may change."""

from __future__ import annotations

import enum
import math
from typing import Any

import msgspec

from splitserve.core.errors import ConfigError
from splitserve.core.request import DisaggregationMode

DTYPES = ("float32", "bfloat16", "float16")
KERNELS = ("auto", "torch")
ATTENTION_BACKENDS = ("auto", "torch", "flashinfer")
QUANTIZATIONS = ("int8", "w8a8")
TRANSFER_DTYPES = ("bfloat16", "float16", "float8_e4m3fn")


def check_dtype(name: str) -> None:
    """Check a benchmark's `--dtype`. Raises ConfigError."""
    if name not in DTYPES:
        raise ConfigError(f"--dtype {name!r}: choose one of {', '.join(DTYPES)}")


class SchedulePolicy(enum.StrEnum):
    """Order in which waiting requests are admitted; `scheduler/admission.py`."""

    FCFS = "fcfs"
    LPM = "lpm"
    SPF = "spf"


class SpeculativeAlgorithm(enum.StrEnum):
    """Source of draft tokens: the text itself (`scheduler/speculation.py`), or a small model (`engine/draft.py`)."""

    NGRAM = "ngram"
    DRAFT = "draft"


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    # A folder of safetensors, a .gguf file, a hub name, or an alias (`smollm2`).
    model: str = "smollm2"
    # "auto": the checkpoint's. On a CPU: bfloat16 if the kernels in C compute it or quantization needs it, else
    # float32.
    dtype: str = "auto"
    # "auto": cuda if there is one, else cpu.
    device: str = "auto"
    # Maximum number of tokens of a request; None: the context length of the model.
    context_length: int | None = None
    # CPU threads of the model; None: all cores of this process.
    threads: int | None = None
    # Cores this worker may use, e.g. "0-3,8"; None: all cores of its process.
    cpu_affinity: str | None = None
    # "auto": the kernels in C if they are faster; "torch": torch's everywhere.
    kernels: str = "auto"
    # Quantization of the weights, on load: None or one of QUANTIZATIONS.
    quantization: str | None = None
    # "auto": on a GPU FlashInfer if it is installed and supports the model's heads, else torch.
    attention_backend: str = "auto"
    # Whether each tensor parallel rank holds some experts of a layer whole. False: it holds a part of every expert.
    expert_parallel: bool = False
    # Each of several ranks serves its own requests; all of them compute the experts together.
    dp_attention: bool = False
    # GPU: the most requests in a decode step that is replayed as a CUDA graph; 0: none.
    cuda_graph_max_batch: int = 256
    # Seconds in which all ranks of a worker must load their shares.
    load_timeout: float = 900.0


class CacheConfig(msgspec.Struct, frozen=True, kw_only=True):
    # Tokens per page.
    page_size: int = 16
    # Tokens in the pool; None: from `mem_fraction`.
    max_total_tokens: int | None = None
    # Fraction of the device's free memory after the weights are loaded. None: 0.15 on a CPU, which leaves memory to
    # other processes; 0.85 on a GPU, which leaves memory for a step.
    mem_fraction: float | None = None
    # Ranks of this worker that share that memory.
    num_sharers: int = 1
    enable_prefix_cache: bool = True
    # Decode: keep prefixes, too, and have prefill send only what is missing.
    enable_decode_prefix_cache: bool = True
    # Null and prefill: bytes of host memory for prefixes that the pool has no room for; 0: they are dropped.
    prefix_host_memory: int = 0
    # File in memory with one pool for several workers of this host; None: this worker has its own pool.
    shared_pool: str | None = None
    # Models with sliding windows in some layers: maximum pages of these layers' own pool per page of the other layers'
    # pool. 1: all layers have one pool, and keep all tokens. None: by the window (`engine/pool.py`).
    swa_full_tokens_ratio: float | None = None


class SchedulerConfig(msgspec.Struct, frozen=True, kw_only=True):
    # Token budget of one step.
    chunked_prefill_size: int = 2048
    # Decode: prompt tokens computed locally per step, within `chunked_prefill_size`; it bounds how long streams wait.
    local_prefill_size: int = 256
    max_running_requests: int = 256
    # Maximum number of requests that wait; more are rejected with 503.
    max_queued_requests: int = 4096
    # Rows beyond `max_running_requests` for requests with KV in transfer (decode).
    num_preallocated_rows: int = 64
    # Seconds a request waits for its grammar to be compiled.
    grammar_timeout: float = 60.0
    # Maximum number of requests that wait for a grammar; more are rejected with 503.
    max_queued_grammars: int = 1024
    # Grammars compiled at the same time.
    grammar_threads: int = 2
    # CPU seconds: to compile one grammar, per token of a request, and for all its tokens. Beyond that: 422.
    grammar_compile_budget: float = 20.0
    grammar_step_budget: float = 0.25
    grammar_request_budget: float = 10.0
    # Bytes of memory of a compiled grammar and its matchers. Beyond that: 422.
    grammar_memory: int = 1 << 30
    # Compiled grammars kept for later requests, bytes.
    grammar_cache_bytes: int = 256 << 20
    # Tokens that admission keeps free for the growth of each admitted request. Fewer if it may generate fewer.
    num_reserved_decode_tokens: int = 512
    # Bytes of host memory for the KV of retracted requests; what does not fit is computed again.
    retraction_host_memory: int = 1 << 30
    schedule_policy: SchedulePolicy = SchedulePolicy.FCFS
    # Whether the `priority` of requests counts.
    enable_priority: bool = False
    # Plan and commit while a step runs; `scheduler/loops.py`.
    overlap_schedule: bool = True
    # Timeout in seconds of requests that set none; None: no limit.
    request_timeout: float | None = None


class SpeculativeConfig(msgspec.Struct, frozen=True, kw_only=True):
    # None: speculation is off.
    algorithm: SpeculativeAlgorithm | None = None
    # Maximum number of draft tokens per request and step.
    num_draft_tokens: int = 4
    # Algorithm ngram: maximum tokens of a match.
    ngram_max_match: int = 8
    # Algorithm draft: smaller model with the same vocabulary, in the form of `model`. Prefill and decode need the same.
    draft_model: str | None = None


class ClusterToken(msgspec.Struct, frozen=True):
    """Secret shared by all workers of a cluster. Not part of any repr, so not of any log."""

    # Empty: any connection is accepted.
    secret: bytes = b""

    def __repr__(self) -> str:
        return f"ClusterToken({'***' if self.secret else 'none'})"

    def __rich_repr__(self) -> list[tuple[str, Any]]:
        return []


class DisaggregationConfig(msgspec.Struct, frozen=True, kw_only=True):
    mode: DisaggregationMode = DisaggregationMode.NULL
    transfer_backend: str = "tcp"
    # Decode: dtype of the KV cache in transfer, if it is narrower than the pool's; "auto": the pool's.
    transfer_dtype: str = "auto"
    # Address at which peers reach this worker's bootstrap server (prefill) and its data and control sockets.
    host: str = "127.0.0.1"
    # Proves membership on each of these connections. Required if `host` is not a loopback address.
    cluster_token: ClusterToken = ClusterToken()
    # Prefill: port of the bootstrap server, 0: any free one.
    bootstrap_port: int = 8998
    # The backend's own settings, by name.
    transfer_options: dict[str, str] = {}
    # Compare the KV of each room end to end.
    transfer_checksum: bool = False
    # Deadlines, seconds.
    bootstrap_timeout: float = 300.0
    transfer_timeout: float = 300.0
    heartbeat_interval: float = 5.0
    heartbeat_misses: int = 2
    # Metadata rows: the most requests with a KV transfer in flight.
    num_metadata_slots: int = 512


class KVEventsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Publication of the content of the prefix caches: the value of `--kv-events-config`, a JSON object."""

    # "null": no events; "zmq"; `observe/events/publisher.py`.
    publisher: str = "null"
    # The data parallel rank is added to the port of each; port 0: any free one. The publisher connects to a TCP
    # endpoint without a wildcard, and listens at any other. No replay endpoint: no replay.
    endpoint: str = "tcp://*:5557"
    replay_endpoint: str | None = None
    topic: str = ""
    # Batches kept for replay, messages queued by ZMQ for a slow subscriber, batches that wait for the publisher's
    # thread.
    buffer_steps: int = 10_000
    hwm: int = 100_000
    max_queue_size: int = 100_000
    # Events as arrays, the format before 2026.
    as_arrays: bool = False
    # Replayed batches are [topic, number, payload]; else [number, payload].
    replay_topic: bool = True

    @classmethod
    def from_cli(cls, text: str) -> KVEventsConfig:
        """Return the settings of a JSON object. Raises ConfigError."""
        try:
            config = msgspec.json.decode(text, type=cls)
        except msgspec.MsgspecError as error:
            raise ConfigError(f"--kv-events-config {text!r}: {error}") from error
        if min(config.buffer_steps, config.hwm, config.max_queue_size) < 1:
            raise ConfigError(f"--kv-events-config {text!r}: buffer_steps, hwm and max_queue_size must be at least 1")
        return config


class LimitsConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of what one request, one connection or one client address may cost a router or a worker.

    Requests beyond a limit get a 4xx that names the limit. The same values are listed by `/server_info`.
    """

    # Bytes of a request's body. None: derived from the context length, see `request_bytes`.
    max_request_bytes: int | None = None
    # Bytes of a request's line and headers together.
    max_header_bytes: int = 64 << 10
    # Seconds from a request's first byte (on a new connection: from its accept) to the end of its headers.
    header_timeout: float = 10.0
    # Seconds from the end of a request's headers to the end of its body.
    body_timeout: float = 60.0
    # Seconds a connection may stay open between two requests.
    keep_alive_timeout: float = 75.0
    # Connections of one client address without a request in progress. The oldest is closed when one more comes.
    max_idle_connections: int = 1024
    # Estimated bytes of memory of all requests that are read, parsed or tokenized. Beyond that: 503 with Retry-After.
    max_request_memory: int = 512 << 20
    # Levels of nested objects and arrays in a body.
    max_json_depth: int = 64
    # Messages of a chat request.
    max_messages: int = 4096
    # Entries of `stop`, and characters of each.
    max_stop_strings: int = 64
    max_stop_chars: int = 1024
    # Entries of `stop_token_ids`, and of `logit_bias`.
    max_stop_token_ids: int = 1024
    max_logit_bias: int = 1024
    # Samples per prompt (`n`), and per request over all its prompts.
    max_n: int = 128
    max_samples: int = 4096
    # Characters of a request id.
    max_rid_chars: int = 256
    # Characters of a JSON schema, regex, EBNF or structural tag.
    max_grammar_chars: int = 256 << 10

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            if (value := getattr(self, name)) is not None and not 0 < value < math.inf:
                raise ConfigError(f"--{name.replace('_', '-')} must be above 0 and finite, not {value:g}")

    def request_bytes(self, context_length: int) -> int:
        """Return the bytes a body may have if the model's context is `context_length` tokens long."""
        if self.max_request_bytes is not None:
            return self.max_request_bytes
        return max(1 << 20, 256 * context_length)


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True):
    host: str = "127.0.0.1"
    # 0: any free port.
    port: int = 30000
    served_model_name: str | None = None
    # Routers to register with, e.g. http://127.0.0.1:8000.
    router_urls: tuple[str, ...] = ()
    # File with the router's API key as its first key; None: routers require no key.
    router_key_file: str | None = None
    # PEM file with the only certificate that a router at an https URL may present, whatever host name it is for. None:
    # a certificate that the system trusts, for the host name in the URL.
    router_certificate: str | None = None
    # PEM files of this worker's certificate and its key. None: no TLS.
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None
    # PEM file with the authorities of the certificates that clients must present. None: clients need none.
    ssl_ca_certs: str | None = None
    # File with the API keys of clients of this worker; None: no key is required.
    api_key_file: str | None = None
    log_level: str = "warning"
    limits: LimitsConfig = LimitsConfig()
    # Reject requests with unknown fields instead of warning about them.
    strict_fields: bool = False


class ParallelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How a model is split over ranks; `core/parallel.py`."""

    # Ranks that shard each matrix, and stages that split the layers.
    tp_size: int = 1
    pp_size: int = 1
    # Layers of each stage; empty: as even as possible.
    pp_layers: tuple[int, ...] = ()
    # Hosts that the ranks are distributed over, and the number of this one (`core/parallel.py`).
    nnodes: int = 1
    node_rank: int = 0
    # HOST:PORT at which node 0 waits for the others; empty: there are none.
    dist_init_addr: str = ""
    # Address at which ranks on other hosts reach the ranks of this one.
    node_host: str = ""

    @property
    def group_size(self) -> int:
        """Ranks that compute one step together."""
        return self.tp_size * self.pp_size


class WorkerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """All settings of one worker."""

    model: ModelConfig = ModelConfig()
    cache: CacheConfig = CacheConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    speculative: SpeculativeConfig = SpeculativeConfig()
    disaggregation: DisaggregationConfig = DisaggregationConfig()
    server: ServerConfig = ServerConfig()
    kv_events: KVEventsConfig = KVEventsConfig()
    parallel: ParallelConfig = ParallelConfig()
    # Schedulers behind the front end. Each has its own copy of the model, its own pool, and all other limits of this
    # config for itself.
    dp_size: int = 1

    @property
    def max_open_requests(self) -> int:
        """Maximum number of samples that the worker holds, running and waiting."""
        return self.dp_size * (self.scheduler.max_running_requests + self.scheduler.max_queued_requests)
