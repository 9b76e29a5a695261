"""The web page over HTTP: when it is served, with which headers, and what its files contain."""

from __future__ import annotations

import re
from pathlib import Path

import aiohttp
import pytest

import splitserve.router.page as page
from splitserve.core.timeline import Stage
from support.router_world import start_router

FOLDER = Path(page.__file__).with_name("ui")
BROWSER = {"Accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
FILES = sorted(FOLDER.iterdir())
OWN_SCRIPTS = [path for path in FILES if path.suffix == ".js" and path.name != "uplot.min.js"]
# Properties and functions that make HTML or code of text.
SINKS = re.compile(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|\beval\(|new Function|srcdoc")


async def get(url: str, **headers: str) -> tuple[int, bytes, aiohttp.typedefs.LooseHeaders]:
    async with aiohttp.ClientSession() as client, client.get(url, headers=headers) as response:
        return response.status, await response.read(), response.headers


async def test_a_browser_gets_the_page_and_other_clients_the_index() -> None:
    async with start_router() as router:
        _, body, headers = await get(router + "/", **BROWSER)
        assert body == (FOLDER / "index.html").read_bytes()
        assert (headers["Content-Type"], headers["Vary"]) == ("text/html; charset=utf-8", "Accept")
        for accept in ("*/*", "application/json"):
            _, body, headers = await get(router + "/", Accept=accept)
            assert headers["Content-Type"] == "application/json"


async def test_without_the_page_a_browser_gets_the_index_too() -> None:
    async with start_router(ui=False) as router:
        assert (await get(router + "/", **BROWSER))[2]["Content-Type"] == "application/json"
        assert (await get(router + "/ui/app.js"))[0] == 404


async def test_the_page_needs_no_key_and_the_index_does(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("client-key-0123456789")
    keys.chmod(0o600)
    async with start_router(api_key_file=keys) as router:
        assert (await get(router + "/", **BROWSER))[0] == 200
        assert (await get(router + "/ui/app.js"))[0] == 200
        assert (await get(router + "/"))[0] == 401
        assert (await get(router + "/v1/traces", **BROWSER))[0] == 401


async def test_a_stored_file_is_sent_again_only_if_it_changed() -> None:
    async with start_router() as router:
        _, _, headers = await get(router + "/ui/app.js")
        assert headers["Cache-Control"] == "no-cache"
        status, body, _ = await get(router + "/ui/app.js", **{"If-None-Match": headers["ETag"]})
        assert (status, body) == (304, b"")
        assert (await get(router + "/ui/app.js", **{"If-None-Match": '"other"'}))[0] == 200


@pytest.mark.parametrize("name", ["missing.js", "../page.py", "%2e%2e/page.py", ""])
async def test_other_names_are_not_files(name: str) -> None:
    async with start_router() as router:
        status, body, _ = await get(f"{router}/ui/{name}")
        assert status == 404
        assert b"import" not in body


async def test_the_policy_forbids_other_servers_inline_code_and_html_from_text() -> None:
    async with start_router() as router:
        policy = (await get(router + "/", **BROWSER))[2]["Content-Security-Policy"]
    assert {"default-src 'none'", "require-trusted-types-for 'script'", "frame-ancestors 'none'"} <= set(
        policy.split("; ")
    )
    assert "unsafe" not in policy
    assert not re.search(r"https?:", policy)


def test_all_files_together_are_smaller_than_300_kb() -> None:
    assert sum(path.stat().st_size for path in FILES) < 300_000


@pytest.mark.parametrize("path", [*OWN_SCRIPTS, FOLDER / "index.html", FOLDER / "style.css"], ids=lambda p: p.name)
def test_a_file_has_no_address_of_another_server_and_no_html_from_text(path: Path) -> None:
    text = path.read_text().replace("http://www.w3.org/2000/svg", "")
    assert not re.findall(r"""["'(]\s*(?:https?:)?//[^"')]*""", text)
    assert not SINKS.findall(text)
    assert "\u2014" not in text
    assert len(text.splitlines()) <= 350


def test_the_page_explains_every_stage() -> None:
    explained = set(re.findall(r"^  (\w+):", (FOLDER / "stages.js").read_text(), re.MULTILINE))
    assert explained == {stage.value for stage in Stage}
