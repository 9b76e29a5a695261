"""Settings that must be the same on all nodes of one worker, and the error text for differences. Pure."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from splitserve import __version__
from splitserve.core.config import WorkerConfig

# Settings of each node: its address and ports, its cores, its copy of the model (the weights themselves are compared).
_LOCAL = {
    "model.model",
    "model.threads",
    "model.cpu_affinity",
    "disaggregation.host",
    "disaggregation.bootstrap_port",
    "disaggregation.cluster_token",
    "disaggregation.transfer_options",
    "parallel.node_rank",
    "parallel.node_host",
    "parallel.dist_init_addr",
}
# Settings of node 0 alone, because the others answer no requests.
_OF_THE_FRONT_END = ("server", "kv_events")


def shared_settings(config: WorkerConfig, fingerprint: str) -> dict[str, str]:
    """Return the shared settings by name, as text. `fingerprint`: the model's."""
    found = {"version": __version__, "model": fingerprint}
    for part, values in msgspec.to_builtins(config).items():
        if part in _OF_THE_FRONT_END:
            continue
        if not isinstance(values, dict):
            found[part] = _text(values)
            continue
        found |= {f"{part}.{name}": _text(v) for name, v in values.items() if f"{part}.{name}" not in _LOCAL}
    return found


def difference(node_rank: int, theirs: dict[str, str], ours: dict[str, str]) -> str | None:
    """Return the differences between node 0, `ours`, and another node. None: there are none."""
    differing = [name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)]
    if not differing:
        return None
    said = [
        f"{_words(name)} is {ours.get(name, 'unknown')} on node 0 and {theirs.get(name, 'unknown')} on node {node_rank}"
        for name in differing
    ]
    return f"{'; '.join(said)}: start all nodes with the same release, model and options"


def _words(name: str) -> str:
    """Return roughly the command-line option of a setting: `parallel.tp_size` is --tp-size."""
    part, dot, field = name.partition(".")
    return f"--{(field if dot else part).replace('_', '-')}" if name not in ("version", "model") else f"the {name}"


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True)
