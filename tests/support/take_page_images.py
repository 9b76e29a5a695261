"""Program that takes the pictures of docs/page.md with generated data. `make page-images` runs it."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path

from playwright.async_api import Page, expect

from support.browser import open_browser
from support.fake_router import keep_moving, start_fake_router

FOLDER = Path(__file__).parents[2] / "docs" / "images"
SIZE = {"width": 1100, "height": 640}


async def take(page: Page, name: str) -> None:
    await page.screenshot(path=FOLDER / f"page-{name}.png", animations="disabled")


async def main() -> None:
    async with start_fake_router(num_tokens=60) as fake:
        fake.add_requests(2000)
        moving = asyncio.create_task(keep_moving(fake, num_running=24))
        async with open_browser(fake.url, viewport=SIZE, color_scheme="light") as opened:
            page = opened.page
            await expect(page.locator("#connection")).to_have_text("live")
            fake.publish(events=[{"kind": "worker_joined", "text": "A decode worker joined."}])
            await expect(page.locator(".events li")).to_have_count(1)
            await take(page, "now")
            await page.goto(f"{fake.url}/#requests/request-000040")
            await page.locator(".stage-row", has_text="transfer").first.locator("summary").click()
            await take(page, "requests")
            await page.goto(f"{fake.url}/#charts")
            await expect(page.locator(".chart p", has_text="tokens per s")).to_be_visible()
            await page.evaluate("scrollTo(0, 0)")
            await take(page, "charts")
            await page.goto(f"{fake.url}/#operate")
            await page.get_by_role("button", name="Drain 10.0.0.3:8000").click()
            await take(page, "operate")
            await page.keyboard.press("Escape")
            await page.goto(f"{fake.url}/#chat")
            await page.get_by_label("Message", exact=True).fill("What does a decode worker do?")
            await page.keyboard.press("Enter")
            await expect(page.locator(".panel .waterfall")).to_be_visible()
            await take(page, "chat")
        moving.cancel()
        with suppress(asyncio.CancelledError):
            await moving


if __name__ == "__main__":
    asyncio.run(main())
