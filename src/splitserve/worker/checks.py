"""Checks of option values before startup, and of a role before a switch. All raise ConfigError.

Imports no torch.
"""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from pathlib import Path

import msgspec

from splitserve.api.api_keys import first_key, read_keys
from splitserve.api.tls import TlsFiles, tls_files, trust_only
from splitserve.core.config import DisaggregationConfig, ModelConfig, ServerConfig, WorkerConfig
from splitserve.core.errors import ConfigError, OptionError
from splitserve.core.options import check_ranges
from splitserve.core.parallel import misfit
from splitserve.core.request import DisaggregationMode
from splitserve.observe.events.publisher import check_config
from splitserve.process.cluster_token import settle_host
from splitserve.transfer.transports import USER_BACKENDS, check_options, missing


def check_backend(backend: str, option: str) -> None:
    if backend not in USER_BACKENDS:
        raise OptionError(option, f"{backend!r}: choose one of {', '.join(USER_BACKENDS)}")
    if problem := missing(backend):
        raise ConfigError(problem)


def check_worker(config: WorkerConfig) -> None:
    """Raise ConfigError for the first option that is out of range, or does not go together with others."""
    check_ranges(config)
    check_backend(config.disaggregation.transfer_backend, "--disaggregation-transfer-backend")
    check_options(config.disaggregation.transfer_backend, config.disaggregation.transfer_options)
    for option, ok, rule in (*_role_checks(config), *_shape_checks(config), *_quantization_checks(config.model)):
        if not ok:
            raise OptionError(option, rule)
    check_config(config.kv_events, config.dp_size)
    router_key(config.server)
    router_tls(config.server)
    server_tls(config.server)
    if config.server.api_key_file is not None:
        read_keys(Path(config.server.api_key_file), "--api-key-file")


def _role_checks(config: WorkerConfig) -> Iterator[tuple[str, bool, str]]:
    """Yield checks of options that need a role, a backend or another option."""
    disaggregation, speculative = config.disaggregation, config.speculative
    needs_draft = (speculative.draft_model is not None) == (speculative.algorithm == "draft")
    yield "--speculative-draft-model", needs_draft, "and --speculative-algorithm draft need each other"
    is_decode = disaggregation.mode == "decode" or disaggregation.transfer_dtype == "auto"
    yield "--transfer-dtype", is_decode, "is for decode workers, which determine how the KV cache reaches them"
    can_share = disaggregation.transfer_backend == "shm" and disaggregation.mode != "null"
    rule = "is for prefill and decode workers with the backend shm"
    yield "--shared-pool", can_share or config.cache.shared_pool is None, rule


def _shape_checks(config: WorkerConfig) -> Iterator[tuple[str, bool, str]]:
    """Yield checks of the shape of a sharded model, and of settings that need a single rank."""
    parallel, is_whole = config.parallel, config.parallel.group_size == 1
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
    if config.model.dp_attention:
        yield from _dp_attention_checks(config)
    if parallel.nnodes > 1:
        problem = misfit(parallel.tp_size, parallel.pp_size, parallel.nnodes)
        yield "--nnodes", not config.model.dp_attention, "does not go together with --enable-dp-attention: leave it out"
        yield "--nnodes", problem is None, f"{parallel.nnodes}: {problem}"
        recipe = "is needed with --nnodes above 1, the same on all nodes (openssl rand -hex 32 > F)"
        yield "--cluster-token-file", bool(config.disaggregation.cluster_token.secret), recipe


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
    if not 0 <= node_rank < nnodes:
        raise OptionError("--node-rank", f"must be in [0, {nnodes - 1}] with --nnodes {nnodes}")
    if (nnodes > 1) != (dist_init_addr is not None):
        raise OptionError(
            "--nnodes", "above 1 and --dist-init-addr HOST:PORT (of node 0, on all nodes) need each other"
        )


def _dp_attention_checks(config: WorkerConfig) -> Iterator[tuple[str, bool, str]]:
    """Yield checks of settings with data parallel ranks that compute their steps together."""
    has_ranks = "deals experts out to data parallel ranks: give --dp-size 2 or more"
    yield "--enable-dp-attention", config.dp_size > 1, has_ranks
    alone = "does not go together with --enable-dp-attention: leave it out"
    yield "--tp-size", config.parallel.tp_size == 1, alone
    yield "--pp-size", config.parallel.pp_size == 1, alone
    yield "--speculative-algorithm", config.speculative.algorithm is None, alone
    yield "--shared-pool", config.cache.shared_pool is None, alone
    yield "--quantization", config.model.quantization is None, alone


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
        raise OptionError("--router-certificate", f"{path}: {error.strerror}") from None


def server_tls(server: ServerConfig) -> TlsFiles | None:
    """Return the files of a worker with https. None: it has none. Raises ConfigError."""
    paths = (server.ssl_certfile, server.ssl_keyfile, server.ssl_ca_certs)
    return tls_files(*(None if path is None else Path(path) for path in paths))


def settings_in_role(config: WorkerConfig, mode: DisaggregationMode) -> DisaggregationConfig:
    """Return the KV transfer settings of this worker in that role. Raises ConfigError if it cannot have the role."""
    current = config.disaggregation
    if mode is not current.mode and config.parallel.group_size > 1:
        raise ConfigError(
            f"a worker with a model sharded over ranks (--tp-size {config.parallel.tp_size} --pp-size "
            f"{config.parallel.pp_size}) stays what it is: start another worker in the role {mode}"
        )
    if mode is not current.mode and config.model.dp_attention:
        raise ConfigError(
            "a worker with data parallel attention (--enable-dp-attention) cannot change its role: start "
            f"another worker in the role {mode}"
        )
    if mode is DisaggregationMode.NULL and config.cache.shared_pool is not None:
        raise ConfigError(
            "a worker in a shared pool (--shared-pool) hands its pages over: it can be prefill or decode, not null"
        )
    return settle_host(msgspec.structs.replace(current, mode=mode))
