"""Manifests against Kubernetes' own schemas, which a package carries, and ours of two kinds that are no part of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
from typer.testing import CliRunner

from splitserve import cli
from splitserve.core.errors import ConfigError
from splitserve.deploy.config import load_config, parse_config
from splitserve.deploy.kubernetes import manifests, render

EXAMPLE = Path(__file__).parents[3] / "examples" / "cluster" / "kubernetes.yaml"
CUSTOM = json.loads(Path(__file__).with_name("custom_schemas.json").read_text())
VERSIONS = ("1.30", "1.37")
SEVERAL_NODES = b"""
kubernetes: {image: i:1, secret: s}
pools:
  prefill: {pp_size: 4, tp_size: 2, nodes: 2, gpus: 1, cpus: 3, memory: 10Gi}
  decode: {replicas: 3, env: {A: b}}
"""


def check(manifest: dict[str, Any]) -> None:
    """Validate strictly: a field that the schema lacks is an error, too."""
    if manifest["kind"] not in CUSTOM:
        for version in VERSIONS:
            kubernetes_validate.validate(manifest, version, strict=True)
        return
    jsonschema.validate(manifest, {**CUSTOM[manifest["kind"]], "definitions": CUSTOM["definitions"]})
    parts = manifest["spec"].get("leaderWorkerTemplate", {})
    for template in (parts[name] for name in ("leaderTemplate", "workerTemplate") if name in parts):
        spec = {"selector": {"matchLabels": template["metadata"]["labels"]}, "template": template}
        check({"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "n"}, "spec": spec})


def found(text: bytes, kind: str, name: str) -> dict[str, Any]:
    return next(m for m in manifests(parse_config(text)) if (m["kind"], m["metadata"]["name"]) == (kind, name))


def container(template: dict[str, Any]) -> dict[str, Any]:
    return template["spec"]["containers"][0]


@pytest.mark.parametrize("config", [load_config(EXAMPLE), parse_config(SEVERAL_NODES)], ids=["example", "several"])
def test_what_is_printed_is_good_by_the_schemas(config):
    printed = list(yaml.safe_load_all(render(config)))
    assert printed == json.loads(json.dumps(manifests(config)))
    kinds = {manifest["kind"] for manifest in printed}
    assert {"Deployment", "Service", "PodDisruptionBudget", "ServiceMonitor"} <= kinds
    for manifest in printed:
        check(manifest)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("spec", "replicas"), "two"),
        (("spec", "replica"), 2),
        (("spec", "leaderWorkerTemplate", "restartPolicy"), "Never"),
        (("spec", "leaderWorkerTemplate", "leaderTemplate", "spec", "containers", 0, "livenessProb"), {}),
    ],
)
def test_the_schemas_find_what_is_wrong(path, value):
    """Else nothing would be proven by passing them."""
    manifest = found(SEVERAL_NODES, "LeaderWorkerSet", "splitserve-prefill")
    *way, last = path
    part = manifest
    for key in way:
        part = part[key]
    part[last] = value
    with pytest.raises((jsonschema.ValidationError, kubernetes_validate.ValidationError)):
        check(manifest)


def test_a_worker_in_several_pods_is_a_set_whose_leader_answers():
    manifest = found(SEVERAL_NODES, "LeaderWorkerSet", "splitserve-prefill")
    parts = manifest["spec"]["leaderWorkerTemplate"]
    assert parts["size"] == 2
    leader, other = container(parts["leaderTemplate"]), container(parts["workerTemplate"])
    assert leader["args"] == other["args"]
    words = " ".join(leader["args"])
    assert "--tp-size 2 --pp-size 4" in words
    assert "--nnodes 2 --node-rank $(LWS_WORKER_INDEX) --dist-init-addr $(LWS_LEADER_ADDRESS):20000" in words
    # Half of eight ranks.
    assert leader["resources"]["limits"] == {"memory": "10Gi", "nvidia.com/gpu": "4"}
    assert leader["resources"]["requests"]["cpu"] == "12"
    # It waits for the others first, and then all load.
    alone = container(found(SEVERAL_NODES, "Deployment", "splitserve-decode")["spec"]["template"])
    assert leader["startupProbe"]["failureThreshold"] == 2 * alone["startupProbe"]["failureThreshold"]
    assert "startupProbe" not in other
    for kind in ("Service", "PodDisruptionBudget"):
        spec = found(SEVERAL_NODES, kind, "splitserve-prefill")["spec"]
        labels = spec["selector"] if kind == "Service" else spec["selector"]["matchLabels"]
        assert labels["leaderworkerset.sigs.k8s.io/worker-index"] == "0"


def test_only_a_worker_that_must_be_restarted_is_killed():
    """/health is 503 while memory is released, or a change of role or weights is in progress."""
    alone = found(SEVERAL_NODES, "Deployment", "splitserve-decode")["spec"]["template"]
    group = found(SEVERAL_NODES, "LeaderWorkerSet", "splitserve-prefill")["spec"]["leaderWorkerTemplate"]
    for worker in (container(alone), container(group["leaderTemplate"])):
        probes = {key: probe["httpGet"]["path"] for key, probe in worker.items() if key.endswith("Probe")}
        assert probes == {"startupProbe": "/health", "livenessProbe": "/live", "readinessProbe": "/health"}


def test_selectors_find_the_pods_they_are_for():
    all_manifests = manifests(load_config(EXAMPLE))
    pods = {
        m["metadata"]["name"]: m["spec"]["template"]["metadata"]["labels"]
        for m in all_manifests
        if "template" in m["spec"]
    }
    meant = {"chat": "chat-router"}
    for manifest in (m for m in all_manifests if m["kind"] in ("Service", "PodDisruptionBudget")):
        name, selector = manifest["metadata"]["name"], manifest["spec"]["selector"]
        labels = selector.get("matchLabels", selector).items()
        assert [pod for pod, has in pods.items() if labels <= has.items()] == [meant.get(name, name)]
    monitor = next(m for m in all_manifests if m["kind"] == "ServiceMonitor")["spec"]["selector"]
    services = [m for m in all_manifests if m["kind"] == "Service"]
    watched = {
        s["metadata"]["name"]
        for s in services
        if monitor["matchLabels"].items() <= s["metadata"]["labels"].items()
        and s["metadata"]["labels"]["app.kubernetes.io/component"] in monitor["matchExpressions"][0]["values"]
    }
    assert watched == {"chat-router", "chat-prefill", "chat-decode"}


def test_workers_reach_a_router_that_waits_for_them():
    """Its readiness is a proven way through workers, so what they use must not wait for that."""
    registry = next(
        m for m in manifests(load_config(EXAMPLE)) if m["metadata"]["name"] == "chat-router" and m["kind"] == "Service"
    )
    assert registry["spec"]["publishNotReadyAddresses"] is True
    prefill = next(m for m in manifests(load_config(EXAMPLE)) if m["metadata"]["name"] == "chat-prefill")
    args = container(prefill["spec"]["template"])["args"]
    assert args[args.index("--router") + 1] == f"http://chat-router:{registry['spec']['ports'][0]['port']}"


def test_a_pod_that_ends_drains_and_has_the_time_for_it():
    pod = next(m for m in manifests(load_config(EXAMPLE)) if m["metadata"]["name"] == "chat-decode")["spec"][
        "template"
    ]["spec"]
    hook = container({"spec": pod})["lifecycle"]["preStop"]["exec"]["command"]
    assert hook[:2] == ["sh", "-c"]
    assert hook[2].startswith(
        "splitserve cluster drain --router http://chat-router:8000 --timeout 300.0 --force --migrate "
    )
    assert '"http://$POD_IP:30000"' in hook[2]
    assert pod["terminationGracePeriodSeconds"] > 2 * 300


def test_secrets_are_named_and_never_written():
    text = render(load_config(EXAMPLE))
    assert "secretName: chat" in text
    # Keys of the secret, as files; a worker gets one key for the router and not the list of them.
    pods = [m["spec"]["template"]["spec"] for m in manifests(load_config(EXAMPLE)) if m["kind"] == "Deployment"]
    keys = {
        p["containers"][0]["name"]: {i["key"] for v in p["volumes"] if "secret" in v for i in v["secret"]["items"]}
        for p in pods
    }
    assert keys == {"router": {"clients", "operators", "workers"}, "worker": {"cluster-token", "router-key", "workers"}}


def test_pods_go_where_the_nodes_let_them_and_run_as_whom_the_file_says():
    taint = {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}
    given = {"tolerations": [taint], "pod_security_context": {"runAsUser": 1000, "fsGroup": 1000}}
    config = parse_config(json.dumps({"kubernetes": {"image": "i", "secret": "s", **given}}).encode())
    pods = {}
    for manifest in manifests(config):
        check(manifest)
        if manifest["kind"] == "Deployment":
            pods[manifest["metadata"]["name"]] = manifest["spec"]["template"]["spec"]
    assert {name: pod.get("tolerations") for name, pod in pods.items()} == {
        "splitserve-router": None,
        "splitserve-prefill": [taint],
        "splitserve-decode": [taint],
    }
    # Else an image with a user of its own could not read its secrets, which are root's alone.
    assert all(pod["securityContext"] == given["pod_security_context"] for pod in pods.values())


@pytest.mark.parametrize("field", ["image", "secret"])
def test_what_kubernetes_must_know_is_asked_for(field):
    given = {"image": "i", "secret": "s", field: ""}
    with pytest.raises(ConfigError, match=rf"kubernetes\.{field} is missing"):
        render(parse_config(json.dumps({"kubernetes": given}).encode()))


@pytest.mark.parametrize(
    "part",
    [
        {"router": {"args": ["--ssl-certfile", "c.pem", "--ssl-keyfile", "k.pem"]}},
        {"worker_args": ["--ssl-certfile=c.pem", "--ssl-keyfile=k.pem"]},
        {"pools": {"colocated": {"args": ["--ssl-certfile", "c.pem", "--ssl-keyfile", "k.pem"]}}},
    ],
)
def test_tls_is_rejected_because_probes_and_workers_would_use_http(part):
    with pytest.raises(ConfigError, match="the manifests have no TLS"):
        render(parse_config(json.dumps({"kubernetes": {"image": "i", "secret": "s"}} | part).encode()))


def test_the_command_prints_it(tmp_path):
    (tmp_path / "c.yaml").write_bytes(SEVERAL_NODES)
    done = CliRunner().invoke(cli.app, ["cluster", "render", "k8s", str(tmp_path / "c.yaml")])
    assert done.exit_code == 0
    assert "LeaderWorkerSet" in done.stdout
    assert done.stderr == ""


def test_serve_takes_what_the_pods_of_a_set_are_told(monkeypatch, tmp_path):
    """With the variables filled in as Kubernetes and the LeaderWorkerSet do."""
    told = []
    monkeypatch.setattr("splitserve.ranks.node_process.run_node", lambda config, options: told.append(config) or 0)
    template = found(SEVERAL_NODES, "LeaderWorkerSet", "splitserve-prefill")["spec"]["leaderWorkerTemplate"]
    args = container(template["workerTemplate"])["args"]
    token = tmp_path / "cluster-token"
    token.write_text("0123456789abcdef")
    token.chmod(0o600)
    values = {"$(POD_IP)": "127.0.0.2", "$(LWS_WORKER_INDEX)": "1", "$(LWS_LEADER_ADDRESS)": "127.0.0.1"}
    words = [word.replace("/etc/splitserve/cluster-token", str(token)) for word in args]
    for name, value in values.items():
        words = [word.replace(name, value) for word in words]
    done = CliRunner().invoke(cli.app, words)
    assert done.exit_code == 0, done.output
    (config,) = told
    assert (config.parallel.nnodes, config.parallel.node_rank) == (2, 1)
    assert config.parallel.dist_init_addr == "127.0.0.1:20000"
    assert config.parallel.node_host == config.disaggregation.host == "127.0.0.2"
