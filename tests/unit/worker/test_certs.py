"""`certs init`, and what its certificates permit over real sockets: a worker that requires them, and its clients."""

from __future__ import annotations

import asyncio
import ssl
import stat
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from splitserve.api.http_server import HttpServer, bind, port_of
from splitserve.api.tls import tls_files, worker_tls
from splitserve.core.errors import ConfigError
from splitserve.core.request import DisaggregationMode
from splitserve.deploy.certs import init_certs
from splitserve.router.args import LBArgs
from splitserve.router.health import HealthMonitor
from splitserve.router.http_client import BrokenConnectionError, HttpClient, UpstreamResponse
from splitserve.router.metrics import RouterMetrics
from splitserve.router.registry import WorkerRegistry
from splitserve.router.upstream import Upstream
from splitserve.tools.client import RequestFailedError, open_session, send

NAMES = {f"{name}{end}" for name in ("ca", "router", "worker") for end in (".pem", "-key.pem")}


@pytest.fixture(scope="module")
def certs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certs")
    init_certs(folder, ["worker.example"], days=2, force=False)
    return folder


@pytest.fixture(scope="module")
def other_certs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("other_certs")
    init_certs(folder, [], days=2, force=False)
    return folder


def test_only_the_owner_reads_the_keys(certs: Path) -> None:
    assert {path.name for path in certs.iterdir()} == NAMES
    for path in certs.glob("*-key.pem"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_existing_certificates_are_replaced_only_by_force(tmp_path: Path) -> None:
    init_certs(tmp_path, [], days=1, force=False)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(ConfigError, match=r"ca\.pem.* exist: .*--force"):
        init_certs(tmp_path, [], days=1, force=False)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    init_certs(tmp_path, [], days=1, force=True)
    after = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert after.keys() == before.keys() == NAMES
    assert not set(after.values()) & set(before.values())


@pytest.mark.parametrize(
    ("hosts", "days", "message"),
    [
        (["a b"], 1, "--host 'a b'"),
        (["h:80"], 1, "--host 'h:80'"),
        (["h\nbasicConstraints=CA:TRUE"], 1, "--host"),
        ([], 0, r"--days 0: give 1 to 36500"),
        ([], 36_501, r"--days 36501: give 1 to 36500"),
        ([], 99_999_999, r"--days 99999999: give 1 to 36500"),
    ],
)
def test_wrong_options_create_nothing(hosts: list[str], days: int, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        init_certs(tmp_path / "new", hosts, days=days, force=False)
    assert not (tmp_path / "new").exists()


def test_a_failure_of_openssl_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "openssl"
    program.write_text("#!/bin/sh\nexit 1\n")
    program.chmod(0o700)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="exit code 1"):
        init_certs(tmp_path / "parent" / "new", [], days=1, force=False)
    assert not (tmp_path / "parent").exists()


def test_without_openssl_the_remedy_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="install it"):
        init_certs(tmp_path / "new", [], days=1, force=False)


@asynccontextmanager
async def worker(folder: Path, *, has_authority: bool = True) -> AsyncIterator[int]:
    """The port of a server with the certificate of a worker."""

    async def health(_: Request) -> Response:
        return PlainTextResponse("served")

    files = tls_files(folder / "worker.pem", folder / "worker-key.pem", folder / "ca.pem" if has_authority else None)
    sock = bind("0.0.0.0", 0)
    server = HttpServer(Starlette(routes=[Route("/health", health)]), sock, files)
    await server.start()
    try:
        yield port_of(sock)
    finally:
        await server.stop(1.0)


async def answer(url: str, tls: ssl.SSLContext | None) -> bytes:
    """Send a request as the router does. Raises BrokenConnectionError."""
    client = HttpClient(5.0, tls)
    sent = client.send("GET", url, "/health", None, {}, UpstreamResponse(10.0, 10.0))
    try:
        await sent.head()
        return await sent.read()
    finally:
        sent.close()
        await client.close()


def router_of(folder: Path, own: Path | None = None) -> ssl.SSLContext | None:
    """The context of a router that trusts the authority in `folder` and presents its certificate in `own`."""
    names = (None, None) if own is None else (own / "router.pem", own / "router-key.pem")
    return worker_tls(folder / "ca.pem", *names)


async def test_the_right_certificates_are_served(certs: Path) -> None:
    async with worker(certs) as port:
        for host in ("127.0.0.1", "localhost"):
            assert await answer(f"https://{host}:{port}", router_of(certs, certs)) == b"served"


async def test_without_an_authority_clients_need_no_certificate(certs: Path) -> None:
    async with worker(certs, has_authority=False) as port:
        assert await answer(f"https://127.0.0.1:{port}", router_of(certs)) == b"served"


async def test_a_command_names_the_certificate_that_it_does_not_trust(certs: Path) -> None:
    async with worker(certs, has_authority=False) as port, open_session() as session:
        with pytest.raises(RequestFailedError, match=rf"certificate of 127\.0\.0\.1:{port} .*set SSL_CERT_FILE"):
            await send(session, f"https://127.0.0.1:{port}/health")


async def test_plain_http_is_rejected(certs: Path) -> None:
    async with worker(certs) as port:
        with pytest.raises(BrokenConnectionError):
            await answer(f"http://127.0.0.1:{port}", None)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /health HTTP/1.1\r\nHost: h\r\n\r\n")
        async with asyncio.timeout(60):
            assert b"served" not in await reader.read()
        writer.close()


async def test_a_client_without_a_certificate_is_rejected(certs: Path) -> None:
    async with worker(certs) as port:
        with pytest.raises(BrokenConnectionError):
            await answer(f"https://127.0.0.1:{port}", router_of(certs))


async def test_a_client_of_another_authority_is_rejected(certs: Path, other_certs: Path) -> None:
    async with worker(certs) as port:
        with pytest.raises(BrokenConnectionError):
            await answer(f"https://127.0.0.1:{port}", router_of(certs, other_certs))


async def test_a_client_rejects_a_worker_of_another_authority(certs: Path, other_certs: Path) -> None:
    async with worker(other_certs) as port:
        for tls in (router_of(certs, other_certs), None):
            with pytest.raises(BrokenConnectionError, match="CERTIFICATE_VERIFY_FAILED"):
                await answer(f"https://127.0.0.1:{port}", tls)


async def test_a_client_rejects_a_worker_with_another_host_name(certs: Path) -> None:
    async with worker(certs) as port:
        # Its certificate is for localhost, 127.0.0.1 and worker.example.
        with pytest.raises(BrokenConnectionError, match="mismatch"):
            await answer(f"https://127.0.0.2:{port}", router_of(certs, certs))


async def test_the_router_logs_once_why_a_worker_is_not_reached(
    certs: Path, other_certs: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with worker(other_certs) as port:
        registry = WorkerRegistry(LBArgs())
        registry.add(f"https://127.0.0.1:{port}", DisaggregationMode.NULL)
        upstream = Upstream(LBArgs(), {}, router_of(certs, certs))
        try:
            asked = registry.all()[0]
            for _ in range(2):
                await HealthMonitor(registry, upstream, RouterMetrics(), LBArgs())._check(asked)
        finally:
            await upstream.close()
    lines = [message for message in caplog.messages if "cannot be reached" in message]
    assert len(lines) == 1
    assert "CERTIFICATE_VERIFY_FAILED" in lines[0]
    assert not asked.healthy


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("none.pem", None, None), "--worker-ssl-ca-certs .*none.pem: No such file"),
        (("ca-key.pem", None, None), "--worker-ssl-ca-certs .*ca-key.pem"),
        (("ca.pem", "router.pem", None), "need each other"),
        (("ca.pem", "router.pem", "worker-key.pem"), "--worker-ssl-keyfile .* cannot be used: .*MISMATCH"),
        ((None, "router.pem", "none.pem"), "cannot be used: No such file"),
    ],
)
def test_files_of_a_client_that_do_not_fit_are_refused(
    names: tuple[str | None, ...], message: str, certs: Path
) -> None:
    ca, cert, key = (None if name is None else certs / name for name in names)
    with pytest.raises(ConfigError, match=message):
        worker_tls(ca, cert, key)


@pytest.mark.parametrize(
    ("ca_certs", "message"), [("none.pem", "--ssl-ca-certs .*No such file"), ("ca-key.pem", "--ssl-ca-certs")]
)
def test_authorities_of_a_server_that_cannot_be_read_are_refused(ca_certs: str, message: str, certs: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        tls_files(certs / "worker.pem", certs / "worker-key.pem", certs / ca_certs)
    with pytest.raises(ConfigError, match="--ssl-ca-certs needs --ssl-certfile"):
        tls_files(None, None, certs / "ca.pem")
