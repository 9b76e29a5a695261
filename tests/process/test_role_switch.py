"""Workers change their roles under load: every stream ends with the output of an undisturbed run.

`make soak` does this with the real model, and adds null, several ranks, other transports and both kinds of drain.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import httpx
import pytest
import torch

from splitserve.core.parallel import WorkerShape
from splitserve.core.request import DisaggregationMode
from splitserve.deploy.deployment import LocalDeployment
from splitserve.deploy.local import LocalCluster
from splitserve.tools.chaos.streams import (
    StreamOutcome,
    StreamRequest,
    follow,
    follow_undisturbed,
    make_requests,
    open_session,
)
from support.deployment import MODEL, THROUGH_SOCKETS, Deployment
from support.draft_heads import TaughtModel
from support.streams import WatchedOutcome
from support.tiny_models import make_tiny_model

pytestmark = pytest.mark.process

PREFILL, DECODE, NULL = DisaggregationMode.PREFILL, DisaggregationMode.DECODE, DisaggregationMode.NULL
# Seconds that all streams of a round may take, and a switch.
DEADLINE = 180.0
# (worker, its new role, how it is drained)
Switch = tuple[str, DisaggregationMode, str]


@dataclass
class World:
    deployment: Deployment
    requests: list[StreamRequest]
    expected: dict[int, StreamOutcome]

    @property
    def router(self) -> str:
        return self.deployment.cluster.router_url

    @property
    def urls(self) -> dict[str, str]:
        return {w.name: str(w.url) for w in self.deployment.cluster.workers}

    def roles(self) -> dict[str, str]:
        """Return the workers in the router's registry."""
        workers = self.deployment.client.get(f"{self.router}/workers").json()["workers"]
        names = {url: name for name, url in self.urls.items()}
        return {names[w["url"]]: w["mode"] for w in workers}

    def switch_under_load(self, *switches: Switch) -> int:
        """One switch after the other, while every request is sent again when it has ended. How often that was."""
        return asyncio.run(self._switch_under_load(switches))

    async def _switch_under_load(self, switches: Sequence[Switch]) -> int:
        num_done, is_over, has_begun = 0, False, asyncio.Event()

        async def load(session: aiohttp.ClientSession, i: int, request: StreamRequest) -> None:
            nonlocal num_done
            while not is_over:
                outcome = WatchedOutcome(on_event=has_begun.set)
                await follow(session, self.router, request, outcome)
                assert outcome.difference(self.expected[i]) == "", i
                num_done += 1

        async with open_session(DEADLINE) as session:
            loads = [asyncio.create_task(load(session, i, r)) for i, r in enumerate(self.requests)]
            try:
                for name, role, drain in switches:
                    has_begun.clear()
                    begin = asyncio.create_task(has_begun.wait())
                    await asyncio.wait([begin, *loads], return_when=asyncio.FIRST_COMPLETED)
                    begin.cancel()
                    for task in loads:  # A load that failed has its error here.
                        if task.done():
                            task.result()
                    body = {"url": self.urls[name], "role": role, "drain": drain, "timeout": DEADLINE}
                    async with session.post(f"{self.router}/role", json=body) as response:
                        assert response.status == 200, await response.text()
                        assert (await response.json())["mode"] == role
                    # A failed request shows at once, not when all is over.
                    for task in loads:
                        if task.done():
                            task.result()
                is_over = True
                await asyncio.gather(*loads)
            finally:
                for task in loads:
                    task.cancel()
                await asyncio.gather(*loads, return_exceptions=True)
        return num_done


@contextmanager
def world(
    model: str,
    num_requests: int,
    num_tokens: int,
    *,
    backend: str = "tcp",
    dp_size: int = 1,
    worker_args: Sequence[str] = (),
) -> Iterator[World]:
    args = ["--max-total-tokens", "20000", "--chunked-prefill-size", "64", *worker_args]
    with (
        LocalCluster(
            LocalDeployment(
                model=model,
                prefill=1,
                decode=2,
                prefill_shape=WorkerShape(dp_size=dp_size),
                decode_shape=WorkerShape(dp_size=dp_size),
                threads=1,
                backend=backend,
                worker_args=args,
            )
        ) as cluster,
        httpx.Client(timeout=60) as client,
    ):
        cluster.wait_ready(timeout=300)
        requests = make_requests(num_requests, num_tokens)
        expected = follow_undisturbed(cluster.router_url, requests, timeout=DEADLINE)
        yield World(Deployment(cluster, client), requests, expected)


def test_a_worker_changes_its_role_under_load_and_back_and_no_request_notices(tmp_path: Path):
    model = make_tiny_model("llama", tmp_path / "llama", dtype=torch.bfloat16)
    with world(str(model), 5, 80) as w:
        num_done = w.switch_under_load(("decode-1", PREFILL, "migrate"), ("decode-1", DECODE, "complete"))
        assert num_done >= len(w.requests)
        assert w.roles() == {"prefill-0": PREFILL, "decode-0": DECODE, "decode-1": DECODE}
        w.deployment.check_nothing_is_held()


@pytest.mark.soak
def test_a_worker_with_a_draft_head_proposes_after_a_switch(taught_with_eagle3: TaughtModel):
    with world(str(taught_with_eagle3.model), 5, 160, worker_args=taught_with_eagle3.options) as w:
        w.switch_under_load(
            ("decode-1", PREFILL, "migrate"), ("prefill-0", DECODE, "complete"), ("decode-0", PREFILL, "migrate")
        )
        assert w.roles() == {"prefill-0": DECODE, "decode-0": PREFILL, "decode-1": PREFILL}
        outcomes = follow_undisturbed(w.router, w.requests, timeout=DEADLINE)
        assert [outcomes[i].difference(w.expected[i]) for i in outcomes] == [""] * len(w.requests)
        state = w.deployment.client.get(f"{w.urls['prefill-0']}/server_info").json()["internal_states"][0]
        # As a prefill worker it has proposed nothing.
        num_proposed = state["spec_decode_num_draft_tokens_total"]
        assert state["spec_decode_num_accepted_tokens_total"] > 0.15 * num_proposed > 0
        w.deployment.check_nothing_is_held()


# Every worker takes every role in turn, and at each moment a pair remains.
ROUND: list[Switch] = [
    ("decode-1", PREFILL, "migrate"),
    ("prefill-0", DECODE, "complete"),
    ("decode-0", NULL, "migrate"),
    ("decode-1", NULL, "migrate"),
    ("prefill-0", PREFILL, "complete"),
    ("decode-0", DECODE, "migrate"),
    ("decode-1", DECODE, "complete"),
]


@pytest.mark.soak
@pytest.mark.parametrize(
    ("backend", "dp_size", "worker_args"),
    [
        ("tcp", 1, THROUGH_SOCKETS),
        ("tcp", 2, ("--disable-overlap-schedule",)),
        (
            "shm",
            1,
            ("--prefix-host-memory", "64M", "--kv-events-config", '{"publisher": "zmq", "endpoint": "tcp://*:0"}'),
        ),
        ("gloo", 1, ("--speculative-algorithm", "ngram")),
    ],
)
def test_everybody_becomes_everything_under_load(backend: str, dp_size: int, worker_args: Sequence[str]):
    with world(MODEL, 12, 40, backend=backend, dp_size=dp_size, worker_args=worker_args) as w:
        for _ in range(3):
            w.switch_under_load(*ROUND)
            assert w.roles() == {"prefill-0": PREFILL, "decode-0": DECODE, "decode-1": DECODE}
            w.deployment.check_nothing_is_held()
