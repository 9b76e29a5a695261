"""Headless browser for tests of the web page. Tests skip without Debian's chromium or playwright."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from playwright.async_api import Browser, Page

PROGRAM = shutil.which("chromium")
# Milliseconds that an expectation may take. Machines are shared.
DEADLINE_MS = 60_000
# Chromium as root has no sandbox.
_ARGUMENTS = ["--no-sandbox", "--disable-dev-shm-usage"]


@dataclass
class OpenPage:
    """Page in a browser, and what it wrote to the console."""

    page: Page
    # Errors and warnings of the console, and exceptions.
    problems: list[str] = field(default_factory=list)
    # Addresses of all requests.
    addresses: list[str] = field(default_factory=list)

    async def violations(self) -> list[str]:
        """Return the broken rules of accessibility, with the elements that break them."""
        axe = pytest.importorskip("axe_playwright_python.base")
        await self.page.evaluate(axe.AXE_SCRIPT)
        found: Mapping[str, Any] = await self.page.evaluate("() => axe.run()")
        return [f"{rule['id']}: {[node['html'] for node in rule['nodes']][:5]}" for rule in found["violations"]]


# Browser for several pages. None: each page starts its own.
_shared: Browser | None = None


@asynccontextmanager
async def shared_browser() -> AsyncIterator[None]:
    """Let all pages of the block, in one event loop, use one browser. It takes 1.3 s to start and to stop one."""
    global _shared
    async with _run_browser() as _shared:
        try:
            yield
        finally:
            _shared = None


@asynccontextmanager
async def _run_browser() -> AsyncIterator[Browser]:
    if PROGRAM is None:
        pytest.skip("chromium is missing; as root on Debian: make system-packages")
    api = pytest.importorskip("playwright.async_api")
    api.expect.set_options(timeout=DEADLINE_MS)
    async with api.async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=PROGRAM, args=_ARGUMENTS)
        try:
            yield browser
        finally:
            await browser.close()


@asynccontextmanager
async def open_browser(url: str, *, fails: bool = False, **options: Any) -> AsyncIterator[OpenPage]:
    """Open `url`. `fails`: the console may have errors. `options`: of the browser's context."""
    async with AsyncExitStack() as stack:
        browser = await stack.enter_async_context(_run_browser()) if _shared is None else _shared
        context = await stack.enter_async_context(await browser.new_context(**options))
        page = await context.new_page()
        page.set_default_timeout(DEADLINE_MS)
        opened = OpenPage(page)
        page.on("console", lambda message: _add_message(opened, message))
        page.on("pageerror", lambda error: opened.problems.append(str(error)))
        page.on("request", lambda request: opened.addresses.append(request.url))
        await page.goto(url)
        yield opened
    assert fails or not opened.problems, opened.problems


def _add_message(opened: OpenPage, message: Any) -> None:
    if message.type in ("error", "warning"):
        opened.problems.append(f"{message.type}: {message.text} ({message.location.get('url')})")
