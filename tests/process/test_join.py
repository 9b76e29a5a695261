"""Two hosts (network namespaces): prefill on one, decode on the other, joined; the wire is cut and heals."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from splitserve.process.child import POLL_INTERVAL
from splitserve.tools.chaos.streams import StreamOutcome, StreamRequest, follow_undisturbed, make_requests
from support.deployment import THROUGH_SOCKETS
from support.hosts import Wire, missing, standing_on, two_hosts
from support.processes import running, wait_ready
from support.streams import follow_all
from support.tiny_models import make_tiny_model
from support.tokens import write_token_file

pytestmark = pytest.mark.process

NUM_TOKENS = 160
# Seconds that all streams of one round may take, and that anything else is waited for.
DEADLINE = 120.0
# More than a question to a worker may take: who is silent for so long is given up.
HANG_TIMEOUT = 12.0
OPTIONS = ("--dtype", "float32", "--threads", "1", "--max-total-tokens", "20000", "--device", "cpu")


@dataclass
class Joined:
    """A router and a prefill worker on one host, a decode worker on the other, and a client beside the router."""

    wire: Wire
    router_url: str
    call: Any

    def streams(self, requests: list[StreamRequest], **more: Any) -> dict[int, StreamOutcome]:
        found: dict[int, StreamOutcome] = self.call(follow_all, self.router_url, requests, timeout=DEADLINE, **more)
        return found

    def workers(self) -> dict[str, dict[str, Any]]:
        workers = self.call(httpx.get, f"{self.router_url}/workers").json()["workers"]
        return {worker["mode"]: worker for worker in workers}

    def wait_until(self, mode: str, field: str, value: bool) -> dict[str, Any]:
        deadline = time.monotonic() + DEADLINE
        while True:
            found = self.workers().get(mode)
            if found is not None and found[field] is value:
                return found
            assert time.monotonic() < deadline, f"{mode} is not {field}={value}: {found}"
            time.sleep(POLL_INTERVAL)


@pytest.fixture(scope="module")
def joined(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Joined]:
    if problem := missing():
        pytest.skip(problem)
    folder = tmp_path_factory.mktemp("join")
    model, token = make_tiny_model("llama", folder / "llama"), folder / "token"
    write_token_file(token)
    with ExitStack() as closing:
        wire = closing.enter_context(two_hosts())
        near, far = wire.hosts
        call = closing.enter_context(standing_on(near))
        options = ["--host", near.address, "--port", "0", "--health-interval", "0.5"]
        options += ["--hang-timeout", str(HANG_TIMEOUT)]
        router = closing.enter_context(running(["router", *options], folder, name="router", program=near.program))
        url = wait_ready(router).url
        for host, mode in ((near, "prefill"), (far, "decode")):
            args = ["serve", str(model), "--disaggregation-mode", mode, "--join", url, *OPTIONS]
            args += ["--cluster-token-file", str(token), "--drain-timeout", "10"]
            # Both are on this machine.
            args += THROUGH_SOCKETS
            closing.enter_context(running(args, folder, name=mode, program=host.program))
        found = Joined(wire, url, call)
        for mode in ("prefill", "decode"):
            found.wait_until(mode, "ready", True)
        yield found


def test_workers_of_two_hosts_serve_together_and_each_is_reached_by_its_address(joined):
    workers = joined.workers()
    for host, mode in zip(joined.wire.hosts, ("prefill", "decode"), strict=True):
        assert workers[mode]["url"].startswith(f"http://{host.address}:")
    follow = joined.call(follow_undisturbed, joined.router_url, make_requests(6, 12), timeout=DEADLINE)
    assert len(follow) == 6


def test_streams_survive_a_short_cut_of_the_wire(joined):
    requests = make_requests(4, NUM_TOKENS)
    expected = joined.call(follow_undisturbed, joined.router_url, requests, timeout=DEADLINE)

    def blink() -> None:
        """Wait until the loss of a worker is detected."""
        joined.wire.cut()
        deadline = time.monotonic() + DEADLINE
        # Already on the client's host.
        while all(w["healthy"] for w in httpx.get(f"{joined.router_url}/workers").json()["workers"]):
            assert time.monotonic() < deadline
            time.sleep(POLL_INTERVAL)
        joined.wire.heal()

    outcomes = joined.streams(requests, disturb=blink, after=3)
    assert {i: problem for i, o in outcomes.items() if (problem := o.difference(expected[i]))} == {}


@pytest.mark.soak
def test_a_long_cut_ends_streams_with_an_error_and_after_it_everything_works(joined):
    requests = make_requests(6, NUM_TOKENS)
    expected = joined.call(follow_undisturbed, joined.router_url, requests, timeout=DEADLINE)
    outcomes = joined.streams(requests, disturb=joined.wire.cut, after=3)
    for outcome in outcomes.values():
        # In order, whatever became of it: no client waits for ever.
        assert outcome.is_done
        assert outcome.error is not None
        assert "decode" in outcome.error["message"]
    # No worker can serve new requests, which wait and are then rejected.
    refused = joined.streams(requests[:1])
    assert refused[0].error["code"] == "worker_unavailable"
    joined.wire.heal()
    joined.wait_until("decode", "ready", True)
    again = joined.streams(requests)
    assert {i: problem for i, o in again.items() if (problem := o.difference(expected[i]))} == {}
