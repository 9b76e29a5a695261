"""The description of worker and router: it has each route, each reference leads somewhere, no page needs a CDN."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from fastapi.routing import iter_route_contexts
from jsonschema import Draft202012Validator
from starlette.types import ASGIApp

from splitserve.api.openapi import DOCS_PATHS
from splitserve.core.config import ServerConfig, WorkerConfig
from splitserve.core.errors import WorkerUnavailableError
from splitserve.core.messages import SchedulerState
from splitserve.router.app import build_router_app
from splitserve.router.args import LBArgs
from splitserve.router.routes import WORKER_ROUTES
from splitserve.server.admin import ROUTER_ROUTES
from splitserve.server.app import build_app

API_PAGE = Path(__file__).parents[3] / "docs" / "api.md"


class LoadingScheduler:
    """A scheduler without a loaded model."""

    info = failure = None

    async def states(self, timeout: float) -> list[SchedulerState]:
        raise WorkerUnavailableError("it is loading")


def worker_app(keys: Path | None = None) -> FastAPI:
    config = WorkerConfig(server=ServerConfig(api_key_file=None if keys is None else str(keys)))
    parts = {"scheduler": LoadingScheduler(), "tokenizer": None}
    return build_app(config=config, model_path="/m", **parts)  # type: ignore[arg-type]


def fastapi_of(app: ASGIApp) -> FastAPI:
    """The FastAPI application behind the middleware and the shortcut of a router."""
    while not isinstance(app, FastAPI):
        inner = getattr(app, "_app", None)
        app = inner or next(c.cell_contents for c in app.__closure__ if isinstance(c.cell_contents, FastAPI))
    return app


@pytest.fixture(params=["worker", "router"])
def app(request: pytest.FixtureRequest) -> FastAPI:
    return worker_app() if request.param == "worker" else fastapi_of(build_router_app(LBArgs()))


def operations(app: FastAPI) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path, item in app.openapi()["paths"].items():
        for method, operation in item.items():
            yield method.upper(), path, operation


def test_each_route_is_described(app: FastAPI) -> None:
    undocumented = {*DOCS_PATHS, "/docs/assets", "/docs/oauth2-redirect"}
    if any(path == "/workers" for _, path, _ in operations(app)):
        # A router has these only to name the workers that do.
        undocumented |= set(WORKER_ROUTES)
    else:
        # A worker has these only to name the router that does.
        undocumented |= set(ROUTER_ROUTES)
    routes = {
        (method, re.sub(r":\w+}", "}", route.path))
        for route in iter_route_contexts(app.routes)
        if route.path not in undocumented
        for method in route.methods - {"HEAD"}
    }
    assert routes == {(method, path) for method, path, _ in operations(app)}


def test_a_router_knows_the_routes_of_workers_alone() -> None:
    of_workers = {(path, method) for method, path, _ in operations(worker_app())}
    of_router = {path for _, path, _ in operations(fastapi_of(build_router_app(LBArgs())))}
    # Further names of routes that a router forwards.
    aliases = {"/v1/tokenize", "/v1/detokenize"}
    assert {r for r in of_workers if r[0] not in of_router | aliases} == set(WORKER_ROUTES.items())


def test_an_operation_has_a_summary_an_answer_and_the_shape_of_its_errors(app: FastAPI) -> None:
    error = {"$ref": "#/components/schemas/Error"}
    for method, path, operation in operations(app):
        name = f"{method} {path}"
        assert operation["summary"], name
        assert "200" in operation["responses"], name
        # Error statuses of FastAPI's own checks, which this project does not use.
        assert "HTTPValidationError" not in str(operation), name
        for status, response in operation["responses"].items():
            if status != "200":
                schema = response["content"]["application/json"]["schema"]
                assert error in (schema, *schema.get("anyOf", ())), (name, status)
        if path in ("/generate", "/v1/completions", "/v1/chat/completions"):
            assert set(operation["responses"]["200"]["content"]) == {"application/json", "text/event-stream"}


def test_operation_ids_are_unique(app: FastAPI) -> None:
    names = [operation["operationId"] for _, _, operation in operations(app)]
    assert len(set(names)) == len(names)


def test_each_reference_leads_to_a_valid_schema(app: FastAPI) -> None:
    description = app.openapi()
    schemas = description["components"]["schemas"]
    references = set(re.findall(r"'#/components/schemas/(\w+)'", str(description)))
    assert references == set(schemas)
    for schema in schemas.values():
        Draft202012Validator.check_schema(schema)


def test_each_path_is_on_the_page_about_the_api(app: FastAPI) -> None:
    paths = set(re.findall(r"`(?:[A-Z]+ )?(/[^`]*)`", API_PAGE.read_text()))
    assert {path for _, path, _ in operations(app)} <= paths


def test_the_body_of_generate_has_its_sampling_parameters(app: FastAPI) -> None:
    schemas = app.openapi()["components"]["schemas"]
    assert {"$ref": "#/components/schemas/NativeSampling"} in (
        schemas["GenerateBody"]["properties"]["sampling_params"]["anyOf"]
    )
    assert "max_new_tokens" in schemas["NativeSampling"]["properties"]


@pytest.mark.parametrize("path", ["/", "/docs", "/openapi.json"])
async def test_the_pages_answer_and_load_nothing_from_elsewhere(app: FastAPI, path: str) -> None:
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://here") as http,
    ):
        answer = await http.get(path)
        assert answer.status_code == 200
        if path == "/":
            assert {"name", "version", "links"} <= answer.json().keys()
            for link in answer.json()["links"]:
                assert (await http.get(link)).status_code in (200, 503), link
        if path == "/docs":
            assets = re.findall(r'(?:src|href)="([^"]+)"', answer.text)
            assert set(assets) == {path for path in DOCS_PATHS if path.startswith("/docs/assets/")}
            for asset in assets:
                assert (await http.get(asset)).status_code == 200
            assert "://" not in answer.text


async def test_the_description_needs_no_key_and_the_index_does(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("key-0123456789abcdef someone\n")
    keys.chmod(0o600)
    for app in (worker_app(keys), build_router_app(LBArgs(api_key_file=keys))):
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://here") as http:
            assert {(await http.get(path)).status_code for path in DOCS_PATHS} == {200}
            assert (await http.get("/")).status_code == 401
