"""Checks of option values before startup. All raise ConfigError.

Imports no torch.
"""

from __future__ import annotations

import ssl
from collections.abc import Sequence
from pathlib import Path

from splitserve.api.api_keys import first_key, read_keys
from splitserve.api.tls import TlsFiles, tls_files, trust_only
from splitserve.core.config import ServerConfig, WorkerConfig
from splitserve.core.errors import ConfigError, OptionError
from splitserve.core.options import check_ranges
from splitserve.observe.events.publisher import check_config
from splitserve.transfer.transports import USER_BACKENDS, WORKER_BACKENDS, check_options, missing
from splitserve.worker.exclusions import given_exclusions


def check_backend(backend: str, option: str, choices: Sequence[str] = USER_BACKENDS) -> None:
    if backend not in choices:
        raise OptionError(option, f"{backend!r}: choose one of {', '.join(choices)}")
    if problem := missing(backend):
        raise ConfigError(problem)


def check_worker(config: WorkerConfig, *, is_local: bool = True) -> None:
    """Raise ConfigError for the first option that is out of range, or does not go together with others.

    `is_local`: the worker runs on this machine, so the libraries of its transfer backend must be here.
    """
    check_ranges(config)
    if is_local:
        check_backend(config.disaggregation.transfer_backend, "--disaggregation-transfer-backend", WORKER_BACKENDS)
    check_options(config.disaggregation.transfer_backend, config.disaggregation.transfer_options)
    if min(config.parallel.pp_layers, default=1) < 1:
        raise OptionError("--pp-layers", "must give each pipeline stage at least 1 layer")
    check_combinations(config)
    check_config(config.kv_events, config.dp_size)
    router_key(config.server)
    router_tls(config.server)
    server_tls(config.server)
    if config.server.api_key_file is not None:
        read_keys(Path(config.server.api_key_file), "--api-key-file")


def check_combinations(config: WorkerConfig) -> None:
    for exclusion in given_exclusions(config):
        raise exclusion.error(config)


def check_nodes(nnodes: int, node_rank: int, dist_init_addr: str | None) -> None:
    if not 0 <= node_rank < nnodes:
        raise OptionError("--node-rank", f"must be in [0, {nnodes - 1}] with --nnodes {nnodes}")
    if (nnodes > 1) != (dist_init_addr is not None):
        raise OptionError(
            "--nnodes", "above 1 and --dist-init-addr HOST:PORT (of node 0, on all nodes) need each other"
        )


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
