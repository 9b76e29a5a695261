"""The options of one worker, and the WorkerConfig that follows from their values."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from splitserve.cli.derive import Option, fill, in_sections, limits, replaced
from splitserve.cli.options import QUANTIZATION_HELP
from splitserve.core.config import (
    ATTENTION_BACKENDS,
    DTYPES,
    KERNELS,
    QUANTIZATIONS,
    TRANSFER_DTYPES,
    ClusterToken,
    DisaggregationConfig,
    KVEventsConfig,
    ServerConfig,
    WorkerConfig,
)
from splitserve.core.errors import ConfigError
from splitserve.core.request import DisaggregationMode
from splitserve.process.settings import LEVELS
from splitserve.transfer.transports import USER_BACKENDS, options_help
from splitserve.worker.checks import check_worker, named_values, stage_sizes
from splitserve.worker.join import WILDCARDS, WorkerAddress

_FILE = {"metavar": "FILE"}
WORKER_DEFAULTS = WorkerConfig(server=ServerConfig(log_level="info"))
_MODEL = (
    Option(
        "server.served_model_name",
        "Name of the model in requests. Default: MODEL.",
        settings={"metavar": "NAME"},
    ),
    Option(
        "model.dtype",
        "Dtype of weights and KV pool. auto: the checkpoint's; on a CPU bfloat16 if our kernels compute it or "
        "--quantization needs it, else float32.",
        choices=("auto", *DTYPES),
    ),
    Option(
        "model.device",
        "auto, cpu, cuda or cuda:N. Prefill and decode on GPUs need a transfer backend that reads GPU memory.",
    ),
    Option("model.quantization", QUANTIZATION_HELP, choices=QUANTIZATIONS),
    Option("model.context_length", "Tokens of prompt and answer per request. Default: the model's."),
    Option("model.kernels", "auto: own CPU kernels if they are faster than torch's.", choices=KERNELS),
    Option(
        "model.attention_backend",
        "On GPUs. auto: FlashInfer if it is installed.",
        choices=ATTENTION_BACKENDS,
    ),
    Option("model.threads", "CPU threads per rank. Default: the cores, divided among the ranks."),
    Option(
        "model.cpu_affinity",
        "Cores the worker may use, such as 0-3,8. Default: all of this process.",
        settings={"metavar": "CPUS"},
    ),
    Option(
        "",
        "On GPUs: launch each kernel of a decode step instead of replaying a CUDA graph.",
        name="disable_cuda_graph",
        kind=bool,
        default=False,
    ),
    Option(
        "model.cuda_graph_max_batch",
        "On GPUs: largest decode batch that is replayed as a CUDA graph.",
        name="cuda_graph_max_bs",
        settings={"min": 1},
    ),
)
_RANKS = (
    Option("parallel.tp_size", "Tensor parallel ranks: processes that each hold a shard of every matrix."),
    Option("parallel.pp_size", "Pipeline stages: processes that each hold some layers."),
    Option(
        "parallel.pp_layers",
        "Layers per pipeline stage. Default: as even as possible.",
        kind=str | None,
        convert=partial(stage_sizes, option="--pp-layers"),
        settings={"metavar": "N,N,..."},
    ),
    Option("dp_size", "Data parallel ranks: schedulers that each have the whole model and a KV pool."),
    Option(
        "model.expert_parallel",
        "Each tensor parallel rank holds some experts whole instead of a shard of every expert.",
        name="enable_expert_parallel",
    ),
    Option(
        "model.dp_attention",
        "Data parallel ranks share the experts and compute their steps together.",
        name="enable_dp_attention",
    ),
    Option("parallel.nnodes", "Number of hosts for the ranks. Run serve on each host with the same options."),
    Option("parallel.node_rank", "Index of this host. Host 0 serves requests."),
    Option(
        "parallel.dist_init_addr",
        "Address of host 0 with a free port, for the other hosts.",
        kind=str | None,
        settings={"metavar": "HOST:PORT"},
    ),
)
_CACHE = (
    Option("cache.page_size", "Tokens per page of the KV pool."),
    Option("cache.max_total_tokens", "Tokens in the KV pool. Default: from --mem-fraction-static."),
    Option(
        "cache.mem_fraction",
        "Share of the memory that is free after the weights are loaded, for the KV pool. Default: 0.15, on GPUs 0.85.",
        name="mem_fraction_static",
    ),
    Option(
        "cache.shared_pool",
        "Memory file with one KV pool for several workers of this host (backend shm).",
        settings=_FILE,
    ),
    Option(
        "cache.swa_full_tokens_ratio",
        "Models with sliding windows: tokens in the pool of these layers per token in the pool of the others. "
        "1: one pool. Default: window / 2048.",
    ),
    Option(
        "cache.enable_prefix_cache",
        "Do not keep the prefixes of finished requests.",
        name="disable_radix_cache",
        kind=bool,
        default=False,
        convert=operator.not_,
        decls=("--disable-radix-cache/--enable-prefix-caching",),
    ),
    Option(
        "cache.enable_decode_prefix_cache",
        "On decode workers: keep prefixes, so prefill sends only new pages.",
        name="decode_prefix_cache",
    ),
    Option(
        "cache.prefix_host_memory",
        "On colocated and prefill workers: host memory for prefixes evicted from the KV pool. 0: none.",
        is_bytes=True,
    ),
)
_SCHEDULER = (
    Option("scheduler.chunked_prefill_size", "Tokens computed per step."),
    Option(
        "scheduler.local_prefill_size",
        "On decode workers: prompt tokens computed locally per step, within --chunked-prefill-size.",
    ),
    Option("scheduler.max_running_requests", "Requests in the running batch."),
    Option("scheduler.max_queued_requests", "Waiting requests. Beyond that: 503."),
    Option(
        "scheduler.num_reserved_decode_tokens",
        "Tokens that admission leaves free for each running request. Raise it if requests are retracted often.",
    ),
    Option(
        "scheduler.retraction_host_memory",
        "Host memory for the KV of retracted requests. 0: their KV is computed again.",
        is_bytes=True,
    ),
    Option(
        "scheduler.schedule_policy",
        "Order of waiting requests: first come first served, longest prefix match, shortest prompt first.",
    ),
    Option("scheduler.enable_priority", "Run requests with a larger `priority` first."),
    Option(
        "scheduler.overlap_schedule",
        "Plan each step after the end of the previous one, not during it.",
        name="disable_overlap_schedule",
        kind=bool,
        default=False,
        convert=operator.not_,
    ),
    Option("scheduler.request_timeout", "Seconds per request, if the request has no `timeout`. Default: no limit."),
    Option("scheduler.grammar_timeout", "Seconds a request waits for its compiled grammar."),
    Option("scheduler.grammar_compile_budget", "CPU seconds to compile one grammar."),
    Option("scheduler.grammar_step_budget", "CPU seconds that a grammar may need per token of a request."),
    Option("scheduler.grammar_request_budget", "CPU seconds that a grammar may need for all tokens of a request."),
    Option("scheduler.grammar_memory", "Memory of one compiled grammar and its matchers.", is_bytes=True),
)
_SPECULATION = (
    Option(
        "speculative.algorithm",
        "Propose draft tokens and verify several per step: ngram from the text, draft by a small model.",
        name="speculative_algorithm",
    ),
    Option("speculative.num_draft_tokens", "Draft tokens per step.", name="speculative_num_draft_tokens"),
    Option(
        "speculative.ngram_max_match",
        "ngram: last tokens that are searched in the text.",
        name="speculative_ngram_max_match",
    ),
    Option(
        "speculative.draft_model",
        "draft: a smaller model with the same vocabulary. Give it on prefill workers, too.",
        name="speculative_draft_model",
        settings={"metavar": "MODEL"},
    ),
)
_DISAGGREGATION = (
    Option("disaggregation.mode", "Role of the worker. null: colocated, both phases.", name="disaggregation_mode"),
    Option(
        "disaggregation.transfer_backend",
        "Transport of the KV cache.",
        name="disaggregation_transfer_backend",
        choices=USER_BACKENDS,
        decls=("--transfer-backend", "--disaggregation-transfer-backend"),
    ),
    Option(
        "disaggregation.transfer_options",
        f"Setting of the transfer backend, repeatable. {options_help()}.",
        name="transfer_option",
        kind=list[str] | None,
        convert=partial(named_values, option="--transfer-option"),
        settings={"metavar": "NAME=VALUE"},
    ),
    Option(
        "disaggregation.transfer_checksum", "Compare the KV cache of every prompt end to end; enough on one worker."
    ),
    Option(
        "disaggregation.transfer_dtype",
        "On decode workers: dtype of the KV cache in transfer. auto: that of the pool.",
        choices=("auto", *TRANSFER_DTYPES),
    ),
    Option(
        "",
        "Address at which other workers reach this one. Default: --host.",
        name="disaggregation_host",
        kind=str | None,
    ),
    Option(
        "",
        "On prefill workers: port of the bootstrap server, 0: any free one, default 8998, with --join 0. On decode "
        "workers: port for requests that name none.",
        name="disaggregation_bootstrap_port",
        kind=int | None,
    ),
    Option("disaggregation.bootstrap_timeout", "Seconds a request waits for its peer."),
    Option("disaggregation.transfer_timeout", "Seconds per KV transfer."),
    Option(
        "",
        "File with the token of the cluster. Prefill and decode workers need it to listen beyond loopback.",
        name="cluster_token_file",
        kind=Path | None,
        settings={**_FILE, "envvar": "SPLITSERVE_CLUSTER_TOKEN_FILE"},
    ),
)
_SERVER = (
    Option(
        "",
        "Address to listen on. Default: 127.0.0.1, with --join the local address that routes to the router.",
        name="host",
        kind=str | None,
    ),
    Option("", "Port to listen on, 0: any free one. Default: 30000, with --join 0.", name="port", kind=int | None),
    Option(
        "",
        "Router to register with, repeatable.",
        name="router",
        kind=list[str] | None,
        settings={"metavar": "URL[,URL]"},
    ),
    Option(
        "",
        "Register with the router at URL and advertise the local address that routes to it.",
        name="join",
        kind=str | None,
        settings={"metavar": "URL"},
    ),
    Option(
        "server.router_key_file",
        "File with the key for a router that has --operator-key-file. The first key is sent.",
        settings=_FILE,
    ),
    Option(
        "server.router_certificate",
        "PEM file with the certificate that a router at an https URL must present.",
        settings=_FILE,
    ),
    Option("server.ssl_certfile", "PEM certificate of this worker: serve https.", settings=_FILE),
    Option("server.ssl_keyfile", "PEM key of the certificate.", settings=_FILE),
    Option(
        "server.ssl_ca_certs",
        "PEM file with authorities. Clients must present a certificate that one of them signed.",
        settings=_FILE,
    ),
    Option(
        "server.api_key_file",
        "File with the keys that this worker accepts, one per line. Routers present one (--worker-key-file).",
        settings=_FILE,
    ),
    Option("server.strict_fields", "Reject requests with unknown fields. Default: accept them and warn in a header."),
    Option(
        "kv_events",
        'Publish changes of the prefix cache: {"publisher": "zmq", "endpoint": "tcp://*:5557"}. See docs/events.md.',
        name="kv_events_config",
        kind=str | None,
        convert=KVEventsConfig.from_cli,
        settings={"metavar": "JSON"},
    ),
)
_PROCESS = (
    Option("model.load_timeout", "Seconds for loading the model."),
    Option(
        "",
        "Seconds that running requests may take to finish on shutdown.",
        name="drain_timeout",
        kind=float,
        default=30.0,
        settings={"min": 0},
    ),
    Option("server.log_level", "Least severity that is logged.", choices=LEVELS),
    Option(
        "",
        "Write a JSON file with URL and process ids when ready.",
        name="ready_file",
        kind=Path | None,
        settings=_FILE,
    ),
    Option("", "End when standard input ends.", name="exit_with_parent", kind=bool, default=False),
)
WORKER_OPTIONS = in_sections(
    {
        "Model": _MODEL,
        "Parallel ranks": _RANKS,
        "KV cache": _CACHE,
        "Scheduling": _SCHEDULER,
        "Speculative decoding": _SPECULATION,
        "Disaggregation": _DISAGGREGATION,
        "Addresses and keys": _SERVER,
        "Limits": limits("server.limits"),
        "Process": _PROCESS,
    }
)


def worker_config(
    model: str,
    values: Mapping[str, Any],
    place: WorkerAddress,
    *,
    node_host: str = "",
    token: ClusterToken | None = None,
) -> WorkerConfig:
    """Return the config of a worker from the values of its options and its listening address.

    `node_host`: this host's address if the ranks are on several hosts. Raises ConfigError.
    """
    config: WorkerConfig = fill(WORKER_DEFAULTS, WORKER_OPTIONS, values)
    changes: dict[str, Any] = {
        "model.model": model,
        "server.host": place.host,
        "server.port": place.port,
        "server.router_urls": place.router_urls,
        "parallel.node_host": node_host,
        "disaggregation.host": _peer_host(values, place, node_host),
        "disaggregation.bootstrap_port": place.bootstrap_port,
        "disaggregation.cluster_token": token or ClusterToken(),
    }
    if values["disable_cuda_graph"]:
        changes["model.cuda_graph_max_batch"] = 0
    config = replaced(config, changes)
    check_worker(config)
    return config


def _peer_host(values: Mapping[str, Any], place: WorkerAddress, node_host: str) -> str:
    """Return the address at which other workers reach this one. Raises ConfigError."""
    found: str | None = values["disaggregation_host"] or place.peer_host
    if values["host"] in (None, *WILDCARDS):
        # A node without its own address is reached at the address that the other nodes use.
        found = found or node_host or None
    if found is not None:
        return found
    if place.host not in WILDCARDS:
        return place.host
    if place.router_urls or values["disaggregation_mode"] is not DisaggregationMode.NULL:
        raise ConfigError(
            f"--host {place.host!r} is no address that others can reach: give that as --disaggregation-host"
        )
    return DisaggregationConfig().host
