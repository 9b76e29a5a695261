"""The real model under faults: workers are killed and stopped at every stage that a request passes.

With two of each kind every stream ends as if nothing had happened. With one of each, and a router that does not wait
for workers, it ends at the least in a clear error. `make soak` runs this. `make test` has a part of it in
test_migration.py, with a tiny model.
"""

from __future__ import annotations

import itertools
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import httpx
import psutil
import pytest

from splitserve.core.request import DisaggregationMode
from splitserve.deploy.deployment import LocalDeployment
from splitserve.deploy.local import LocalCluster
from splitserve.tools.chaos.faults import PROGRAM, Fault, FaultOrder, FaultStage
from splitserve.tools.chaos.injector import signal_worker
from splitserve.tools.chaos.streams import StreamOutcome, StreamRequest, follow_undisturbed, make_requests
from support.deployment import MODEL, THROUGH_SOCKETS, Deployment
from support.processes import unended
from support.streams import follow_all

pytestmark = [pytest.mark.process, pytest.mark.soak]

NUM_STREAMS = 30
NUM_TOKENS = 24
# Seconds that all streams of a case may take.
DEADLINE = 180.0
HANG_TIMEOUT = 6.0
ROUTER_ARGS = ["--hang-timeout", str(HANG_TIMEOUT), "--health-interval", "0.5"]
# Long prompts take several chunks.
# Decode reaches no stage within a direct write.
WORKER_ARGS = ["--max-total-tokens", "20000", "--chunked-prefill-size", "64", *THROUGH_SOCKETS]
PREFILL, DECODE = DisaggregationMode.PREFILL, DisaggregationMode.DECODE
CASES = list(itertools.product((signal.SIGKILL, signal.SIGSTOP), (PREFILL, DECODE), FaultStage))


@dataclass
class World:
    deployment: Deployment
    requests: list[StreamRequest]
    expected: dict[int, StreamOutcome]

    @property
    def cluster(self) -> LocalCluster:
        return self.deployment.cluster

    def run_with_fault(
        self, number: signal.Signals, role: DisaggregationMode, stage: FaultStage
    ) -> dict[int, StreamOutcome]:
        """All streams, with the first worker of that role failing at that stage; it is there again afterwards."""
        victim = self.cluster.children_of(role)[0]
        url = self.cluster.router_url
        # Cases before this one left their prompts in the caches. Cached chunks are neither computed nor sent.
        self.deployment.flush()
        try:
            if stage is FaultStage.MID_STREAM:
                outcomes = follow_all(
                    url,
                    self.requests,
                    timeout=DEADLINE,
                    disturb=lambda: signal_worker(victim, number),
                    after=2,
                )
            else:
                order = FaultOrder.give(victim.ready_path, Fault(stage, number, skip=3))
                outcomes = follow_all(url, self.requests, timeout=DEADLINE)
                assert not order.withdraw(), f"no request met {stage}"
        finally:
            self._bring_back(victim, number)
        return outcomes

    def _bring_back(self, victim, number: signal.Signals) -> None:
        if number is signal.SIGKILL:
            self.cluster.restart(victim)
        else:
            signal_worker(victim, signal.SIGCONT)
        self.cluster.wait_ready(timeout=300)
        for url in self.deployment.workers():
            # A stopped one would be passed over for half a minute.
            order = {"url": url}
            assert self.deployment.client.post(f"{self.cluster.router_url}/workers/resume", json=order).is_success
        self.deployment.check_nothing_is_held()


@contextmanager
def world(num_workers: int, *router_args: str) -> Iterator[World]:
    # Fork servers of other tests may still be children of this process.
    before = set(psutil.Process().children(recursive=True))
    with (
        LocalCluster(
            LocalDeployment(
                model=MODEL,
                prefill=num_workers,
                decode=num_workers,
                threads=1,
                worker_args=WORKER_ARGS,
                router_args=[*ROUTER_ARGS, *router_args],
            ),
            worker_program=PROGRAM,
        ) as cluster,
        httpx.Client(timeout=60) as client,
    ):
        cluster.wait_ready(timeout=300)
        requests = make_requests(NUM_STREAMS, NUM_TOKENS)
        expected = follow_undisturbed(cluster.router_url, requests, timeout=DEADLINE)
        yield World(Deployment(cluster, client), requests, expected)
    left = set(psutil.Process().children(recursive=True)) - before
    assert not unended(left)


def test_with_two_of_each_every_stream_ends_as_if_nothing_had_happened():
    with world(2) as w:
        for number, role, stage in CASES:
            outcomes = w.run_with_fault(number, role, stage)
            problems = {i: problem for i, o in outcomes.items() if (problem := o.difference(w.expected[i]))}
            assert problems == {}, (number, role, stage)


def test_with_one_of_each_every_stream_ends_in_time_and_says_why():
    with world(1, "--worker-wait-timeout", "0") as w:
        for number, role, stage in CASES:
            began = time.monotonic()
            outcomes = w.run_with_fault(number, role, stage)
            errors = [o.error for o in outcomes.values() if o.error is not None]
            assert all(o.is_done for o in outcomes.values()), (number, role, stage)
            if (role, stage) == (PREFILL, FaultStage.MID_STREAM):
                # It is not needed any more.
                assert not errors
            else:
                assert errors, (number, role, stage)
            for error in errors:
                assert f"{role} worker" in error["message"], (number, role, stage, error)
            for i, outcome in outcomes.items():
                if outcome.error is None:
                    assert outcome.difference(w.expected[i]) == "", (number, role, stage)
            # No process waits for a deadline of minutes.
            assert time.monotonic() - began < DEADLINE
