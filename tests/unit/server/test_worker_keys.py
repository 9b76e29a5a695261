"""A worker with keys requires one on every route except those that report whether it lives."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI

from splitserve.api.tokenizer import Tokenizer
from splitserve.core.config import ServerConfig, WorkerConfig
from splitserve.core.errors import ConfigError
from splitserve.server.app import build_app
from splitserve.server.scheduler_client import SchedulerClient
from splitserve.server.scheduler_group import SchedulerGroup
from splitserve.worker.checks import check_worker

KEY = "router-0123456789abcdef"


def with_keys(path: Path) -> WorkerConfig:
    return WorkerConfig(server=ServerConfig(api_key_file=str(path)))


@pytest.fixture
def app(tmp_path: Path, client: SchedulerClient, tokenizer: Tokenizer) -> FastAPI:
    keys = tmp_path / "keys"
    keys.write_text(f"{KEY} router\n")
    keys.chmod(0o600)
    return build_app(config=with_keys(keys), scheduler=SchedulerGroup([client]), tokenizer=tokenizer, model_path="/m")


async def test_every_route_but_health_and_metrics_needs_a_key(app: FastAPI) -> None:
    routes = [(method.upper(), path) for path, methods in app.openapi()["paths"].items() for method in methods]
    assert ("POST", "/role") in routes
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://worker") as http:
        refused = set()
        for method, path in routes:
            if (await http.request(method, path, json={})).status_code == 401:
                refused.add(path)
        assert {path for _, path in routes} - refused == {"/health", "/live", "/metrics"}
        for authorization, status in ((f"Bearer {KEY}", 503), (f"Bearer {KEY}x", 401), (KEY, 401)):
            answer = await http.get("/server_info", headers={"authorization": authorization})
            # 503: the scheduler has not started, which only clients with a key get to see.
            assert answer.status_code == status
        assert "--api-key-file" in (await http.get("/server_info", headers={"authorization": "Bearer x"})).text


def test_a_file_without_keys_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--api-key-file"):
        check_worker(with_keys(tmp_path / "nothing"))
