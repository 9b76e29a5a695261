"""CONFIG.yaml: description of a cluster, the same for this machine, for Ray and for Kubernetes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any

import msgspec
import yaml  # type: ignore[import-untyped]

from splitserve.core.config import LOG_FORMATS, LOG_LEVELS
from splitserve.core.errors import ConfigError
from splitserve.core.machine import MAX_THREADS
from splitserve.core.options import Config, option, problems_of
from splitserve.core.parallel import misfit
from splitserve.core.request import DisaggregationMode

MAX_REPLICAS = 1024
ROUTER = "router"
# Names of the pools in the file; null is a reserved word of YAML.
MODES = {
    "prefill": DisaggregationMode.PREFILL,
    "decode": DisaggregationMode.DECODE,
    "colocated": DisaggregationMode.NULL,
}
# Name of a mode's pool.
POOL_NAMES = {mode: name for name, mode in MODES.items()}
_NUMBERS_FOR_TEXT = tuple(f"Expected `str`, got `{kind}`" for kind in ("int", "float", "bool"))
_NAME = re.compile(r"[a-z]([a-z0-9-]{0,30}[a-z0-9])?")
# Options that follow from the rest of the file, by process; and the field to set instead.
OWN_WORKER_OPTIONS = {
    "--disaggregation-mode": "pools.NAME",
    "--host": "nothing: it is the node's address",
    "--port": "nothing: workers take free ports",
    "--disaggregation-host": "nothing: it is the node's address",
    "--disaggregation-bootstrap-port": "nothing: workers take free ports",
    "--router": "nothing: workers register with this cluster's router",
    "--join": "nothing: workers register with this cluster's router",
    "--tp-size": "pools.NAME.tp_size",
    "--pp-size": "pools.NAME.pp_size",
    "--dp-size": "pools.NAME.dp_size",
    "--nnodes": "pools.NAME.nodes",
    "--node-rank": "nothing: it is the pod's place in its set",
    "--dist-init-addr": "nothing: it is the leader's address",
    "--threads": "pools.NAME.cpus",
    "--cluster-token-file": "cluster_token_file",
    "--router-key-file": "keys.operators",
    "--router-certificate": "nothing: it is that of --ssl-certfile in router.args",
    "--api-key-file": "keys.workers",
    "--drain-timeout": "supervision.drain_timeout",
    "--load-timeout": "supervision.load_timeout",
    "--ready-file": "nothing: the supervisor has its own",
    "--exit-with-parent": "nothing: it is so",
}
OWN_ROUTER_OPTIONS = {
    "--host": "router.host",
    "--port": "router.port",
    "--api-key-file": "keys.clients",
    "--operator-key-file": "keys.operators",
    "--worker-key-file": "keys.workers",
    "--drain-timeout": "supervision.drain_timeout",
    "--ready-file": "nothing: the supervisor has its own",
    "--exit-with-parent": "nothing: it is so",
}


class PoolConfig(Config, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Pool of equal workers."""

    replicas: int = option(1, "Number of workers.", ge=0, le=MAX_REPLICAS)
    tp_size: int = option(1, "Tensor parallel ranks of a worker. Those of one stage are on one node.", ge=1)
    pp_size: int = option(1, "Pipeline stages of a worker.", ge=1)
    dp_size: int = option(1, "Data parallel ranks of a worker.", ge=1)
    nodes: int = option(
        1, "On Kubernetes: pods of one worker. Each has the same number of whole pipeline stages.", ge=1
    )
    cpus: int | None = option(
        None,
        "Threads per rank, and CPUs that Ray and Kubernetes reserve for it. Default: a fair share of this machine, "
        "otherwise 1.",
        ge=1,
        le=MAX_THREADS,
    )
    gpus: int = option(0, "On Ray and Kubernetes: GPUs per rank. 0: it computes on the CPU.", ge=0)
    memory: str | None = option(None, "On Kubernetes: memory of a pod, such as 64Gi.")
    args: tuple[str, ...] = option((), "Options of `splitserve serve`, after those of `worker_args`.")
    env: dict[str, str] = option({}, "Environment variables of the workers.")


class PoolsConfig(Config, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Pools of prefill and decode, or of colocated workers, or all three. A missing pool cannot be scaled up later."""

    prefill: PoolConfig | None = None
    decode: PoolConfig | None = None
    colocated: PoolConfig | None = None

    def by_name(self) -> dict[str, PoolConfig]:
        return {name: pool for name, pool in msgspec.structs.asdict(self).items() if pool is not None}


class RouterConfig(Config, frozen=True, kw_only=True, forbid_unknown_fields=True):
    host: str | None = option(None, "Address to listen on. Default: loopback on this machine, the node's on Ray.")
    port: int = option(8000, "Port to listen on. 0: any free one.", ge=0, le=65535)
    args: tuple[str, ...] = option((), "Options of `splitserve router`.")


class KeysConfig(Config, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Files with API keys, relative to CONFIG.yaml; see docs/access.md."""

    clients: str | None = option(None, "File with the keys of clients of the router.")
    operators: str | None = option(
        None,
        "File with the keys of operators of the router. Workers and supervisor present the first one. Default: "
        "`clients`.",
    )
    workers: str | None = option(None, "File with the keys for the workers. The router presents the first one.")


class ScaleDown(StrEnum):
    # Running requests finish on a worker that is to be removed, as far as the drain timeout allows.
    COMPLETE = "complete"
    # Running requests continue on other workers at once.
    MIGRATE = "migrate"


class SupervisionConfig(Config, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Supervision of the processes."""

    max_failed_starts: int | None = option(
        None,
        "Failed starts of one process in a row after which the cluster ends with the reason. A start has failed if the "
        "process ends before it has served. Default: no limit; `up`: 3.",
        ge=1,
    )
    load_timeout: float = option(900.0, "Seconds a process may take to start.")
    # Running requests that are left then move to other workers.
    drain_timeout: float = option(120.0, "Seconds that running requests may take to finish on shutdown.")
    scale_down: ScaleDown = option(
        ScaleDown.COMPLETE,
        "Requests on a worker that is to be removed. complete: they finish within the drain timeout. migrate: they "
        "continue on other workers at once.",
    )
    backoff: float = option(1.0, "Seconds from the first failure to the next start. They double with each failure.")
    max_backoff: float = option(60.0, "Longest pause between two starts, seconds.")
    forgive_after: float = option(60.0, "Seconds of serving after which the failures of a process are forgotten.")
    restart: bool = option(
        True, "Start a process again that ends. Off: it stays failed, and the router detects its end by itself."
    )


class KubernetesConfig(Config, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of `splitserve cluster render k8s` only."""

    image: str = option("", "Image of the pods.")
    namespace: str = option("default", "Namespace of all objects.")
    secret: str = option(
        "",
        "Secret with the key `cluster-token`, and with `clients`, `operators` and `workers` if `keys` has these "
        "fields. With `operators` it also has `router-key`: the first operator key, which workers present.",
    )
    model_claim: str | None = option(
        None,
        "Claim that all pods mount read-only at `model_path`. Default: the model is in the image, or downloaded.",
    )
    model_path: str = option("/models", "Folder of the claim in the pods.")
    node_selector: dict[str, str] = option({}, "Node selector of the workers' pods.")
    tolerations: tuple[dict[str, Any], ...] = option((), "Tolerations of the workers' pods.")
    pod_security_context: dict[str, Any] = option(
        {}, "Security context of all pods. Only root can read secrets, so another user needs an fsGroup."
    )
    service_monitor: bool = option(True, "Render a ServiceMonitor for the Prometheus operator.")


class ClusterConfig(Config, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str = option("splitserve", "Name of the cluster: small letters, digits and -, a letter first, 32 at most.")
    model: str = option("smollm2", "Model of all workers.")
    cluster_token_file: str | None = option(None, "Token with which workers join. Default: a generated one.")
    pools: PoolsConfig = PoolsConfig(prefill=PoolConfig(), decode=PoolConfig())
    worker_args: tuple[str, ...] = option((), "Options of `splitserve serve` for every worker.")
    router: RouterConfig = RouterConfig()
    keys: KeysConfig = KeysConfig()
    supervision: SupervisionConfig = SupervisionConfig()
    kubernetes: KubernetesConfig = KubernetesConfig()
    log_level: str = option("info", "Lowest level of log lines.", choices=LOG_LEVELS)
    log_format: str = option(
        "text", "Format of log lines: text, or one JSON object per line for log collectors.", choices=LOG_FORMATS
    )

    def ranks_of(self, pool: PoolConfig) -> int:
        """Return the ranks of one worker. With data parallel attention its `tp_size` counts those of all schedulers."""
        shares = "--enable-dp-attention" in (*self.worker_args, *pool.args) and pool.tp_size > 1
        return pool.tp_size * pool.pp_size * (1 if shares else pool.dp_size)

    @property
    def num_ranks(self) -> int:
        return sum(pool.replicas * self.ranks_of(pool) for pool in self.pools.by_name().values())


def load_config(path: Path) -> ClusterConfig:
    """Read a config. Raises ConfigError, which names the place in the file and the remedy."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; docs/cluster.md describes the file") from None
    config = parse_config(raw, str(path))
    keys = msgspec.structs.asdict(config.keys).items()
    return msgspec.structs.replace(
        config,
        cluster_token_file=_beside(path, config.cluster_token_file),
        keys=KeysConfig(**{name: _beside(path, file) for name, file in keys}),
    )


def parse_config(raw: bytes, source: str = "CONFIG.yaml") -> ClusterConfig:
    """Parse a config. Paths stay unresolved. Raises ConfigError."""
    content = load_yaml(raw, source, "docs/cluster.md describes the file")
    if not content:
        raise ConfigError(f"{source}: the file is empty: name at least the model, such as `model: smollm2`")
    try:
        config = msgspec.convert(content, ClusterConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{source}: {_readable(str(error))}") from None
    for found, problem in problems_of(config):
        raise ConfigError(f"{source}: {found.path}: {problem}")
    for where, ok, rule in _rules(config):
        if not ok:
            raise ConfigError(f"{source}: {where}: {rule}")
    return config


def _rules(config: ClusterConfig) -> list[tuple[str, bool, str]]:
    """Return the rules about several fields, each as field, whether it holds, and its text."""
    pools = config.pools.by_name()
    is_paired = ("prefill" in pools) == ("decode" in pools)
    missing = "decode" if "prefill" in pools else "prefill"
    rules = [
        ("name", bool(_NAME.fullmatch(config.name)), "small letters, digits and -, a letter first, 32 at most"),
        ("pools", bool(pools), f"name one at least: prefill and decode, or colocated; {_defaults('colocated')}"),
        ("pools", is_paired, f"prefill and decode need each other; {_defaults(missing)}"),
        *_replica_rules({name: pool.replicas for name, pool in pools.items()}),
    ]
    rules += _option_rules("router.args", config.router.args, OWN_ROUTER_OPTIONS)
    rules += _option_rules("worker_args", config.worker_args, OWN_WORKER_OPTIONS)
    for name, pool in pools.items():
        problem = misfit(pool.tp_size, pool.pp_size, pool.nodes)
        rules.append((f"pools.{name}.nodes", problem is None, str(problem)))
        rules += _option_rules(f"pools.{name}.args", pool.args, OWN_WORKER_OPTIONS)
    return rules


def _replica_rules(replicas: Mapping[str, int]) -> list[tuple[str, bool, str]]:
    """Return the rules for replicas that can serve. `replicas`: by pool of this cluster."""
    prefill, decode = replicas.get("prefill", 0), replicas.get("decode", 0)
    needs_both = "prefill and decode need each other: give both replicas, or none of them"
    return [
        ("pools", (prefill > 0) == (decode > 0), needs_both),
        ("pools", any(replicas.values()), "one worker at least: replicas of 1 or more"),
    ]


def _defaults(pool: str) -> str:
    """Return the hint how to write a pool with all defaults: in YAML, `decode:` without a value is no pool."""
    return f"one with all defaults is `{pool}: {{}}`"


def _option_rules(where: str, args: tuple[str, ...], own: dict[str, str]) -> list[tuple[str, bool, str]]:
    names = [word.partition("=")[0] for word in args]
    joined = (name for name in names if name.startswith("--") and " " in name)
    together = [(where, False, f"{word!r} is one word; write the option and its value as two") for word in joined]
    return together + [(where, False, f"{name} cannot be set here; set {own[name]}") for name in names if name in own]


def _readable(problem: str) -> str:
    """Move the path to the front of msgspec's message, which ends with " - at `$.pools[...].tp_size`"."""
    what, _, where = problem.partition(" - at ")
    if "unknown field" in what:
        what += "; docs/cluster.md has those there are"
    elif what in _NUMBERS_FOR_TEXT:
        what += "; put it in quotes"
    elif what.startswith("Invalid enum value"):
        # Of all fields, only this one has an enum.
        what += f"; choose one of {', '.join(ScaleDown)}"
    elif what == "Expected `array`, got `str`":
        what += "; write a list: [--option, value]"
    return f"{where.replace('`', '').replace('$.', '')}: {what}" if where else what


def _beside(config_path: Path, file: str | None) -> str | None:
    return None if file is None else str(config_path.parent / file)


def check_replicas(config: ClusterConfig, replicas: dict[str, Any], now: Mapping[str, int]) -> dict[str, int]:
    """Return the replicas after `scale`. `now`: current replicas by pool. Raises ConfigError."""
    pools = config.pools.by_name()
    for name, count in replicas.items():
        if name not in pools:
            raise ConfigError(f"there is no pool {name!r} in this cluster: {', '.join(pools)}")
        if not isinstance(count, int) or not 0 <= count <= MAX_REPLICAS:
            raise ConfigError(f"{name}={count}: give a number in [0, {MAX_REPLICAS}]")
    after = {**now, **replicas}
    for _, ok, rule in _replica_rules(after):
        if not ok:
            wanted = ", ".join(f"{count} {name}" for name, count in after.items())
            raise ConfigError(f"nothing could be served with {wanted}: {rule}; `splitserve cluster down` ends all")
    return replicas


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    """Loader that rejects a mapping with a key twice."""

    def compose_mapping_node(self, anchor: Any) -> Any:
        node = super().compose_mapping_node(anchor)
        seen = set()
        for key, _ in node.value:
            # The tag distinguishes the number 1 from the text "1".
            identity = (key.tag, key.value) if isinstance(key, yaml.ScalarNode) else id(key)
            if identity in seen:
                line = key.start_mark.line + 1
                raise ConfigError(f"{self.name}, line {line}: the key {key.value!r} occurs twice; keep one of them")
            seen.add(identity)
        return node


def load_yaml(raw: bytes, source: str, remedy: str) -> Any:
    """Return the content of a YAML document. Raises ConfigError, which names `source` and, for bad syntax, `remedy`."""
    try:
        loader = _Loader(raw)
        loader.name = source
        return loader.get_single_data()
    # ValueError: a date or number that is none. RecursionError: too deeply nested.
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"{source}: it is no YAML: {' '.join(str(error).split())}: {remedy}") from None
