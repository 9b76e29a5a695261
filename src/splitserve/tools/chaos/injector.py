"""Fault injector of a chaos run: it kills, stops, restarts and changes the workers of one role, one at a time."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from splitserve.core.errors import ClusterError
from splitserve.core.memory import MemoryTag
from splitserve.core.request import DisaggregationMode
from splitserve.deploy.local import LocalCluster
from splitserve.process.child import POLL_INTERVAL, ChildProcess
from splitserve.tools.chaos.faults import Fault, FaultOrder, FaultStage
from splitserve.tools.chaos.streams import Tally
from splitserve.tools.client import RequestFailedError, open_session, send

# Seconds to reach a stage, for a worker to load, drain or end, and between two faults.
_REACH, COME_BACK, _PAUSE = 10.0, 180.0, (1.0, 4.0)
# Seconds that memory stays released, and until a worker is killed during a change of its memory, at most.
_RELEASED, _CHANGING = 2.0, 1.0
# In the error of a worker with options that exclude changes of its memory.
_EXCLUDED = "is not possible with"


@dataclass(frozen=True, slots=True)
class FaultInjector:
    """Fault injector for the workers of one role: it breaks one at a time and waits until each is back.

    A run has one for each role. So a role with several workers always has a working one. Requests wait for the only
    worker of a role. In both cases no request has a reason to fail.
    """

    cluster: LocalCluster
    role: DisaggregationMode
    tally: Tally
    # The router's, seconds.
    hang_timeout: float
    rng: random.Random
    # Folders with the weights of the workers, for updates.
    models: Sequence[Path]

    async def run(self, is_over: asyncio.Event) -> None:
        """Inject faults until `is_over` is set.

        Raises ClusterError if a worker does not come back, and RequestFailedError.
        """
        while not is_over.is_set():
            victim = self.rng.choice(self.cluster.children_of(self.role))
            # Fault -> relative frequency. Faults that hit a chosen stage of a request are the most frequent.
            kinds: dict[Callable[[ChildProcess], Awaitable[str]], int] = {
                self._kill: 6,
                self._stop: 4,
                self._pause: 1,
                self._kill_one_process: 2,
                self._restart: 2,
                # A worker of several ranks has one role.
                self._change_role: 0 if victim.ready is not None and victim.ready.follower_pids else 3,
                self._change_memory: 3,
                self._kill_during_change: 1,
            }
            (kind,) = self.rng.choices(list(kinds), list(kinds.values()))
            self.tally.faults[f"{self.role} {await kind(victim)}"] += 1
            await self._wait_usable()
            try:
                async with asyncio.timeout(self.rng.uniform(*_PAUSE)):
                    await is_over.wait()
            except TimeoutError:
                continue

    async def _kill(self, victim: ChildProcess) -> str:
        stage = await self._strike(victim, signal.SIGKILL)
        await asyncio.to_thread(self.cluster.restart, victim)
        return f"killed {stage}"

    async def _stop(self, victim: ChildProcess) -> str:
        """Stop the worker long enough to be considered hung."""
        stage = await self._strike(victim, signal.SIGSTOP)
        await asyncio.sleep(self.hang_timeout * 2)
        signal_worker(victim, signal.SIGCONT)
        return f"stopped {stage}"

    async def _pause(self, victim: ChildProcess) -> str:
        """Stop the worker for less than the hang timeout."""
        signal_worker(victim, signal.SIGSTOP)
        await asyncio.sleep(self.hang_timeout / 3)
        signal_worker(victim, signal.SIGCONT)
        return "paused"

    async def _kill_one_process(self, victim: ChildProcess) -> str:
        assert victim.ready is not None
        parts = [("scheduler", victim.ready.scheduler_pids[0]), ("front end", victim.pid)]
        parts += [("follower", pid) for pid in victim.ready.follower_pids]
        part, pid = self.rng.choice(parts)
        os.kill(pid, signal.SIGKILL)
        await asyncio.to_thread(self.cluster.restart, victim)
        return f"{part} killed"

    async def _restart(self, victim: ChildProcess) -> str:
        """Restart the worker as an operator does: drain, stop, start."""
        has_stand_in = len(self.cluster.children_of(self.role)) > 1
        await self._send("/workers/drain", {"url": _url(victim), "migrate": has_stand_in, "force": not has_stand_in})
        victim.send_signal()
        if not await asyncio.to_thread(victim.wait, COME_BACK):
            raise ClusterError(f"{victim.name} was drained and does not end:\n{victim.log_tail()}")
        await asyncio.to_thread(self.cluster.restart, victim)
        return "drained and restarted"

    async def _change_role(self, victim: ChildProcess) -> str:
        """Change the worker to another role and back."""
        away = self.rng.choice([role for role in DisaggregationMode if role is not self.role])
        for role in (away, self.role):
            order = {"url": _url(victim), "role": role, "timeout": COME_BACK, "force": True}
            await self._send("/role", order | {"drain": self.rng.choice(["complete", "migrate"])})
        return f"made {away} and {self.role} again"

    async def _change_memory(self, victim: ChildProcess) -> str:
        """Release and resume the worker's memory, or update its weights with equal ones, or both."""
        # Aborted requests would end early, so running ones end by themselves.
        order = {"drain": True, "timeout": COME_BACK}
        tags = self.rng.sample(list(MemoryTag), self.rng.randrange(len(MemoryTag) + 1))
        does_update = not tags or self.rng.random() < 0.3
        try:
            if tags:
                await self._send("/release_memory_occupation", order | {"tags": tags}, victim)
                await asyncio.sleep(self.rng.uniform(0.0, _RELEASED))
            if does_update:
                model = str(self.rng.choice(self.models))
                await self._send("/update_weights_from_disk", order | {"model_path": model}, victim)
            if tags:
                await self._send("/resume_memory_occupation", {}, victim)
        except RequestFailedError as error:
            if _EXCLUDED not in error.message:
                raise
            return "memory unchanged, because its options exclude that"
        changes = ([f"{' and '.join(sorted(tags))} released"] if tags else []) + ["weights updated"] * does_update
        return ", ".join(changes)

    async def _kill_during_change(self, victim: ChildProcess) -> str:
        change = asyncio.create_task(self._change_memory(victim))
        await asyncio.wait([change], timeout=self.rng.uniform(0.0, _CHANGING))
        signal_worker(victim, signal.SIGKILL)
        await asyncio.wait([change])
        # It failed unless it was over: the worker is gone.
        was_over = change.exception() is None
        await asyncio.to_thread(self.cluster.restart, victim)
        return f"killed {'after' if was_over else 'during'} a change of memory"

    async def _strike(self, victim: ChildProcess, number: signal.Signals) -> str:
        """Fail the worker at a random stage. Return the stage, or "anywhere" if it was not reached in time."""
        stage = self.rng.choice(list(FaultStage))
        order = FaultOrder.give(victim.ready_path, Fault(stage, number, skip=self.rng.randrange(6)))
        deadline = time.monotonic() + _REACH
        while time.monotonic() < deadline:
            if order.is_taken:
                return str(stage)
            await asyncio.sleep(POLL_INTERVAL)
        if not order.withdraw():
            return str(stage)
        signal_worker(victim, number)
        return "anywhere"

    async def _wait_usable(self) -> None:
        """Wait until the router uses every worker of the role. Raises ClusterError."""
        began = time.monotonic()
        while True:
            children = self.cluster.children_of(self.role)
            usable = {w["url"] for w in (await self._send("/workers"))["workers"] if w["healthy"] and w["ready"]}
            if all(child.ready is not None and child.ready.url in usable for child in children):
                break
            if time.monotonic() - began > COME_BACK:
                states = "\n".join(child.log_tail() for child in children)
                raise ClusterError(f"not all {self.role} workers came back within {COME_BACK:g} s:\n{states}")
            await asyncio.sleep(POLL_INTERVAL * 4)
        self.tally.recoveries.append(time.monotonic() - began)

    async def _send(self, path: str, body: dict[str, Any] | None = None, worker: ChildProcess | None = None) -> Any:
        """Send to a worker. None: to the router."""
        async with open_session() as session:
            return await send(session, (_url(worker) if worker else self.cluster.router_url) + path, body)


def _url(child: ChildProcess) -> str:
    assert child.ready is not None
    return child.ready.url


def signal_worker(child: ChildProcess, number: signal.Signals) -> None:
    """Send a signal to the front end and all schedulers of a worker, as if its whole machine failed or resumed."""
    assert child.ready is not None
    for pid in (child.pid, *child.ready.scheduler_pids, *child.ready.follower_pids):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
