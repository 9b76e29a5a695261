"""Settings of one worker, by component. Resolved once at the start (cli, launch); later only its role may change."""

from __future__ import annotations

import enum
import math
from typing import Any

import msgspec

from splitserve.core.request import DisaggregationMode
from splitserve.errors import ConfigError

DTYPES = ("float32", "bfloat16", "float16")
KERNELS = ("auto", "torch")
ATTENTION_BACKENDS = ("auto", "torch", "flashinfer")
QUANTIZATIONS = ("int8", "w8a8")
TRANSFER_DTYPES = ("bfloat16", "float16", "float8_e4m3fn")


class SchedulePolicy(enum.StrEnum):
    """In which order waiting requests are let in; `scheduler/policy.py`."""

    FCFS = "fcfs"
    LPM = "lpm"
    SPF = "spf"


class SpeculativeAlgorithm(enum.StrEnum):
    """Who guesses the next tokens: the text itself (`scheduler/ngram.py`), or a small model (`engine/draft.py`)."""

    NGRAM = "ngram"
    DRAFT = "draft"


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    # A folder of safetensors, a .gguf file, a hub name, or an alias (`smollm2`).
    model: str = "smollm2"
    # "auto": the checkpoint's. On a CPU: bfloat16 if our kernels compute it or quantization needs it, else float32.
    dtype: str = "auto"
    # "auto": cuda where there is one, else cpu.
    device: str = "auto"
    # Tokens a request may have at most; None: what the model was made for.
    context_length: int | None = None
    # CPU threads of the model; None: all cores of this process.
    threads: int | None = None
    # Cores this worker may use, e.g. "0-3,8"; None: all that its process has.
    cpu_affinity: str | None = None
    # "auto": our own where they are faster; "torch": torch's everywhere.
    kernels: str = "auto"
    # Of the weights, on load: None or one of QUANTIZATIONS.
    quantization: str | None = None
    # "auto": on a GPU FlashInfer's where it is installed and knows the model's heads, else torch's.
    attention_backend: str = "auto"
    # Over several tensor parallel ranks: each has some of a layer's experts, whole; else a part of every expert.
    expert_parallel: bool = False
    # Each of several ranks serves requests of its own, and they meet for the experts.
    dp_attention: bool = False
    # GPU: replay decode steps of up to so many requests as CUDA graphs; 0: none.
    cuda_graph_max_batch: int = 256
    # Seconds that all ranks of a worker have to load their shares.
    load_timeout: float = 900.0


class CacheConfig(msgspec.Struct, frozen=True, kw_only=True):
    # Tokens a page.
    page_size: int = 16
    # Tokens in the pool; None: from `mem_fraction`.
    max_total_tokens: int | None = None
    # Of the device's free memory after the weights are loaded. None: a share that leaves a CPU to others (0.15), and
    # on a GPU takes all but what a step needs (0.85).
    mem_fraction: float | None = None
    # Ranks of this worker that divide that share among them.
    num_sharers: int = 1
    enable_prefix_cache: bool = True
    # Decode: keep prefixes too, and have prefill send only what is missing.
    enable_decode_prefix_cache: bool = True
    # Null and prefill: bytes of host memory for prefixes that the pool has no room for; 0: they are forgotten.
    prefix_host_memory: int = 0
    # File in memory that holds one pool for several workers of this host; None: a pool of our own.
    shared_pool: str | None = None
    # Where some layers have sliding windows: pages of their own pool for each one of the other layers', at most. 1: all
    # layers have one pool, and keep all tokens. None: by the window (`engine/window_pool.py`).
    swa_full_tokens_ratio: float | None = None


class SchedulerConfig(msgspec.Struct, frozen=True, kw_only=True):
    # Token budget of one step.
    chunked_prefill_size: int = 2048
    # Decode: of that, what prompts may have which are computed there, so that no stream waits long for them.
    local_prefill_size: int = 256
    max_running_requests: int = 256
    # Requests waiting at most; beyond that a request is refused with 503.
    max_queued_requests: int = 4096
    # Rows beyond `max_running_requests` for requests whose KV is on its way (decode).
    num_preallocated_rows: int = 64
    # Seconds a request waits for its grammar to be compiled.
    grammar_timeout: float = 60.0
    # Requests that wait for that at most; beyond that a request is refused with 503.
    max_queued_grammars: int = 1024
    # Grammars compiled at the same time.
    grammar_threads: int = 2
    # CPU seconds: to compile one grammar, per token of a request, and of all its tokens. Beyond that: 422.
    grammar_compile_budget: float = 20.0
    grammar_step_budget: float = 0.25
    grammar_request_budget: float = 10.0
    # Bytes of memory of a compiled grammar and its matchers. Beyond that: 422.
    grammar_memory: int = 1 << 30
    # Compiled grammars kept for later requests, bytes.
    grammar_cache_bytes: int = 256 << 20
    # Tokens that admission leaves free for every admitted request to grow by; all it may generate, where that is less.
    num_reserved_decode_tokens: int = 512
    # Bytes of host memory for the KV of retracted requests; what does not fit is computed again.
    retraction_host_memory: int = 1 << 30
    schedule_policy: SchedulePolicy = SchedulePolicy.FCFS
    # Heed the requests' `priority`.
    enable_priority: bool = False
    # Plan and commit beside the running step; `scheduler/loops.py`.
    overlap_schedule: bool = True
    # Seconds a request may take that does not say how many; None: as long as it takes.
    request_timeout: float | None = None


class SpeculativeConfig(msgspec.Struct, frozen=True, kw_only=True):
    # None: no token is guessed.
    algorithm: SpeculativeAlgorithm | None = None
    # Guesses that a step of a request verifies at most.
    num_draft_tokens: int = 4
    # ngram: tokens that are looked up at most.
    ngram_max_match: int = 8
    # draft: a smaller model of the same vocabulary, named as the model is. The same on prefill and decode.
    draft_model: str | None = None


class ClusterToken(msgspec.Struct, frozen=True):
    """What all workers of a cluster share and nobody else knows. It shows in no repr, so in no log."""

    # Empty: whoever reaches the ports is let in.
    secret: bytes = b""

    def __repr__(self) -> str:
        return f"ClusterToken({'***' if self.secret else 'none'})"

    def __rich_repr__(self) -> list[tuple[str, Any]]:
        return []


class DisaggregationConfig(msgspec.Struct, frozen=True, kw_only=True):
    mode: DisaggregationMode = DisaggregationMode.NULL
    transfer_backend: str = "tcp"
    # Decode: dtype of the KV cache on its way here, where it is narrower than the pool's; "auto": the pool's.
    transfer_dtype: str = "auto"
    # Where this worker's bootstrap server (prefill) and its data and control sockets are reached by peers.
    host: str = "127.0.0.1"
    # Proves membership on each of these connections. Needed where `host` is not a loopback address.
    cluster_token: ClusterToken = ClusterToken()
    # Prefill: port of the bootstrap server, 0: any free one.
    bootstrap_port: int = 8998
    # The backend's own settings, by name.
    transfer_options: dict[str, str] = {}
    # Compare every room's KV end to end.
    transfer_checksum: bool = False
    # Deadlines, seconds.
    bootstrap_timeout: float = 300.0
    transfer_timeout: float = 300.0
    heartbeat_interval: float = 5.0
    heartbeat_misses: int = 2
    # Metadata rows: requests whose hand-over is under way at most.
    num_metadata_slots: int = 512


class KVEventsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the prefix caches hold, told to the world: the value of `--kv-events-config`, a JSON object."""

    # "null": nothing is told; "zmq"; `events/publisher.py`.
    publisher: str = "null"
    # The data parallel rank is added to the port of each; port 0: any free one. The publisher connects to a TCP
    # endpoint without a wildcard, and listens at any other. No replay endpoint: no replay.
    endpoint: str = "tcp://*:5557"
    replay_endpoint: str | None = None
    topic: str = ""
    # Batches kept for replay, messages queued by ZMQ for a slow subscriber, batches that wait for our thread.
    buffer_steps: int = 10_000
    hwm: int = 100_000
    max_queue_size: int = 100_000
    # Events as arrays, the form of before 2026.
    as_arrays: bool = False
    # Replayed batches come as [topic, number, payload]; else as [number, payload].
    replay_topic: bool = True

    @classmethod
    def from_cli(cls, text: str) -> KVEventsConfig:
        """Raises ConfigError."""
        try:
            config = msgspec.json.decode(text, type=cls)
        except msgspec.MsgspecError as error:
            raise ConfigError(f"--kv-events-config {text!r}: {error}") from error
        if min(config.buffer_steps, config.hwm, config.max_queue_size) < 1:
            raise ConfigError(f"--kv-events-config {text!r}: buffer_steps, hwm and max_queue_size must be at least 1")
        return config


class LimitsConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What one request, one connection or one client address may cost a router or a worker.

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
    # File whose first key opens them; None: they ask for none.
    router_key_file: str | None = None
    # PEM file with the only certificate that a router at an https URL may present, whatever host name it is for. None:
    # a certificate that the system trusts, for the host name in the URL.
    router_certificate: str | None = None
    # PEM files of this worker's certificate and its key. None: no TLS.
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None
    # PEM file with the authorities of the certificates that clients must present. None: clients need none.
    ssl_ca_certs: str | None = None
    # File with the keys of who may call this worker; None: whoever reaches it.
    api_key_file: str | None = None
    log_level: str = "warning"
    limits: LimitsConfig = LimitsConfig()
    # Reject requests with unknown fields instead of warning about them.
    strict_fields: bool = False


class ParallelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How a model is cut over ranks; `core/parallel.py`."""

    # Each matrix over so many ranks, and the layers over so many stages.
    tp_size: int = 1
    pp_size: int = 1
    # Layers of each stage; empty: as even as can be.
    pp_layers: tuple[int, ...] = ()
    # Hosts that the ranks are dealt out to, and which of them this is (`core/nodes.py`).
    nnodes: int = 1
    node_rank: int = 0
    # HOST:PORT at which node 0 waits for the others; empty: there are none.
    dist_init_addr: str = ""
    # This host's address, where its ranks are reached by those of the others.
    node_host: str = ""

    @property
    def group_size(self) -> int:
        """Ranks that compute one step together."""
        return self.tp_size * self.pp_size


class WorkerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Everything one worker is told."""

    model: ModelConfig = ModelConfig()
    cache: CacheConfig = CacheConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    speculative: SpeculativeConfig = SpeculativeConfig()
    disaggregation: DisaggregationConfig = DisaggregationConfig()
    server: ServerConfig = ServerConfig()
    kv_events: KVEventsConfig = KVEventsConfig()
    parallel: ParallelConfig = ParallelConfig()
    # Schedulers behind its one front end, each with the whole model, a pool and the other limits here for itself.
    dp_size: int = 1

    @property
    def max_open_requests(self) -> int:
        """Samples the worker holds at most, running and waiting."""
        return self.dp_size * (self.scheduler.max_running_requests + self.scheduler.max_queued_requests)
