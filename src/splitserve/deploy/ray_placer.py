"""Processes of a cluster on the nodes of a Ray cluster: each is the child of an actor.

- A worker's ranks are on one node: its actor has a placement group of one bundle with the resources of all of them.
  (With one bundle per rank, the actor would see the GPUs of the first only.)
- When an actor ends, its child ends too, because the actor holds its standard input. Actors end with the supervisor.
  So no process is left, whichever of them is killed.
- Secrets are arguments of an actor, and are written to files of its user there. Ray sends them like all data: in the
  clear, unless it is configured to use TLS.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayError
from ray.util import get_node_ip_address
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from splitserve.core.errors import OptionError, clause
from splitserve.deploy.placer import NodeProcess, Observation, Phase, ProcessSpec

# Seconds that one check of all actors may take, and seconds without an answer after which an actor is lost.
_LOOK_SECONDS = 0.3
_SILENT_SECONDS = 60.0
# Seconds in which an actor must end its child.
_CLOSE_SECONDS = 40.0
_CONNECT_SECONDS = 5.0


class NodeActor(NodeProcess):
    """Actor that runs one process on a node."""

    def __init__(self, spec: ProcessSpec) -> None:
        address = get_node_ip_address()
        node_id = ray.get_runtime_context().get_node_id()
        super().__init__(spec, address, f"{address} ({node_id[:8]})")


@dataclass(slots=True)
class _Entry:
    actor: Any
    group: PlacementGroup | None
    seen: Observation
    # Whether it has answered once, which proves its placement.
    is_placed: bool = False
    # Pending request for its state, and its start time.
    question: Any = None
    asked_at: float = 0.0


class RayPlacer:
    """Placer on the Ray cluster at `address`, with this machine as a node. Raises ConfigError."""

    def __init__(self, address: str, namespace: str) -> None:
        # Several threads use it, by atomic operations.
        self._entries: dict[str, _Entry] = {}
        try:
            _reach(address)
            ray.init(address, namespace=namespace, log_to_driver=False, logging_level="ERROR", configure_logging=False)
        except (OSError, RuntimeError, ValueError, RayError) as error:
            raise OptionError(
                "--ray",
                f"{address}: {clause(error)}; start Ray here (ray start --head, or --address HOST:PORT) and give "
                "its address, or auto",
            ) from None
        self.address: str = get_node_ip_address()
        self.num_cores: int | None = None
        self._node_id = ray.get_runtime_context().get_node_id()

    def start(self, spec: ProcessSpec) -> None:
        bundle = {"CPU": float(spec.num_cpus), "GPU": float(spec.num_gpus)}
        bundle = {name: amount for name, amount in bundle.items() if amount}
        group = placement_group([bundle], strategy="STRICT_PACK", name=spec.name) if bundle else None
        strategy: Any = "DEFAULT"
        if group is not None:
            strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0)
        elif spec.is_near:
            strategy = NodeAffinitySchedulingStrategy(self._node_id, soft=True)
        options = {"num_cpus": spec.num_cpus, "num_gpus": spec.num_gpus, "max_restarts": 0}
        actor = ray.remote(NodeActor).options(scheduling_strategy=strategy, **options).remote(spec)
        needed = " and ".join(f"{amount:g} {name}" for name, amount in bundle.items()) or "an actor"
        seen = Observation(phase=Phase.PENDING, detail=f"waits for a node with {needed}")
        self._entries[spec.name] = _Entry(actor, group, seen)

    def observe(self) -> Mapping[str, Observation]:
        entries = self._entries.copy()
        for entry in entries.values():
            if entry.question is None and entry.seen.phase is not Phase.LOST:
                entry.question, entry.asked_at = entry.actor.observe.remote(), time.monotonic()
        questions = [entry.question for entry in entries.values() if entry.question is not None]
        if questions:
            ray.wait(questions, num_returns=len(questions), timeout=_LOOK_SECONDS)
        for entry in entries.values():
            self._store_answer(entry)
        return {name: entry.seen for name, entry in entries.items() if name in self._entries}

    def _store_answer(self, entry: _Entry) -> None:
        """Store the actor's answer, if it has arrived."""
        if entry.question is None:
            return
        try:
            entry.seen = ray.get(entry.question, timeout=0)
            entry.is_placed = True
        except GetTimeoutError:
            if entry.is_placed and time.monotonic() - entry.asked_at > _SILENT_SECONDS:
                entry.seen = _lost(f"no answer from its node for {_SILENT_SECONDS:g} s")
            return
        except ActorUnavailableError:
            # Ray tries to reach it; the next check gets the result.
            pass
        except RayError as error:
            entry.seen = _lost(_cause(error))
        entry.question = None

    def terminate(self, name: str) -> None:
        entry = self._entries.get(name)
        if entry is not None:
            entry.actor.terminate.remote()

    def remove(self, name: str) -> None:
        entry = self._entries.get(name)
        if entry is None:
            return
        if entry.is_placed and entry.seen.phase is not Phase.LOST:
            # If that fails, its child ends with it.
            with suppress(RayError, GetTimeoutError):
                ray.get(entry.actor.close.remote(), timeout=_CLOSE_SECONDS)
        ray.kill(entry.actor)
        if entry.group is not None:
            remove_placement_group(entry.group)
        self._entries.pop(name, None)

    def close(self) -> None:
        for name in list(self._entries):
            self.remove(name)
        ray.shutdown()


def _reach(address: str) -> None:
    """Check that `address` accepts connections and is no HTTP/1 server, for example Ray's dashboard.

    Raises OSError. Ray itself would try for minutes, and would ignore signals meanwhile.
    """
    host, colon, port = address.rpartition(":")
    if not colon or "/" in address:
        return
    with socket.create_connection((host, int(port)), timeout=_CONNECT_SECONDS) as sock:
        sock.sendall(b"GET / HTTP/1.1\r\nhost: ray\r\n\r\n")
        # Ray's head may close the connection, or wait for more.
        with suppress(TimeoutError, ConnectionError):
            if sock.recv(5) == b"HTTP/":
                raise OSError("this is an HTTP server, not the port of Ray's head (6379 by default)")


def _cause(error: RayError) -> str:
    """Return the cause in Ray's error: its last line, without Ray's list of what else to check."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return lines[-1].partition(" Some common causes include:")[0]


def _lost(why: str) -> Observation:
    return Observation(phase=Phase.LOST, detail=why)
