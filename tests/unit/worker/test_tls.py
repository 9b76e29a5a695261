"""TLS: accepted files, the protocol of a server with them, and the certificates that a client trusts."""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import certifi
import pytest

from splitserve.api.http_server import HttpServer, bind, port_of
from splitserve.api.tls import TlsFiles, tls_files, trust_only
from splitserve.core.errors import ConfigError
from splitserve.router.app import build_router_app
from splitserve.router.args import LBArgs

FOLDER = Path(__file__).parent / "tls"
# Self-signed for 127.0.0.1.
CERT, KEY, OTHER_KEY = FOLDER / "cert.pem", FOLDER / "key.pem", FOLDER / "other_key.pem"


def test_files_that_fit_are_taken() -> None:
    assert tls_files(CERT, KEY) == TlsFiles(CERT, KEY)
    assert tls_files(None, None) is None


@pytest.mark.parametrize(
    ("certfile", "keyfile", "message"),
    [
        (CERT, OTHER_KEY, "cannot be used together .*MISMATCH"),
        (KEY, KEY, "cannot be used together"),
        (CERT, CERT, "cannot be used together"),
        (CERT, FOLDER, "--ssl-keyfile .*Is a directory"),
    ],
)
def test_files_that_do_not_fit_are_refused(certfile: Path, keyfile: Path, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        tls_files(certfile, keyfile)


@asynccontextmanager
async def serving() -> AsyncIterator[int]:
    """The port of a router with the certificate."""
    sock = bind("127.0.0.1", 0)
    server, port = HttpServer(build_router_app(LBArgs()), sock, tls_files(CERT, KEY)), port_of(sock)
    await server.start()
    try:
        yield port
    finally:
        await server.stop(1.0)


async def test_a_server_with_a_certificate_speaks_https_and_nothing_else() -> None:
    async with serving() as port, aiohttp.ClientSession() as client:
        trusted = ssl.create_default_context(cafile=CERT)
        async with client.get(f"https://127.0.0.1:{port}/health", ssl=trusted) as response:
            assert response.status == 200
        with pytest.raises(aiohttp.ClientError):
            await client.get(f"http://127.0.0.1:{port}/health")


async def test_a_known_certificate_is_trusted_whatever_its_name_and_no_other_one() -> None:
    another = certifi.contents().partition("-----END CERTIFICATE-----\n")
    first, second = CERT.read_bytes(), "".join(another[:2]).encode()
    async with serving() as port, aiohttp.ClientSession() as client:
        # The certificate is for 127.0.0.1.
        url = f"https://localhost:{port}/health"
        async with client.get(url, ssl=trust_only(b"of the router\n" + first + second, "x")) as response:
            assert response.status == 200
        with pytest.raises(aiohttp.ClientConnectorCertificateError):
            await client.get(url, ssl=trust_only(second + first, "x"))


@pytest.mark.parametrize("content", [b"", b"\xff", KEY.read_bytes(), CERT.read_bytes()[:200]])
def test_what_is_no_certificate_is_refused(content: bytes) -> None:
    with pytest.raises(ConfigError, match="--router-certificate f: no PEM certificate"):
        trust_only(content, "--router-certificate f")
