"""Kubernetes manifests for a CONFIG.yaml, from the template `kubernetes.yaml.j2`. Kubernetes replaces the supervisor.

There is a router (Deployment) behind a Service for clients and a Service for workers. Workers must reach the router
before it is ready, because it is ready once it has proven a path through them. Workers are Deployments, or
LeaderWorkerSets if one worker has several pods. Each pool has a headless Service, for metrics, and a
PodDisruptionBudget.
"""

from __future__ import annotations

import json
import math
import shlex
from pathlib import Path
from typing import Any

import jinja2
import yaml  # type: ignore[import-untyped]
from markupsafe import Markup

from splitserve.core.errors import ConfigError
from splitserve.deploy.commands import router_args, threads_of, worker_args
from splitserve.deploy.config import ClusterConfig, PoolConfig, ScaleDown

Manifest = dict[str, Any]
ROUTER_PORT, WORKER_PORT, BOOTSTRAP_PORT, GROUP_PORT = 8000, 30000, 8998, 20000
_TEMPLATE = Path(__file__).with_name("kubernetes.yaml.j2")
_SECRETS = "/etc/splitserve"
# Seconds from the order to end a router until it ends.
_LEAVE_SECONDS = 5
# Seconds beyond the drain timeout until a pod is killed.
_END_MARGIN = 30
_STARTUP_PERIOD = 5


def render(config: ClusterConfig) -> str:
    """Return the manifests, after a comment with their origin. Raises ConfigError."""
    for field in ("image", "secret"):
        if not getattr(config.kubernetes, field):
            raise ConfigError(f"kubernetes.{field} is missing: docs/cluster.md describes it")
    pools = {f"pools.{name}.args": pool.args for name, pool in config.pools.by_name().items()}
    for source, args in {"router.args": config.router.args, "worker_args": config.worker_args, **pools}.items():
        if any(word.startswith(("--ssl-", "--worker-ssl-")) for word in args):
            raise ConfigError(f"{source}: the manifests have no TLS: leave out --ssl options, end TLS at an ingress")
    text: str = yaml.safe_dump_all(manifests(config), sort_keys=False, width=120)
    return (
        f"# Made by `splitserve cluster render k8s` for the cluster {config.name}: change its file, not this.\n{text}"
    )


def manifests(config: ClusterConfig) -> list[Manifest]:
    # `finalize` writes each value as JSON, which is YAML; it leaves the text of macros, which is Markup, as it is.
    environment = jinja2.Environment(
        autoescape=True, finalize=_as_json, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    pools = config.pools.by_name()
    text = environment.from_string(_TEMPLATE.read_text()).render(
        name=config.name,
        k8s=config.kubernetes,
        labels=lambda component: {
            "app.kubernetes.io/name": "splitserve",
            "app.kubernetes.io/instance": config.name,
            "app.kubernetes.io/component": component,
        },
        clients_port=config.router.port or ROUTER_PORT,
        router_port=ROUTER_PORT,
        worker_port=WORKER_PORT,
        bootstrap_port=BOOTSTRAP_PORT,
        secrets_path=_SECRETS,
        leave_seconds=_LEAVE_SECONDS,
        leave_command=_leave_command(config),
        startup_period=_STARTUP_PERIOD,
        router=_router_values(config),
        workers=[_worker_values(config, name, pool) for name, pool in pools.items()],
        pools=list(pools),
    )
    return list(yaml.safe_load_all(text))


def _as_json(value: object) -> Markup:
    return value if isinstance(value, Markup) else Markup(json.dumps(value, ensure_ascii=False))


def _router_values(config: ClusterConfig) -> dict[str, Any]:
    keys = config.keys
    files = {
        "--api-key-file": ("clients", keys.clients),
        "--operator-key-file": ("operators", keys.operators),
        "--worker-key-file": ("workers", keys.workers),
    }
    secrets = {option: key for option, (key, file) in files.items() if file is not None}
    args = [*router_args(config), "--host", "0.0.0.0", "--port", str(ROUTER_PORT), *_secret_options(secrets)]
    grace = config.supervision.drain_timeout + _LEAVE_SECONDS + _END_MARGIN
    return {"args": args, "secrets": secrets, "grace": math.ceil(grace)}


def _worker_values(config: ClusterConfig, name: str, pool: PoolConfig) -> dict[str, Any]:
    """Return the values of the `pool.nodes` pods of a worker. The leader serves HTTP."""
    threads = threads_of(config, pool, None)
    secrets = {"--cluster-token-file": "cluster-token"}
    if config.keys.operators is not None:
        secrets["--router-key-file"] = "router-key"
    if config.keys.workers is not None:
        secrets["--api-key-file"] = "workers"
    args = [*worker_args(config, name, threads), "--host", "$(POD_IP)", "--port", str(WORKER_PORT)]
    args += ["--disaggregation-bootstrap-port", str(BOOTSTRAP_PORT), "--router", _router_url(config)]
    if pool.nodes > 1:
        # Variables that the LeaderWorkerSet sets in its pods; the leader is node 0.
        args += ["--nnodes", str(pool.nodes), "--node-rank", "$(LWS_WORKER_INDEX)"]
        args += ["--dist-init-addr", f"$(LWS_LEADER_ADDRESS):{GROUP_PORT}"]
    # Of one pod.
    num_ranks = config.ranks_of(pool) // pool.nodes
    num_probes = math.ceil(config.supervision.load_timeout / _STARTUP_PERIOD)
    return {
        "pool": name,
        "replicas": pool.replicas,
        "nodes": pool.nodes,
        "args": [*args, *_secret_options(secrets)],
        "secrets": secrets,
        "env": {"OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false", **pool.env},
        "cpus": num_ranks * threads,
        "memory": pool.memory,
        "gpus": num_ranks * pool.gpus,
        # A leader has the time twice: for the other nodes to connect, and then for all to load.
        "startup_probes": num_probes * (2 if pool.nodes > 1 else 1),
        # The drain timeout counts twice: for the hook, and for the process itself if the router does not answer.
        "grace": math.ceil(2 * config.supervision.drain_timeout + _END_MARGIN),
    }


def _leave_command(config: ClusterConfig) -> str:
    """Return the command to run before SIGTERM.

    It makes the router send no new requests. Running ones finish on this worker or continue elsewhere.
    """
    words = ["splitserve", "cluster", "drain", "--router", _router_url(config)]
    words += ["--timeout", str(config.supervision.drain_timeout), "--force"]
    if config.supervision.scale_down is ScaleDown.MIGRATE:
        words.append("--migrate")
    if config.keys.operators is not None:
        words += ["--router-key-file", f"{_SECRETS}/router-key"]
    return f'{shlex.join(words)} "http://$POD_IP:{WORKER_PORT}"'


def _router_url(config: ClusterConfig) -> str:
    return f"http://{config.name}-router:{ROUTER_PORT}"


def _secret_options(keys: dict[str, str]) -> list[str]:
    return [word for option, key in keys.items() for word in (option, f"{_SECRETS}/{key}")]
