"""Kubernetes manifests for a CONFIG.yaml. Kubernetes takes the place of the supervisor.

There is a router (Deployment) behind a Service for clients and a Service for workers. Workers must reach the router
before it is ready, because it is ready once it has proven a path through them. Workers are Deployments, or
LeaderWorkerSets if one worker has several pods. Each pool has a headless Service, for metrics, and a
PodDisruptionBudget.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import yaml  # type: ignore[import-untyped]

from splitserve.core.errors import ConfigError
from splitserve.deploy.config import ROUTER, ClusterConfig, PoolConfig
from splitserve.deploy.pods import ROUTER_PORT, WORKER_PORT, router_pod, worker_pod

Manifest = dict[str, Any]
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
