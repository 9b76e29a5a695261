"""Specifications of a cluster's processes: their options and secrets, from its config."""

from __future__ import annotations

import json
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from splitserve.api.api_keys import first_key, read_keys
from splitserve.api.tls import CA_OPTION, CERT_OPTION, KEY_OPTION, trust_only, worker_tls
from splitserve.core.errors import ConfigError, OptionError
from splitserve.deploy.config import MODES, ROUTER, ClusterConfig, PoolConfig
from splitserve.deploy.placer import NODE_ADDRESS, ProcessSpec
from splitserve.process.cluster_token import new_token, read_token_file

_CERTIFICATE_OPTION = "--ssl-certfile"


@dataclass(frozen=True, slots=True)
class Credentials:
    """Contents of the cluster's secret files. None: there is no such file."""

    token: bytes
    clients: bytes | None = None
    operators: bytes | None = None
    workers: bytes | None = None
    # Key that workers and the supervisor present to the router, and key that router and supervisor present to workers.
    operator_key: str | None = None
    worker_key: str | None = None
    # PEM certificate of a router with https.
    certificate: bytes | None = None
    # TLS context for workers with https. None: the system's trusted certificates.
    worker_tls: ssl.SSLContext | None = None

    @classmethod
    def read(cls, config: ClusterConfig) -> Credentials:
        """Read the files of a cluster; without a token file, generate a token. Raises ConfigError."""
        token_file, keys = config.cluster_token_file, config.keys
        token = new_token() if token_file is None else read_token_file(Path(token_file)).secret
        # If only clients have keys, these are also valid on the routes of operators.
        operators = keys.clients if keys.operators is None else keys.operators
        tls_files = [option_value(config.router.args, name) for name in (CA_OPTION, CERT_OPTION, KEY_OPTION)]
        return cls(
            token,
            clients=_key_file(keys.clients, "keys.clients"),
            operators=_key_file(keys.operators, "keys.operators"),
            workers=_key_file(keys.workers, "keys.workers"),
            operator_key=None if operators is None else first_key(Path(operators), "keys.operators"),
            worker_key=None if keys.workers is None else first_key(Path(keys.workers), "keys.workers"),
            certificate=_certificate(config.router.args),
            worker_tls=worker_tls(*(None if path is None else Path(path) for path in tls_files)),
        )

    @property
    def tls(self) -> ssl.SSLContext | None:
        """Return the TLS context for the router. None: it has no https."""
        return None if self.certificate is None else trust_only(self.certificate, _CERTIFICATE_OPTION)

    def __repr__(self) -> str:
        return "Credentials(***)"


def _key_file(path: str | None, where: str) -> bytes | None:
    if path is None:
        return None
    read_keys(Path(path), where)
    return Path(path).read_bytes()


def _certificate(router_args: Sequence[str]) -> bytes | None:
    path = option_value(router_args, _CERTIFICATE_OPTION)
    if path is None:
        return None
    try:
        pem = Path(path).read_bytes()
    except OSError as error:
        raise OptionError(_CERTIFICATE_OPTION, f"{path}: {error.strerror}") from None
    trust_only(pem, f"{_CERTIFICATE_OPTION} {path}")
    return pem


def option_value(args: Sequence[str], name: str) -> str | None:
    """Return the last value of an option, given as two words or with an equals sign. None: not given."""
    found = None
    for i, word in enumerate(args):
        option, equals, value = word.partition("=")
        if option == name:
            found = value if equals else "".join(args[i + 1 : i + 2])
    return found


def router_args(config: ClusterConfig) -> list[str]:
    """Return the command line of the router without its address and without secrets."""
    drain = str(config.supervision.drain_timeout)
    return ["router", "--drain-timeout", drain, *_log_args(config), *config.router.args]


def _log_args(config: ClusterConfig) -> list[str]:
    return ["--log-level", config.log_level, "--log-format", config.log_format]


def worker_args(config: ClusterConfig, pool_name: str, threads: int) -> list[str]:
    """Return the command line of a worker without its address, its router and its secrets."""
    pool = config.pools.by_name()[pool_name]
    args = ["serve", config.model, "--disaggregation-mode", MODES[pool_name].value]
    args += ["--threads", str(threads), *_log_args(config)]
    args += ["--drain-timeout", str(config.supervision.drain_timeout)]
    args += ["--load-timeout", str(config.supervision.load_timeout)]
    for option, size in (("--tp-size", pool.tp_size), ("--pp-size", pool.pp_size), ("--dp-size", pool.dp_size)):
        args += [option, str(size)] if size > 1 else []
    own = [*config.worker_args, *pool.args]
    if pool.gpus == 0 and not any(word.partition("=")[0] == "--device" for word in own):
        args += ["--device", "cpu"]
    return args + own


def router_spec(
    config: ClusterConfig, credentials: Credentials, host: str, port: int, listen_fd: int | None = None
) -> ProcessSpec:
    """Return the specification of the router. `listen_fd`: inherited listener. None: `host` and `port`."""
    secrets = {
        "--api-key-file": credentials.clients,
        "--operator-key-file": credentials.operators,
        "--worker-key-file": credentials.workers,
    }
    args = [*router_args(config), "--host", config.router.host or host, "--port", str(port)]
    if listen_fd is not None:
        args += ["--fd", str(listen_fd)]
    return ProcessSpec(name=ROUTER, args=tuple(args), secrets=_given(secrets), is_near=True, listen_fd=listen_fd)


def worker_spec(
    config: ClusterConfig, credentials: Credentials, name: str, pool_name: str, *, threads: int, router_url: str | None
) -> ProcessSpec:
    """Return the specification of a worker. `threads`: CPU threads per rank. `router_url` None: do not register."""
    pool = config.pools.by_name()[pool_name]
    args = worker_args(config, pool_name, threads)
    args += _events_args(config, args)
    args += ["--host", NODE_ADDRESS, "--port", "0", "--disaggregation-bootstrap-port", "0"]
    args += [] if router_url is None else ["--router", router_url]
    operator_key = credentials.operator_key
    secrets = {
        "--cluster-token-file": credentials.token,
        "--router-key-file": None if operator_key is None else operator_key.encode(),
        "--router-certificate": credentials.certificate,
        "--api-key-file": credentials.workers,
    }
    # torch reads the sizes of its thread pools from the environment, before any option of the worker is parsed.
    env = {"OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false", **pool.env}
    return ProcessSpec(
        name=name,
        args=tuple(args),
        secrets=_given(secrets),
        env=env,
        num_cpus=config.ranks_of(pool) * (pool.cpus or 1),
        num_gpus=config.ranks_of(pool) * pool.gpus,
        is_cpu_worker=pool.gpus == 0 and option_value(args, "--device") == "cpu",
    )


def _events_args(config: ClusterConfig, args: Sequence[str]) -> list[str]:
    """Return the option that makes a worker publish KV events, if a policy of the router needs them.

    `args`: of the worker. Empty if they have the option already.
    """
    flag, policies = "--kv-events-config", ("--policy", "--prefill-policy", "--decode-policy")
    is_needed = any(option_value(config.router.args, policy) == "cache_aware" for policy in policies)
    if not is_needed or option_value(args, flag) is not None:
        return []
    # Any free port: the worker reports it to the router.
    endpoint = f"tcp://{NODE_ADDRESS}:0"
    return [flag, json.dumps({"publisher": "zmq", "endpoint": endpoint, "replay_endpoint": endpoint})]


def threads_of(config: ClusterConfig, pool: PoolConfig, num_cores: int | None) -> int:
    """Return the threads per rank. `num_cores`: of the machine that all ranks share. None: each rank has its own."""
    if pool.cpus is not None:
        return pool.cpus
    return 1 if num_cores is None else max(1, num_cores // max(1, config.num_ranks))


def check_startable(config: ClusterConfig, *, is_local: bool) -> None:
    """Raise ConfigError for a cluster that only Kubernetes, or Ray, can start. `is_local`: on this machine."""
    for name, pool in config.pools.by_name().items():
        if is_local and pool.gpus:
            raise ConfigError(
                f"pools.{name}.gpus is {pool.gpus}: only Ray and Kubernetes reserve GPUs; on this machine leave it out "
                "and give args: [--device, cuda:N]"
            )
        if pool.nodes > 1:
            raise ConfigError(
                f"pools.{name}.nodes is {pool.nodes}: `cluster up` has all ranks of a worker on one node (`cluster "
                "render k8s` is for more); leave it out"
            )


def _given(secrets: Mapping[str, bytes | None]) -> dict[str, bytes]:
    return {option: content for option, content in secrets.items() if content is not None}
