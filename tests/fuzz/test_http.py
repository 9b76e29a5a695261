"""Requests made from the OpenAPI descriptions of a real router and a real worker, valid ones and broken ones.

Each answer must match the description, none may be an internal error, no log may have a traceback, and afterwards the
same request gets the same output.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.core import NOT_SET
from schemathesis.schemas import APIOperation
from schemathesis.specs.openapi import checks

from splitserve.router.live_routes import LIVE_PATH
from support.processes import running, wait_ready
from support.tiny_models import make_tiny_model
from support.tokens import write_token_file

pytestmark = pytest.mark.process

DEADLINE = 60.0
# For each route with a body or parameters, valid and broken.
FEW, MANY = 6, 220
REQUEST = {"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 4, "temperature": 0.0}}
CHECKS = [checks.status_code_conformance, checks.content_type_conformance, checks.response_schema_conformance]
# Half of the bodies are these with up to three fields of a generated one: most with more fields are rejected early.
VALID_BODIES: dict[str, dict[str, Any]] = {
    "/generate": {"text": "hello"},
    "/v1/completions": {"prompt": "hello"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hello"}]},
    "/tokenize": {"prompt": "hello"},
    "/detokenize": {"tokens": [5, 6, 7]},
}


@dataclass
class Cluster:
    """A router with a pair, and a colocated worker that is not registered."""

    urls: dict[str, str]
    folder: Path
    statuses: Counter[int] = field(default_factory=Counter)

    def output(self) -> list[Any]:
        answers = [httpx.post(f"{url}/generate", json=REQUEST, timeout=DEADLINE) for url in self.urls.values()]
        return [answer.json()["output_ids"] for answer in answers]

    def check_logs(self) -> None:
        for log in self.folder.glob("*.log"):
            _, found, traceback = log.read_text().partition("Traceback")
            assert not found, f"{log.name}: {traceback[:2000]}"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, workers_fork: None) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("http")
    model, token = make_tiny_model("llama", folder / "model"), folder / "token"
    write_token_file(token)
    options = ["--port", "0", "--device", "cpu", "--threads", "1", "--dtype", "float32", "--context-length", "128"]
    options += ["--max-total-tokens", "4096", "--cluster-token-file", str(token)]
    with ExitStack() as closing:
        router = wait_ready(closing.enter_context(running(["router", "--port", "0"], folder, name="router"))).url
        of_role = {
            "prefill": ["--router", router, "--disaggregation-bootstrap-port", "0"],
            "decode": ["--router", router],
            "null": ["--kv-events-config", '{"publisher": "zmq", "endpoint": "tcp://127.0.0.1:0"}'],
        }
        started = [
            closing.enter_context(
                running(["serve", str(model), "--disaggregation-mode", role, *options, *more], folder, name=role)
            )
            for role, more in of_role.items()
        ]
        worker = [wait_ready(child).url for child in started][-1]
        assert httpx.get(f"{router}/health_generate", timeout=DEADLINE).status_code == 200
        yield Cluster({"router": router, "worker": worker}, folder)


def vary(case: schemathesis.Case, data: st.DataObject) -> dict[str, Any]:
    """Change the body of `case` in place, or return arguments with bytes that replace it."""
    if not isinstance(case.body, dict):
        return {}
    kind = data.draw(st.sampled_from(["as it is", "nearly valid", "nearly valid", "bytes"]))
    if kind == "bytes":
        encoded = json.dumps(case.body).encode()
        case.body = NOT_SET
        return {"data": data.draw(st.binary(min_size=1, max_size=40) | st.just(encoded[:-1]) | st.just(b"[" * 40_000))}
    if kind == "nearly valid" and case.body:
        names = data.draw(st.sets(st.sampled_from(sorted(case.body)), max_size=3))
        unknown = data.draw(st.dictionaries(st.text(), st.none() | st.text(), max_size=1))
        case.body = VALID_BODIES.get(case.path, {}) | {name: case.body[name] for name in names} | unknown
    return {}


def send_requests(cluster: Cluster, url: str, operation: APIOperation, mode: GenerationMode, count: int) -> None:
    @settings(
        max_examples=count,
        deadline=None,
        database=None,
        derandomize=count == FEW,
        suppress_health_check=list(HealthCheck),
    )
    @given(operation.as_strategy(generation_mode=mode), st.data())
    def send(case: schemathesis.Case, data: st.DataObject) -> None:
        response = case.call(base_url=url, timeout=DEADLINE, **vary(case, data))
        cluster.statuses[response.status_code] += 1
        case.validate_response(response, checks=CHECKS)
        if response.status_code == 500:
            assert response.json()["error"]["code"] != "internal_error", response.text

    send()


def fuzz(cluster: Cluster, count: int) -> None:
    before = cluster.output()
    for url in cluster.urls.values():
        for result in schemathesis.openapi.from_url(f"{url}/openapi.json").get_all_operations():
            operation = result.ok()
            if operation.path == LIVE_PATH:
                # Its answer has no end.
                continue
            # Without a body or a query there is nothing to break.
            modes = list(GenerationMode) if operation.body or operation.query else [GenerationMode.POSITIVE]
            for mode in modes:
                send_requests(cluster, url, operation, mode, count)
    assert cluster.output() == before
    cluster.check_logs()


def test_generated_requests_get_documented_answers(cluster: Cluster) -> None:
    fuzz(cluster, FEW)
    assert cluster.statuses[200] > 40


@pytest.mark.soak
def test_ten_thousand_generated_requests_get_documented_answers(cluster: Cluster) -> None:
    fuzz(cluster, MANY)
    assert cluster.statuses.total() > 10_000
