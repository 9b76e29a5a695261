"""From CONFIG.yaml to the processes of a cluster: the options each is started with, and the secrets it is given."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from splitserve.cluster.config import MODES, ROUTER, ClusterConfig, PoolConfig
from splitserve.cluster.placer import NODE_ADDRESS, ProcessSpec, Secrets
from splitserve.errors import ConfigError
from splitserve.launch.cluster_token import new_token, read_token_file
from splitserve.router.api_keys import first_key, read_keys


@dataclass(frozen=True, slots=True)
class Credentials:
    """Contents of the cluster's secret files; None: there is none."""

    token: bytes
    clients: bytes | None = None
    operators: bytes | None = None
    workers: bytes | None = None
    # What the workers and the supervisor show the router.
    operator_key: str | None = None

    @classmethod
    def read(cls, config: ClusterConfig) -> Credentials:
        """Raises ConfigError where a file is not as it should be."""
        token_file, keys = config.cluster_token_file, config.keys
        token = new_token() if token_file is None else read_token_file(Path(token_file)).secret
        return cls(
            token,
            clients=_key_file(keys.clients, "keys.clients"),
            operators=_key_file(keys.operators, "keys.operators"),
            workers=_key_file(keys.workers, "keys.workers"),
            operator_key=None if keys.operators is None else first_key(Path(keys.operators), "keys.operators"),
        )

    def __repr__(self) -> str:
        return "Credentials(***)"


def _key_file(path: str | None, where: str) -> bytes | None:
    if path is None:
        return None
    read_keys(Path(path), where)
    return Path(path).read_bytes()


def router_args(config: ClusterConfig) -> list[str]:
    """Without where it listens, and without secrets."""
    drain = str(config.supervision.drain_timeout)
    return ["router", "--drain-timeout", drain, "--log-level", config.log_level, *config.router.args]


def worker_args(config: ClusterConfig, pool_name: str, threads: int) -> list[str]:
    """Without where it listens and with whom it registers, and without secrets."""
    pool = config.pools.by_name()[pool_name]
    args = ["serve", config.model, "--disaggregation-mode", MODES[pool_name].value]
    args += ["--threads", str(threads), "--log-level", config.log_level]
    args += ["--drain-timeout", str(config.supervision.drain_timeout)]
    args += ["--load-timeout", str(config.supervision.load_timeout)]
    for option, size in (("--tp-size", pool.tp_size), ("--pp-size", pool.pp_size), ("--dp-size", pool.dp_size)):
        args += [option, str(size)] if size > 1 else []
    own = [*config.worker_args, *pool.args]
    if pool.gpus == 0 and not any(word.partition("=")[0] == "--device" for word in own):
        args += ["--device", "cpu"]
    return args + own


def router_spec(config: ClusterConfig, credentials: Credentials, host: str, port: int) -> ProcessSpec:
    secrets = {
        "--api-key-file": credentials.clients,
        "--operator-key-file": credentials.operators,
        "--worker-key-file": credentials.workers,
    }
    args = [*router_args(config), "--host", config.router.host or host, "--port", str(port)]
    return ProcessSpec(name=ROUTER, args=tuple(args), secrets=_secrets(secrets), is_near=True)


def worker_spec(
    config: ClusterConfig, credentials: Credentials, name: str, pool_name: str, *, threads: int, router_url: str
) -> ProcessSpec:
    """`threads`: of each of its ranks."""
    pool = config.pools.by_name()[pool_name]
    args = worker_args(config, pool_name, threads)
    args += ["--host", NODE_ADDRESS, "--port", "0", "--disaggregation-bootstrap-port", "0", "--router", router_url]
    operator_key = credentials.operator_key
    secrets = {
        "--cluster-token-file": credentials.token,
        "--router-key-file": None if operator_key is None else operator_key.encode(),
        "--api-key-file": credentials.workers,
    }
    # What torch's own pools take from the environment, before any option of ours is read.
    env = {"OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false", **pool.env}
    return ProcessSpec(
        name=name,
        args=tuple(args),
        secrets=_secrets(secrets),
        env=env,
        num_cpus=pool.num_ranks * (pool.cpus or 1),
        num_gpus=pool.num_ranks * pool.gpus,
    )


def threads_of(config: ClusterConfig, pool: PoolConfig, num_cores: int | None) -> int:
    """Of each rank. `num_cores`: of the machine that all ranks share; None: each has those that are set aside."""
    if pool.cpus is not None:
        return pool.cpus
    return 1 if num_cores is None else max(1, num_cores // max(1, config.num_ranks))


def check_startable(config: ClusterConfig) -> None:
    """Raises ConfigError where only Kubernetes could do it."""
    for name, pool in config.pools.by_name().items():
        if pool.nodes > 1:
            raise ConfigError(
                f"pools.{name}.nodes is {pool.nodes}: `cluster up` has all ranks of a worker on one node (`cluster "
                "render k8s` is for more); leave it out"
            )


def _secrets(by_option: dict[str, bytes | None]) -> Secrets:
    return Secrets({option: content for option, content in by_option.items() if content is not None})
