"""Kubernetes manifests for a CONFIG.yaml. Kubernetes takes the place of the supervisor.

There is a router (Deployment) behind a Service for clients and a Service for workers. Workers must reach the router
before it is ready, because it is ready once it has proven a path through them. Workers are Deployments, or
LeaderWorkerSets if one worker has several pods. Each pool has a headless Service, for metrics, and a
PodDisruptionBudget.
"""

from __future__ import annotations

import copy
import math
import shlex
from collections.abc import Iterator
from typing import Any

import yaml  # type: ignore[import-untyped]

from splitserve.core.errors import ConfigError
from splitserve.deploy.commands import router_args, threads_of, worker_args
from splitserve.deploy.config import ROUTER, ClusterConfig, PoolConfig, ScaleDown

Manifest = dict[str, Any]
ROUTER_PORT, WORKER_PORT, BOOTSTRAP_PORT, GROUP_PORT = 8000, 30000, 8998, 20000
_SECRETS = "/etc/splitserve"
# Seconds from the order to end a router until it ends. Meanwhile Services stop sending new requests to it.
_LEAVE_SECONDS = 5
# Seconds beyond the drain timeout until a pod is killed.
_END_MARGIN = 30
_STARTUP_PERIOD = 5
_LWS_INDEX = "leaderworkerset.sigs.k8s.io/worker-index"


def render(config: ClusterConfig) -> str:
    """Return the manifests, after a comment with their origin. Raises ConfigError."""
    for field in ("image", "secret"):
        if not getattr(config.kubernetes, field):
            raise ConfigError(f"kubernetes.{field} is missing: docs/cluster.md says what it is")
    text: str = yaml.safe_dump_all(manifests(config), sort_keys=False, width=120)
    return (
        f"# Made by `splitserve cluster render k8s` for the cluster {config.name}: change its file, not this.\n{text}"
    )


def manifests(config: ClusterConfig) -> list[Manifest]:
    found = [_router_deployment(config), *_router_services(config)]
    for name, pool in config.pools.by_name().items():
        found += _pool_manifests(config, name, pool)
    if config.kubernetes.service_monitor:
        found.append(_service_monitor(config))
    return found


def _router_deployment(config: ClusterConfig) -> Manifest:
    spec = {
        "replicas": 1,
        # The next router is ready, and knows the workers, before this one ends.
        "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}},
        "selector": {"matchLabels": _labels(config, ROUTER)},
        "template": {"metadata": {"labels": _labels(config, ROUTER)}, "spec": router_pod(config)},
    }
    return _object(config, "apps/v1", "Deployment", f"{config.name}-router", ROUTER, spec)


def _router_services(config: ClusterConfig) -> Iterator[Manifest]:
    labels = _labels(config, ROUTER)
    port = {"name": "http", "port": ROUTER_PORT, "targetPort": "http"}
    clients = {"selector": labels, "ports": [{**port, "port": config.router.port or ROUTER_PORT}]}
    yield _object(config, "v1", "Service", config.name, "clients", clients)
    workers = {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": labels, "ports": [port]}
    yield _object(config, "v1", "Service", f"{config.name}-router", ROUTER, workers)


def _pool_manifests(config: ClusterConfig, name: str, pool: PoolConfig) -> Iterator[Manifest]:
    full_name, labels = f"{config.name}-{name}", _labels(config, name)
    # If a worker has several pods, select the one that serves HTTP.
    heads = labels if pool.nodes == 1 else {**labels, _LWS_INDEX: "0"}
    if pool.nodes == 1:
        yield _object(config, "apps/v1", "Deployment", full_name, name, _deployment(config, name, pool))
    else:
        set_spec = _leader_worker_set(config, name, pool)
        yield _object(config, "leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet", full_name, name, set_spec)
    port = {"name": "http", "port": WORKER_PORT, "targetPort": "http"}
    service = {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": heads, "ports": [port]}
    yield _object(config, "v1", "Service", full_name, name, service)
    budget = {"maxUnavailable": 1, "selector": {"matchLabels": heads}}
    yield _object(config, "policy/v1", "PodDisruptionBudget", full_name, name, budget)


def _deployment(config: ClusterConfig, name: str, pool: PoolConfig) -> Manifest:
    labels = _labels(config, name)
    return {
        "replicas": pool.replicas,
        # Each new worker replaces an old one, because there may be no spare GPUs.
        "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1}},
        "selector": {"matchLabels": labels},
        "template": {"metadata": {"labels": labels}, "spec": worker_pod(config, name, pool)},
    }


def _leader_worker_set(config: ClusterConfig, name: str, pool: PoolConfig) -> Manifest:
    metadata = {"labels": _labels(config, name)}
    return {
        "replicas": pool.replicas,
        "rolloutStrategy": {
            "type": "RollingUpdate",
            "rollingUpdateConfiguration": {"maxSurge": 0, "maxUnavailable": 1},
        },
        "leaderWorkerTemplate": {
            "size": pool.nodes,
            # The remaining ranks cannot continue after one is lost.
            "restartPolicy": "RecreateGroupOnPodRestart",
            "leaderTemplate": {"metadata": metadata, "spec": worker_pod(config, name, pool)},
            "workerTemplate": {"metadata": metadata, "spec": worker_pod(config, name, pool, is_leader=False)},
        },
    }


def _service_monitor(config: ClusterConfig) -> Manifest:
    pools = [ROUTER, *config.pools.by_name()]
    labels = {"app.kubernetes.io/name": "splitserve", "app.kubernetes.io/instance": config.name}
    # Exclude the clients' Service, which would list the router a second time.
    expression = {"key": "app.kubernetes.io/component", "operator": "In", "values": pools}
    spec = {
        "selector": {"matchLabels": labels, "matchExpressions": [expression]},
        "endpoints": [{"port": "http", "path": "/metrics", "interval": "15s"}],
    }
    return _object(config, "monitoring.coreos.com/v1", "ServiceMonitor", config.name, "metrics", spec)


def _object(config: ClusterConfig, version: str, kind: str, name: str, component: str, spec: Manifest) -> Manifest:
    metadata = {"name": name, "namespace": config.kubernetes.namespace, "labels": _labels(config, component)}
    return {"apiVersion": version, "kind": kind, "metadata": metadata, "spec": spec}


def _labels(config: ClusterConfig, component: str) -> dict[str, str]:
    return {
        "app.kubernetes.io/name": "splitserve",
        "app.kubernetes.io/instance": config.name,
        "app.kubernetes.io/component": component,
    }


def router_pod(config: ClusterConfig) -> Manifest:
    keys = config.keys
    files = {
        "--api-key-file": ("clients", keys.clients),
        "--operator-key-file": ("operators", keys.operators),
        "--worker-key-file": ("workers", keys.workers),
    }
    used = {option: key for option, (key, file) in files.items() if file is not None}
    args = [*router_args(config), "--host", "0.0.0.0", "--port", str(ROUTER_PORT), *_secret_options(used)]
    container = {
        **_container(config, "router", args, ROUTER_PORT),
        "livenessProbe": _probe("/health", period=10, failures=3),
        "readinessProbe": _probe("/ready", period=5, failures=2),
        "lifecycle": {"preStop": {"exec": {"command": ["sleep", str(_LEAVE_SECONDS)]}}},
        "resources": {"requests": {"cpu": "1", "memory": "1Gi"}},
    }
    grace = config.supervision.drain_timeout + _LEAVE_SECONDS + _END_MARGIN
    return _pod(config, container, list(used.values()), grace)


def worker_pod(config: ClusterConfig, name: str, pool: PoolConfig, *, is_leader: bool = True) -> Manifest:
    """Return one of the `pool.nodes` pods of a worker. The leader serves HTTP."""
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
    container = _container(config, "worker", [*args, *_secret_options(secrets)], WORKER_PORT)
    env = {"OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false", **pool.env}
    container["env"] = [
        {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        *({"name": key, "value": value} for key, value in env.items()),
    ]
    container["ports"].append({"name": "bootstrap", "containerPort": BOOTSTRAP_PORT})
    container["resources"] = _resources(pool, threads)
    if is_leader:
        container |= _worker_probes(config, pool)
        container["lifecycle"] = {"preStop": {"exec": {"command": ["sh", "-c", _leave_command(config)]}}}
    # The drain timeout counts twice: for the hook, and for the process itself if the router does not answer.
    grace = 2 * config.supervision.drain_timeout + _END_MARGIN
    pod = _pod(config, container, list(secrets.values()), grace)
    # Ranks and workers of one host transfer tensors in shared memory.
    pod["volumes"].append({"name": "shm", "emptyDir": {"medium": "Memory"}})
    container["volumeMounts"].append({"name": "shm", "mountPath": "/dev/shm"})
    if config.kubernetes.node_selector:
        pod["nodeSelector"] = dict(config.kubernetes.node_selector)
    if config.kubernetes.tolerations:
        # A copy, here and below: YAML would print references to objects that two pods share.
        pod["tolerations"] = copy.deepcopy(list(config.kubernetes.tolerations))
    return pod


def _worker_probes(config: ClusterConfig, pool: PoolConfig) -> Manifest:
    num_tries = math.ceil(config.supervision.load_timeout / _STARTUP_PERIOD)
    if pool.nodes > 1:
        # A leader has that time twice: for the other nodes to connect, and then for all to load.
        num_tries *= 2
    return {
        "startupProbe": _probe("/health", period=_STARTUP_PERIOD, failures=num_tries),
        "livenessProbe": _probe("/health", period=10, failures=6),
        "readinessProbe": _probe("/health", period=5, failures=2),
    }


def _leave_command(config: ClusterConfig) -> str:
    """Return the command to run before SIGTERM.

    It makes the router send no new requests. Running ones finish on this worker or continue elsewhere.
    """
    words = ["splitserve", "cluster", "drain", "--router", _router_url(config)]
    words += ["--timeout", str(config.supervision.drain_timeout)]
    if config.supervision.scale_down is ScaleDown.MIGRATE:
        words.append("--migrate")
    if config.keys.operators is not None:
        words += ["--router-key-file", f"{_SECRETS}/router-key"]
    return f'{shlex.join(words)} "http://$POD_IP:{WORKER_PORT}"'


def _router_url(config: ClusterConfig) -> str:
    return f"http://{config.name}-router:{ROUTER_PORT}"


def _container(config: ClusterConfig, name: str, args: list[str], port: int) -> Manifest:
    return {
        "name": name,
        "image": config.kubernetes.image,
        "command": ["splitserve"],
        "args": args,
        "ports": [{"name": "http", "containerPort": port}],
        "volumeMounts": [{"name": "secrets", "mountPath": _SECRETS, "readOnly": True}],
        "securityContext": {"allowPrivilegeEscalation": False},
    }


def _pod(config: ClusterConfig, container: Manifest, secret_keys: list[str], grace: float) -> Manifest:
    kubernetes = config.kubernetes
    items = [{"key": key, "path": key} for key in secret_keys]
    # Readable only by its user.
    volumes: list[Manifest] = [
        {"name": "secrets", "secret": {"secretName": kubernetes.secret, "defaultMode": 0o400, "items": items}}
    ]
    if not items:
        volumes, container["volumeMounts"] = [], []
    if kubernetes.model_claim is not None:
        claim = {"claimName": kubernetes.model_claim, "readOnly": True}
        volumes.append({"name": "models", "persistentVolumeClaim": claim})
        container["volumeMounts"].append({"name": "models", "mountPath": kubernetes.model_path, "readOnly": True})
    pod: Manifest = {
        "automountServiceAccountToken": False,
        # Service links set environment variables that may have the same names as those splitserve reads.
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": math.ceil(grace),
        "containers": [container],
        "volumes": volumes,
    }
    if kubernetes.pod_security_context:
        pod["securityContext"] = copy.deepcopy(kubernetes.pod_security_context)
    return pod


def _resources(pool: PoolConfig, threads: int) -> Manifest:
    num_ranks = pool.num_ranks // pool.nodes
    requests, limits = {"cpu": str(num_ranks * threads)}, {}
    if pool.memory is not None:
        requests["memory"] = limits["memory"] = pool.memory
    if pool.gpus:
        limits["nvidia.com/gpu"] = str(num_ranks * pool.gpus)
    return {"requests": requests, **({"limits": limits} if limits else {})}


def _secret_options(keys: dict[str, str]) -> list[str]:
    return [word for option, key in keys.items() for word in (option, f"{_SECRETS}/{key}")]


def _probe(path: str, *, period: int, failures: int) -> Manifest:
    return {
        "httpGet": {"path": path, "port": "http"},
        "periodSeconds": period,
        "timeoutSeconds": 5,
        "failureThreshold": failures,
    }
