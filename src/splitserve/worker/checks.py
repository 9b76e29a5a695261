"""Checks of the values of options before startup. All raise ConfigError with the option's name."""

from __future__ import annotations

import re
import ssl
from collections.abc import Iterator, Sequence
from pathlib import Path

from splitserve.api.api_keys import first_key, read_keys
from splitserve.api.tls import TlsFiles, tls_files, trust_only
from splitserve.core.config import (
    ATTENTION_BACKENDS,
    DTYPES,
    TRANSFER_DTYPES,
    ModelConfig,
    SchedulerConfig,
    ServerConfig,
    WorkerConfig,
)
from splitserve.core.errors import ConfigError
from splitserve.core.machine import MAX_THREADS
from splitserve.core.parallel import MAX_DP_SIZE, misfit
from splitserve.observe.events.publisher import check_config
from splitserve.router.args import parse_url
from splitserve.scheduler.speculation import MIN_MATCH
from splitserve.transfer.transports import USER_BACKENDS, check_options, missing

_BYTES = re.compile(r"(\d+)(?:([KMGT])(?:i?B)?)?", re.IGNORECASE)


def check_dtype(dtype: str, option: str = "--dtype", choices: Sequence[str] = DTYPES) -> None:
    if dtype not in ("auto", *choices):
        raise ConfigError(f"{option} {dtype!r}: choose one of auto, {', '.join(choices)}")


def check_backend(backend: str, option: str) -> None:
    if backend not in USER_BACKENDS:
        raise ConfigError(f"{option} {backend!r}: choose one of {', '.join(USER_BACKENDS)}")
    if problem := missing(backend):
        raise ConfigError(problem)


def check_worker(config: WorkerConfig) -> None:
    """Raise ConfigError for the first option that is out of range."""
    check_dtype(config.model.dtype)
    if config.model.attention_backend not in ATTENTION_BACKENDS:
        raise ConfigError(
            f"--attention-backend {config.model.attention_backend!r}: choose one of {', '.join(ATTENTION_BACKENDS)}"
        )
    check_backend(config.disaggregation.transfer_backend, "--disaggregation-transfer-backend")
    check_options(config.disaggregation.transfer_backend, config.disaggregation.transfer_options)
    check_dtype(config.disaggregation.transfer_dtype, "--transfer-dtype", TRANSFER_DTYPES)
    narrows, is_decode = config.disaggregation.transfer_dtype != "auto", config.disaggregation.mode == "decode"
    threads = config.model.threads
    shares_pool = config.cache.shared_pool is not None
    can_share = config.disaggregation.transfer_backend == "shm" and config.disaggregation.mode != "null"
    speculative = config.speculative
    has_draft = speculative.draft_model is not None
    checks = (
        (
            "--speculative-draft-model",
            has_draft == (speculative.algorithm == "draft"),
            "and --speculative-algorithm draft need each other",
        ),
        ("--speculative-num-draft-tokens", speculative.num_draft_tokens >= 1, "must be at least 1"),
        ("--speculative-ngram-max-match", speculative.ngram_max_match >= MIN_MATCH, f"must be at least {MIN_MATCH}"),
        (
            "--transfer-dtype",
            is_decode or not narrows,
            "is for decode workers, which say how the KV cache reaches them",
        ),
        ("--shared-pool", can_share or not shares_pool, "is for prefill and decode workers with the backend shm"),
        ("--port", 0 <= config.server.port < 65536, "must be in [0, 65535]"),
        ("--disaggregation-bootstrap-port", 0 <= config.disaggregation.bootstrap_port < 65536, "must be in [0, 65535]"),
        ("--page-size", config.cache.page_size >= 1, "must be at least 1"),
        ("--max-total-tokens", _is_positive(config.cache.max_total_tokens), "must be at least 1"),
        ("--mem-fraction-static", _is_fraction(config.cache.mem_fraction), "must be in (0, 1]"),
        ("--swa-full-tokens-ratio", _is_fraction(config.cache.swa_full_tokens_ratio), "must be in (0, 1]"),
        *_scheduler_checks(config.scheduler),
        ("--context-length", _is_positive(config.model.context_length), "must be at least 1"),
        ("--cuda-graph-max-bs", config.model.cuda_graph_max_batch >= 0, "must be at least 1"),
        ("--dp-size", 1 <= config.dp_size <= MAX_DP_SIZE, f"must be in [1, {MAX_DP_SIZE}]"),
        *_shape_checks(config),
        *_quantization_checks(config.model),
        *(_dp_attention_checks(config) if config.model.dp_attention else ()),
        *(_node_checks(config) if config.parallel.nnodes > 1 else ()),
        ("--threads", threads is None or 1 <= threads <= MAX_THREADS, f"must be in [1, {MAX_THREADS}]"),
        ("--bootstrap-timeout", config.disaggregation.bootstrap_timeout > 0, "must be above 0 seconds"),
        ("--transfer-timeout", config.disaggregation.transfer_timeout > 0, "must be above 0 seconds"),
    )
    for option, ok, rule in checks:
        if not ok:
            raise ConfigError(f"{option} {rule}")
    check_config(config.kv_events, config.dp_size)
    router_key(config.server)
    router_tls(config.server)
    server_tls(config.server)
    if config.server.api_key_file is not None:
        read_keys(Path(config.server.api_key_file), "--api-key-file")


def _shape_checks(config: WorkerConfig) -> Iterator[tuple[str, bool, str]]:
    """Yield checks of the shape of a sharded model, and of settings that need a single rank."""
    parallel, is_whole = config.parallel, config.parallel.group_size == 1
    yield "--tp-size", parallel.tp_size >= 1, "must be at least 1"
    yield "--pp-size", parallel.pp_size >= 1, "must be at least 1"
    num_stages = len(parallel.pp_layers)
    rule = f"names the layers of {num_stages} pipeline stages, --pp-size of {parallel.pp_size}"
    yield "--pp-layers", num_stages in (0, parallel.pp_size), rule
    yield "--pp-layers", min(parallel.pp_layers, default=1) >= 1, "must give each pipeline stage at least 1 layer"
    has_ranks = "deals experts out to tensor parallel ranks: give --tp-size 2 or more"
    yield "--enable-expert-parallel", parallel.tp_size > 1 or not config.model.expert_parallel, has_ranks
    alone = "is for a model on one rank, and --tp-size and --pp-size cut it over several: leave it out"
    yield "--speculative-draft-model", is_whole or config.speculative.draft_model is None, alone
    yield "--shared-pool", is_whole or config.cache.shared_pool is None, alone
    yield "--quantization", is_whole or config.model.quantization is None, alone
    yield "--prefix-host-memory", is_whole or config.cache.prefix_host_memory == 0, alone


def _quantization_checks(model: ModelConfig) -> Iterator[tuple[str, bool, str]]:
    """Yield a check for each option that quantized weights restrict, because only our kernels compute them."""
    if model.quantization is not None:
        for option, value, choices in (
            ("--dtype", model.dtype, ("auto", "bfloat16")),
            ("--kernels", model.kernels, ("auto",)),
            ("--device", model.device, ("auto", "cpu")),
        ):
            rule = f"{value} does not go together with --quantization {model.quantization}: give {' or '.join(choices)}"
            yield option, value in choices, rule


def check_nodes(nnodes: int, node_rank: int, dist_init_addr: str | None) -> None:
    """Check the options for several hosts. Raises ConfigError."""
    if nnodes < 1:
        raise ConfigError("--nnodes must be at least 1")
    if not 0 <= node_rank < nnodes:
        raise ConfigError(f"--node-rank must be in [0, {nnodes - 1}] with --nnodes {nnodes}")
    if (nnodes > 1) != (dist_init_addr is not None):
        raise ConfigError("--nnodes above 1 and --dist-init-addr HOST:PORT (of node 0, on all nodes) need each other")


def _node_checks(config: WorkerConfig) -> Iterator[tuple[str, bool, str]]:
    """Yield checks of a model that is sharded over ranks of several hosts."""
    parallel = config.parallel
    problem = misfit(parallel.tp_size, parallel.pp_size, parallel.nnodes)
    yield "--nnodes", not config.model.dp_attention, "does not go together with --enable-dp-attention: leave it out"
    yield "--nnodes", problem is None, f"{parallel.nnodes}: {problem}"
    has_token = bool(config.disaggregation.cluster_token.secret)
    recipe = "is needed with --nnodes above 1, the same on all nodes (openssl rand -hex 32 > F)"
    yield "--cluster-token-file", has_token, recipe


def _scheduler_checks(config: SchedulerConfig) -> Iterator[tuple[str, bool, str]]:
    at_least_one, above_zero = "must be at least 1", "must be above 0 seconds"
    yield "--chunked-prefill-size", config.chunked_prefill_size >= 1, at_least_one
    yield "--local-prefill-size", config.local_prefill_size >= 1, at_least_one
    yield "--max-running-requests", config.max_running_requests >= 1, at_least_one
    yield "--max-queued-requests", config.max_queued_requests >= 1, at_least_one
    yield "--grammar-timeout", config.grammar_timeout > 0, above_zero
    yield "--grammar-compile-budget", config.grammar_compile_budget > 0, above_zero
    yield "--grammar-step-budget", config.grammar_step_budget > 0, above_zero
    yield "--grammar-request-budget", config.grammar_request_budget > 0, above_zero
    yield "--grammar-memory", config.grammar_memory >= 1 << 20, "must be at least 1 MiB"
    yield "--num-reserved-decode-tokens", config.num_reserved_decode_tokens >= 1, at_least_one
    yield "--request-timeout", config.request_timeout is None or config.request_timeout > 0, above_zero


def _dp_attention_checks(config: WorkerConfig) -> Iterator[tuple[str, bool, str]]:
    """Yield checks of settings with data parallel ranks that compute their steps together."""
    yield (
        "--enable-dp-attention",
        config.dp_size > 1,
        "deals experts out to data parallel ranks: give --dp-size 2 or more",
    )
    alone = "does not go together with --enable-dp-attention: leave it out"
    yield "--tp-size", config.parallel.tp_size == 1, alone
    yield "--pp-size", config.parallel.pp_size == 1, alone
    yield "--speculative-algorithm", config.speculative.algorithm is None, alone
    yield "--shared-pool", config.cache.shared_pool is None, alone
    yield "--quantization", config.model.quantization is None, alone


def stage_sizes(text: str, option: str) -> tuple[int, ...]:
    """Return numbers separated by commas. Raises ConfigError."""
    try:
        return tuple(int(word) for word in text.split(","))
    except ValueError:
        raise ConfigError(f"{option} {text!r}: give a number of layers for each stage, such as 10,20") from None


def router_key(server: ServerConfig) -> str | None:
    """Return the key with which a worker authenticates at its router. None: no key. Raises ConfigError."""
    if server.router_key_file is None:
        return None
    return first_key(Path(server.router_key_file), "--router-key-file")


def router_tls(server: ServerConfig) -> ssl.SSLContext | None:
    """Return the context for an https router with a given certificate. None: none given. Raises ConfigError."""
    path = server.router_certificate
    if path is None:
        return None
    try:
        return trust_only(Path(path).read_bytes(), f"--router-certificate {path}")
    except OSError as error:
        raise ConfigError(f"--router-certificate {path}: {error.strerror}") from None


def server_tls(server: ServerConfig) -> TlsFiles | None:
    """Return the files of a worker with https. None: it has none. Raises ConfigError."""
    paths = (server.ssl_certfile, server.ssl_keyfile, server.ssl_ca_certs)
    return tls_files(*(None if path is None else Path(path) for path in paths))


def router_urls(options: Sequence[str]) -> tuple[str, ...]:
    """Return the URLs of options `--router`, each once. An option may have several, separated by commas.

    Raises ConfigError.
    """
    words = (word for option in options for word in option.split(","))
    return tuple(dict.fromkeys(parse_url(word) for word in words))


def named_values(words: Sequence[str], option: str) -> dict[str, str]:
    """Return the values of words NAME=VALUE, by name. Raises ConfigError."""
    values = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not (name and equals):
            raise ConfigError(f"{option} {word!r}: give NAME=VALUE")
        values[name] = value
    return values


def num_bytes(text: str, option: str) -> int:
    """Return the bytes of a number with an optional suffix K, M, G or T (also KB or KiB), powers of 1024.

    Raises ConfigError.
    """
    match = _BYTES.fullmatch(text.strip())
    if match is None:
        raise ConfigError(f"{option} {text!r}: give a number of bytes, such as 512M or 4G")
    number, suffix = match.groups()
    return int(number) << (10 * (" KMGT".index(suffix.upper()) if suffix else 0))


def _is_fraction(value: float | None) -> bool:
    """Return whether a value is in (0, 1]. None, which selects a default, is valid."""
    return value is None or 0.0 < value <= 1.0


def _is_positive(value: int | None) -> bool:
    """Return whether a value is at least 1. None, which selects a default, is valid."""
    return value is None or value >= 1
