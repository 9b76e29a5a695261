"""Pods of a cluster in Kubernetes: command, secrets, probes, and shutdown."""

from __future__ import annotations

import copy
import math
import shlex
from typing import Any

from splitserve.deploy.commands import router_args, threads_of, worker_args
from splitserve.deploy.config import ClusterConfig, PoolConfig, ScaleDown

ROUTER_PORT, WORKER_PORT, BOOTSTRAP_PORT, GROUP_PORT = 8000, 30000, 8998, 20000
_SECRETS = "/etc/splitserve"
# Seconds from the order to end a router until it ends. Meanwhile Services stop sending new requests to it.
_LEAVE_SECONDS = 5
# Seconds beyond the drain timeout until a pod is killed.
_END_MARGIN = 30
_STARTUP_PERIOD = 5

Manifest = dict[str, Any]


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
        # These are variables for every Service, and may have the names of our own variables.
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
