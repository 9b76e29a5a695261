"""Keys: what their files may hold, who gets in where, and what becomes of the header."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from splitserve.api.api_keys import ApiKeys, read_keys
from splitserve.core.config import ServerConfig
from splitserve.core.errors import ConfigError, WorkerUnavailableError
from splitserve.core.request import DisaggregationMode
from splitserve.router.app import CLIENT_PATHS, CLIENT_PREFIX, OPEN_PATHS, build_router_app
from splitserve.router.args import LBArgs
from splitserve.router.register import deregister_disaggregation_server, register_disaggregation_server
from splitserve.worker.checks import router_key
from splitserve.worker.registration import RouterRegistration
from support.router_world import start_router, start_worker, streams

ALICE, BOB, ROOT = "alice-0123456789abcdef", "bob-0123456789abcdef", "root-0123456789abcdef"
OPERATOR_CALLS = [
    ("GET", "/workers"),
    ("POST", "/workers"),
    ("DELETE", "/workers"),
    ("POST", "/workers/drain"),
    ("POST", "/workers/resume"),
    ("POST", "/register"),
    ("POST", "/deregister"),
    ("POST", "/flush_cache"),
    ("POST", "/abort_request"),
    ("GET", "/server_info"),
    ("GET", "/nowhere"),
]


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(0o600)
    return path


@pytest.fixture
def clients(tmp_path: Path) -> Path:
    return write(tmp_path / "clients", f"# who may ask\n{ALICE} alice\n\n  {BOB}\n")


@pytest.fixture
def operators(tmp_path: Path) -> Path:
    return write(tmp_path / "operators", f"{ROOT} root\n")


async def call(url: str, method: str, path: str, key: str | None = None) -> tuple[int, Any, dict[str, str]]:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    async with (
        aiohttp.ClientSession() as client,
        client.request(method, url + path, data=b"{}" if method == "POST" else None, headers=headers) as response,
    ):
        text = (await response.read()).decode(errors="replace")
        return response.status, text, dict(response.headers)


def test_a_key_is_known_by_its_name_or_its_line(clients: Path) -> None:
    keys = ApiKeys(read_keys(clients, "--api-key-file"))
    assert [keys.holder_of(key) for key in (ALICE, BOB, ROOT, ALICE[:-1], ALICE + "0", "", "é")] == [
        "alice",
        "line-4",
        *[None] * 5,
    ]


def test_a_key_file_that_others_may_read_is_warned_of_once(clients: Path, caplog: pytest.LogCaptureFixture) -> None:
    clients.chmod(0o644)
    for _ in range(3):
        read_keys(clients, "--api-key-file")
    assert caplog.text.count(f"chmod 600 {clients}") == 1


def test_two_keys_of_one_name_both_hold(tmp_path: Path) -> None:
    keys = ApiKeys(read_keys(write(tmp_path / "k", f"{ALICE} a\n{BOB} a\n"), "--api-key-file"))
    assert keys.holder_of(ALICE) == keys.holder_of(BOB) == "a"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no key in it"),
        ("# only words\n", "no key in it"),
        ("short\n", "line 1: a key has at least 16"),
        (f'{ALICE}\nwith-a-quote-"-in-it\n', "line 2: a key has at least 16"),
        (f"{ALICE} a b\n", "line 1: after the key comes one name"),
        (f"{ALICE} a=b\n", "line 1: after the key comes one name"),
        (f"{ALICE} a\n{ALICE} b\n", "line 2: this key has come before"),
    ],
)
def test_a_malformed_key_file_is_refused_without_telling_a_key(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        read_keys(write(tmp_path / "k", text), "--api-key-file")
    assert error.value.message.startswith(f"--api-key-file {tmp_path}")
    assert ALICE not in error.value.message


@pytest.mark.parametrize("option", ["api_key_file", "operator_key_file"])
def test_a_key_file_that_is_not_there_is_named_with_its_option(tmp_path: Path, option: str) -> None:
    with pytest.raises(ConfigError, match=f"--{option.replace('_', '-')} .*No such file"):
        build_router_app(LBArgs(**{option: tmp_path / "none"}))


@pytest.mark.parametrize("authorization", [None, "Bearer", "Bearer ", f"Basic {ALICE}", ALICE, "Bearer no-such-key"])
async def test_without_a_good_key_the_answer_is_401_in_openais_shape(clients: Path, authorization: str | None) -> None:
    headers = {} if authorization is None else {"Authorization": authorization}
    async with (
        start_router(api_key_file=clients) as url,
        aiohttp.ClientSession() as client,
        client.post(url + "/v1/completions", json={"prompt": "a"}, headers=headers) as response,
    ):
        assert (response.status, response.headers["WWW-Authenticate"]) == (401, "Bearer")
        error = (await response.json())["error"]
        assert (error["type"], error["code"], error["param"]) == ("invalid_request_error", "invalid_api_key", None)


async def test_health_and_metrics_are_open_and_nothing_else_is(clients: Path) -> None:
    async with start_router(api_key_file=clients) as url:
        for path in OPEN_PATHS:
            # There is no worker that could be ready.
            assert (await call(url, "GET", path))[0] == (503 if path == "/ready" else 200)
        everything = [*OPERATOR_CALLS, *(("POST", path) for path in CLIENT_PATHS)]
        assert {(await call(url, *one))[0] for one in everything} == {401}
        # What they open is then the routes' business.
        assert 401 not in {(await call(url, *one, ALICE))[0] for one in everything}


async def test_operators_keys_open_everything_and_clients_keys_only_what_is_theirs(
    clients: Path, operators: Path
) -> None:
    async with start_router(api_key_file=clients, operator_key_file=operators) as url:
        for one in OPERATOR_CALLS:
            status, body, _ = await call(url, *one, ALICE)
            assert (status, json.loads(body)["error"]["code"]) == (403, "forbidden")
            assert (await call(url, *one, ROOT))[0] not in (401, 403)
        # The guard does not know the routes, so it does not claim that this one exists.
        assert "is no route for clients" in (await call(url, "POST", "/v1/embeddings", ALICE))[1]
        for path in (*CLIENT_PATHS, f"{CLIENT_PREFIX}org/model"):
            assert (await call(url, "POST", path))[0] == 401
            for key in (ALICE, BOB, ROOT):
                assert (await call(url, "POST", path, key))[0] not in (401, 403)


async def test_where_only_operators_have_keys_clients_need_none(operators: Path) -> None:
    async with start_router(operator_key_file=operators) as url:
        assert (await call(url, "POST", "/generate"))[0] == 503
        assert (await call(url, "GET", "/workers"))[0] == 401
        assert (await call(url, "GET", "/workers", ROOT))[0] == 200


async def test_a_worker_registers_with_its_key_and_is_told_which_option_it_lacks(operators: Path) -> None:
    mode = DisaggregationMode.DECODE
    async with start_router(operator_key_file=operators) as url:
        for key in (None, ALICE):
            with pytest.raises(WorkerUnavailableError, match=r"answered 401.*check --router-key-file"):
                await register_disaggregation_server(mode, 1, None, url, api_key=key)
        await register_disaggregation_server(mode, 1, None, url, api_key=ROOT)
        assert len(json.loads((await call(url, "GET", "/workers", ROOT))[1])["workers"]) == 1
        await deregister_disaggregation_server(mode, 1, None, url, api_key=ROOT)
        assert json.loads((await call(url, "GET", "/workers", ROOT))[1])["workers"] == []


async def test_a_worker_announces_itself_with_the_first_key_of_its_file(operators: Path) -> None:
    key = router_key(ServerConfig(router_key_file=str(operators)))
    assert router_key(ServerConfig()) is None
    async with start_router(operator_key_file=operators, health_interval=60) as url, asyncio.timeout(60):
        registration = RouterRegistration([url], "h", 1, api_key=key)
        registration.enter(DisaggregationMode.DECODE, None)
        while "http://h:1" not in (await call(url, "GET", "/workers", ROOT))[1]:
            pass
        await registration.leave()
        assert "http://h:1" not in (await call(url, "GET", "/workers", ROOT))[1]


@pytest.mark.parametrize("is_checked", [True, False])
async def test_a_key_that_was_checked_does_not_reach_the_workers_and_another_does(
    clients: Path, is_checked: bool
) -> None:
    seen: list[str | None] = []

    async def handler(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        seen.append(request.headers.get("Authorization"))
        return web.json_response({"text": "b"})

    async with (
        start_worker(handler) as worker,
        start_router(workers=(worker.url,), api_key_file=clients if is_checked else None) as url,
    ):
        assert (await call(url, "POST", "/generate", ALICE))[0] == 200
        assert (await call(url, "GET", "/v1/models", ALICE))[0] == 200
    assert seen == ([None, None] if is_checked else [f"Bearer {ALICE}", None])


async def test_a_stream_comes_through_the_guard_as_it_is(clients: Path) -> None:
    chunks = b'data: {"a": 1}\n\n', b"data: [DONE]\n\n"
    async with (
        start_worker(streams(*chunks)) as worker,
        start_router(workers=(worker.url,), api_key_file=clients) as url,
    ):
        assert (await call(url, "POST", "/generate", BOB))[:2] == (200, b"".join(chunks).decode())


async def test_a_worker_with_keys_opens_to_the_routers_key_whatever_the_client_shows(tmp_path: Path) -> None:
    seen: list[tuple[str, str | None]] = []

    async def handler(request: web.Request, _: dict[str, Any]) -> web.StreamResponse:
        seen.append((request.path, request.headers.get("authorization")))
        return web.json_response({"text": "b"})

    keys = write(tmp_path / "workers", f"{ROOT}\n{ALICE}\n")
    async with (
        start_worker(handler) as worker,
        start_router(workers=(worker.url,), worker_key_file=keys, health_interval=60) as router,
    ):
        assert (await call(router, "POST", "/generate", BOB))[0] == 200
        assert (await call(router, "GET", "/v1/models"))[0] == 200
        assert (await call(router, "POST", "/flush_cache"))[0] == 200
    assert {"/generate", "/v1/models", "/flush_cache"} <= {path for path, _ in seen}
    assert {key for _, key in seen} == {f"Bearer {ROOT}"}


def test_a_router_without_its_workers_key_does_not_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--worker-key-file"):
        build_router_app(LBArgs(worker_key_file=tmp_path / "nothing"))
