"""Web pages of other origins that send requests to the router."""

from __future__ import annotations

from pathlib import Path

import aiohttp
import pytest

from support.router_world import answers, serve_pair, start_router, streams

ORIGIN, ALLOWED = "https://chat.example.org", "Access-Control-Allow-Origin"
PREFLIGHT = {
    "Origin": ORIGIN,
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type",
}


@pytest.mark.parametrize(
    ("origins", "allowed"), [((), None), ((ORIGIN,), ORIGIN), (("*",), "*"), (("https://other.org",), None)]
)
async def test_an_answer_and_a_stream_say_which_pages_may_read_them(
    origins: tuple[str, ...], allowed: str | None
) -> None:
    chunks = b"data: 1\n\n", b"data: [DONE]\n\n"
    async with serve_pair(answers({}), streams(*chunks), cors_origins=origins) as pair:
        async with pair.client.get(pair.router + "/health", headers={"Origin": ORIGIN}) as response:
            assert (response.status, response.headers.get(ALLOWED)) == (200, allowed)
        request = pair.client.post(pair.router + "/generate", json={"stream": True}, headers={"Origin": ORIGIN})
        async with request as response:
            assert (await response.read(), response.headers.get(ALLOWED)) == (b"".join(chunks), allowed)


async def test_a_browser_may_ask_first_without_a_key_and_its_page_reads_why_a_key_is_refused(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("alice-0123456789abcdef\n")
    async with (
        start_router(api_key_file=tmp_path / "keys", cors_origins=(ORIGIN,)) as url,
        aiohttp.ClientSession() as client,
    ):
        async with client.options(url + "/v1/chat/completions", headers=PREFLIGHT) as response:
            assert (response.status, response.headers[ALLOWED]) == (200, ORIGIN)
            assert "authorization" in response.headers["Access-Control-Allow-Headers"]
        async with client.options(url + "/generate", headers=PREFLIGHT | {"Origin": "https://evil.org"}) as response:
            assert (response.status, response.headers.get(ALLOWED)) == (400, None)
        async with client.post(url + "/generate", json={}, headers={"Origin": ORIGIN}) as response:
            assert (response.status, response.headers[ALLOWED]) == (401, ORIGIN)
